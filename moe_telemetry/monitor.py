"""watch() and Monitor: the objects that a training loop holds.

    with mt.watch(model, "prometheus", every_n_steps=10) as monitor:
        for step, batch in enumerate(loader):
            train(batch)
            monitor.step(step)

Everything here runs on the training thread; exporters have threads of their own.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from moe_telemetry.attachment import Attachment
from moe_telemetry.cadence import Cadence
from moe_telemetry.config import TelemetryConfig
from moe_telemetry.counters import UNCOUNTED_SLOT
from moe_telemetry.discovery import Routers, no_router_error
from moe_telemetry.errors import ConfigError, LifecycleError, ReductionError, TelemetryError
from moe_telemetry.identity import RouterKey
from moe_telemetry.naming import unwrap
from moe_telemetry.plugins import Exporter, resolve_exporter, warn_of_misspelt_variables
from moe_telemetry.recording import Recording
from moe_telemetry.reduce import Reducer, introduce
from moe_telemetry.replay import Routes
from moe_telemetry.reporting import Reporting
from moe_telemetry.route_control import RouteControl
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.taps import Tap
from moe_telemetry.topology import Ranks
from moe_telemetry.trace.manifest import Manifest
from moe_telemetry.tracing import Trace, TraceOptions, traced_routers

__all__ = ["Monitor", "watch"]

# one that exports is closed at exit even if nobody holds it; one that does not goes with its model
_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_exporting_monitors: set[Monitor] = set()
_CLOSE_SECONDS = 10.0


def watch(
    model: nn.Module | Sequence[nn.Module],
    *exporters: str | Exporter,
    config: TelemetryConfig | None = None,
    routers: Routers | None = None,
    **overrides: Any,  # noqa: ANN401  # fields of TelemetryConfig, each of its own type
) -> Monitor:
    """Find the routers of a model, hook them, and allocate their counters.

    A collective call where `torch.distributed` is initialised: every rank of the group calls it.

    Args:
        model: the model, or a list of modules (the chunks of a virtual pipeline).
        exporters: where snapshots go: names such as `"prometheus"`, or exporter objects.
        config: all settings; by default those of `MOE_TELEMETRY_*` variables.
        routers: routers that no adapter knows, by module name or pattern; a number stands for
            `RouterSpec(num_experts=number)`.
        overrides: single fields of `TelemetryConfig`.

    Raises:
        ConfigError: a setting is wrong.
        NoRouterFoundError: no rank has a router.
        RouterKeyError: two routers have one key.
        LifecycleError: the model is watched already, or an exporter is in use.
        ExporterError: an exporter is unknown, or its package is missing.
        ReductionError: another rank failed, differs, or does not come.
    """
    settings = (config or TelemetryConfig.from_env()).with_overrides(overrides)
    resolved = [resolve_exporter(exporter) for exporter in exporters]
    _require_unused([exporter for _, exporter in resolved])
    monitor = Monitor([model] if isinstance(model, nn.Module) else list(model), resolved, settings, routers)
    if monitor._seat.leads_job:  # noqa: SLF001  # one rank reports
        warn_of_misspelt_variables(exporters)
    return monitor


class Monitor:
    """Counts, reduces and exports what the routers of one model do; made by `watch`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        exporters: Sequence[tuple[str, Exporter]],
        config: TelemetryConfig,
        routers: Routers | None = None,
    ) -> None:
        self._config = config
        self._is_closed = False
        self._model_name = type(unwrap("", models[0])[1]).__name__ if models else ""
        self._process = os.getpid()
        self._exporters = [exporter for _, exporter in exporters]
        ranks = Ranks(config.process_group)
        attachment, error = _attach(models, routers, config)
        self._attachment = attachment
        try:
            seat, layout, self._run = introduce(ranks, config, traced_routers(self._taps), error)
            if not layout.routers:
                raise no_router_error(models)
            reducer = Reducer(ranks, seat, layout, list(self._taps.values()), config)
        except TelemetryError:
            attachment.detach()
            raise
        self._seat = seat
        self._token_group = ranks.lowest_of(config.token_replicas)
        self._trace: Trace | None = None
        self._routes = RouteControl(models, self._taps, config)
        self._reporting = Reporting(reducer, self._routes, seat, self._run, exporters, config)
        self._cadence = Cadence(config.every_n_steps)
        self._num_snapshots = 0
        _open_monitors.add(self)
        if exporters:
            _exporting_monitors.add(self)
            # the last to register is the first to run: before what stops the libraries that exporters use
            atexit.unregister(_close_open_monitors)
            atexit.register(_close_open_monitors)

    @property
    def _taps(self) -> Mapping[RouterKey, Tap]:
        return self._attachment.taps

    @property
    def routers(self) -> tuple[RouterKey, ...]:
        """Every router of the job, in the order of the model, whichever rank owns it."""
        return tuple(self._reporting.reducer.layout.routers)

    def step(self, step: int | None = None) -> Snapshot | None:
        """Mark the end of an optimizer step; call it on every rank.

        Whenever the step number passes a multiple of `every_n_steps`, the counts of all ranks are added
        up and exported.

        Args:
            step: the number of the step; None counts from 1.

        Returns:
            The snapshot, on ranks that export, at steps that reduce; else None.

        Raises:
            LifecycleError: the monitor is closed.
        """
        self._require_open()
        started = time.perf_counter()
        snapshot = self._advance(step)
        self._reporting.overhead_seconds += time.perf_counter() - started
        return snapshot

    def _advance(self, step: int | None) -> Snapshot | None:
        is_due = self._cadence.advance(step)
        if self._trace is not None:
            self._trace.end_step(self._cadence.step)
        self._attachment.report_silent_routers()
        self._attachment.sampling.is_on = self._cadence.is_due_next
        self._routes.sample_next_step(wanted=self._cadence.is_due_next)
        if not is_due:
            return None
        self._attachment.follow_rebuilt_modules()
        snapshot = self._reporting.report(self._cadence.meeting, self._cadence.step, self._slots)
        return snapshot if self._seat.leads_node else None

    def snapshot(self) -> Snapshot:
        """Add up the counts of all ranks now; a collective call: every rank makes it.

        The window of the next snapshot begins here.

        Raises:
            LifecycleError: the monitor is closed.
            ReductionError: a rank does not come within `rank_timeout_seconds`.
        """
        self._require_open()
        self._num_snapshots += 1
        snapshot = self._reporting.reduce(f"snapshot/{self._num_snapshots}", self._cadence.step, self._slots)
        if snapshot is None:
            raise ReductionError("snapshot() needs every rank to call it; the log names the ranks that did not come")
        return snapshot

    @property
    def _slots(self) -> dict[str, int]:
        return {name: slot for slot, name in enumerate(self._attachment.stages.names)}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Count forwards inside the context under `stage=name`, whatever `module.training` says.

        Raises:
            ConfigError: the name is empty, or one too many for a monitor (seven).
        """
        self._require_open()
        if not name:
            raise ConfigError("stage(''): expected a name such as 'rollout'")
        stages = self._attachment.stages
        return stages.all_to(stages.slot_of(name))

    def pause(self) -> AbstractContextManager[None]:
        """Count nothing inside the context."""
        self._require_open()
        return self._attachment.stages.all_to(UNCOUNTED_SLOT)

    def record(self) -> AbstractContextManager[Recording]:
        """Keep what the routers choose inside the context; its value has `.routes()`, for `replay` or a file.

        In eager mode; recomputations under activation checkpointing are left out.
        """
        self._require_open()
        return self._routes.record()

    def replay(self, routes: Routes) -> AbstractContextManager[None]:
        """Have the routers use these experts inside the context, one `with` block a microbatch.

        The experts' weights are formed by the router from its live scores, so gradients reach it. Every
        row is compared with the router's own choice and counted (`moe_replay_*`). A row that holds no
        whole route falls back to the router's own choice. Recomputation under activation checkpointing
        uses the same rows, also when the backward pass comes after the block.

        Args:
            routes: for every router of this rank: one route a row (batch-first, or packed), or, where the
                model is given an attention mask `[B, S]`, one route a real token of B sequences.

        Raises:
            RoutesError: the routes are of another model or, in the forward, of another number of tokens;
                or a router of this kind cannot be replayed into.
            LifecycleError: other routes are in force, or the monitor is closed.
        """
        self._require_open()
        return self._routes.use(routes, compares_only=False)

    def check(self, routes: Routes) -> AbstractContextManager[None]:
        """Compare these routes with the routers' own choice inside the context, and change nothing.

        Arguments and errors are those of `replay`; every router can be checked.
        """
        self._require_open()
        return self._routes.use(routes, compares_only=True)

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        max_steps: int | None = None,
        max_tokens_per_step: int | None = None,
        scores: bool = False,
        hidden_states: bool = False,
        router_weights: bool = False,
        diagnostics: bool = False,
        every_n_steps: int = 1,
    ) -> Trace:
        """Write what every router call chooses to files, in training and inference alike, from now on.

        The trace ends after `max_steps`, at the end of a `with` block, or by `close()`. Calls belong to the
        number that the next `step(number)` says, so inference calls `step()` after each batch. Every rank
        may trace into the same folder. A slow or failing disk loses calls, and never holds up the model;
        `left_out` counts them. See docs/traces.md for the files.

        Args:
            path: a folder that holds no trace yet.
            max_steps: steps to capture; None until it is closed.
            max_tokens_per_step: rows of each router and step to keep, the first ones; None for all.
            scores: keep the routers' scores `[T, E]`.
            hidden_states: keep the routers' input `[T, H]`.
            router_weights: keep the routers' weight `[E, H]` and expert bias, once a step.
            diagnostics: keep `build_router_diagnostics` of every call, `[B, 7, E]`.
            every_n_steps: capture one step in so many, the first one first.

        Raises:
            ConfigError: an option is wrong.
            TraceError: the folder holds a trace or cannot be written to, or pyarrow is missing.
            LifecycleError: a trace is running already, or the monitor is closed.
        """
        self._require_open()
        if self._trace is not None and self._trace.is_running:
            raise LifecycleError(f"a trace is running already, to {self._trace.path}: close() it first")
        options = TraceOptions(
            max_steps=max_steps,
            max_tokens_per_step=max_tokens_per_step,
            every_n_steps=every_n_steps,
            scores=scores,
            hidden_states=hidden_states,
            router_weights=router_weights,
            diagnostics=diagnostics,
        )
        self._trace = Trace(
            path,
            options,
            self._manifest(),
            self._taps,
            stages=self._attachment.stages,
            mask=self._attachment.mask,
            coming_step=lambda: self._cadence.coming,
        )
        return self._trace

    def _manifest(self) -> Manifest:
        return Manifest(
            run=self._run,
            model=self._model_name,
            rank=self._seat.rank,
            world_size=self._seat.num_ranks,
            token_group=self._token_group,
            routers=self._reporting.reducer.layout.traced,
        )

    def valid_tokens(self, mask: Tensor) -> AbstractContextManager[None]:
        """State which tokens of the forwards inside are real, in place of the model's `attention_mask`.

        Args:
            mask: True (or non-zero) for real tokens, `[B, S]` or `[T]`, on the model's device.

        Raises:
            MaskError: the mask has another number of dimensions, or, in the forward, another size.
        """
        self._require_open()
        return self._attachment.mask.state(mask)

    def observe(
        self,
        layer: int | str | RouterKey,
        expert_ids: Any,  # noqa: ANN401  # a tensor, an array, or nested lists
        *,
        scores: Tensor | None = None,
        valid: Tensor | None = None,
        training: bool = True,
    ) -> None:
        """Count one router call by hand: an engine's `routed_experts`, or a fused kernel's choice.

        Args:
            layer: the router: its key, `"block.layer"`, or the number of a decoder layer.
            expert_ids: integer ids `[..., K]`, of any integer dtype; -1 for a choice that was not made.
            scores: float `[..., E]`, the scores that the choice was made by; None leaves score statistics out.
            valid: True for real tokens, `[T]` or `[B, S]`; None where all are.
            training: whether the call counts as `train` or as `eval`, outside of `stage()`.

        Raises:
            ConfigError: no such router, or ids that are no integers.
            MaskError: `valid` is of another size.
        """
        self._require_open()
        key = _key_of(layer)
        if key not in self._taps:
            raise ConfigError(f"observe: no router {key} on this rank; it has {', '.join(map(str, self._taps))}")
        self._taps[key].feed(expert_ids, scores, valid, training=training)

    def router_diagnostics(self) -> dict[RouterKey, Tensor]:
        """Return what `build_router_diagnostics` says of the last microbatch, of every router of this rank.

        Needs `per_sequence=True`. Tensors are float32 `[B, 7, E]` on the routers' devices, one row a
        sequence in the order of the batch; without a mask `[B, S]` under `torch.compile`, all tokens are one
        sequence. Routers that had no call yet are left out. A router that does not show its scores has NaN
        in the channels that need them, and a warning names these.

        Raises:
            ConfigError: the monitor was made without `per_sequence=True`.
        """
        if not self._config.per_sequence:
            raise ConfigError("router_diagnostics() needs watch(..., per_sequence=True)")
        kept = {key: tap.last.take() for key, tap in self._taps.items() if tap.last is not None}
        return {key: tensor for key, tensor in kept.items() if tensor is not None}

    def close(self) -> None:
        """Reduce and export a last time, flush every exporter, and leave the model as it was.

        Runs by itself at the end of a `with` block and of the process; a second call does nothing.
        Never raises: what cannot be done is logged.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        _open_monitors.discard(self)
        _exporting_monitors.discard(self)
        if self._trace is not None:
            self._trace.close()
        self._routes.close()
        self._attachment.detach()
        self._reporting.finish(self._cadence.step, self._slots, _CLOSE_SECONDS)

    def __enter__(self) -> Monitor:
        """Return the monitor itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the monitor; after an exception, without much waiting for ranks that may know nothing of it."""
        if error is not None:
            self._reporting.reducer.hurry()
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise LifecycleError("this monitor is closed; watch() the model again to go on counting")


def _require_unused(exporters: Sequence[Exporter]) -> None:
    """Refuse an exporter of two monitors: each would show its own numbers, and the first to end would close it."""
    open_here = [monitor for monitor in _open_monitors if monitor._process == os.getpid()]  # noqa: SLF001  # ours
    in_use = [exporter for monitor in open_here for exporter in monitor._exporters]  # noqa: SLF001  # ours
    for exporter in exporters:
        if any(exporter is other for other in in_use):
            raise LifecycleError(
                f"this {type(exporter).__name__} is in use already: give every monitor exporters of its own, "
                "or close() the other monitor first"
            )
        in_use.append(exporter)


def _attach(
    models: Sequence[nn.Module], routers: Routers | None, config: TelemetryConfig
) -> tuple[Attachment, Exception | None]:
    """Attach to the models; on failure return an empty attachment and the error, for all ranks to hear."""
    try:
        return Attachment(models, routers, scores=config.scores, per_sequence=config.per_sequence), None
    except TelemetryError as error:
        return Attachment([]), error


def _key_of(layer: int | str | RouterKey) -> RouterKey:
    if isinstance(layer, int):
        return RouterKey("decoder", layer)
    return RouterKey.parse(layer) if isinstance(layer, str) else layer


@atexit.register
def _close_open_monitors() -> None:
    for monitor in list(_open_monitors):
        monitor.close()
