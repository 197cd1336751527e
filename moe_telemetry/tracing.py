"""Trace: what `monitor.trace(...)` returns, from its start to the last file.

Routers hand their calls to a `StepCapture`; at the end of a step they get its number and go to the writer's
thread. Nothing here waits for the device or the disk, until `close()`.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moe_telemetry.errors import ConfigError, TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.masks import TokenMask
from moe_telemetry.route_capture import RouterCapture, StepCapture
from moe_telemetry.stages import StageSlots
from moe_telemetry.taps import Tap
from moe_telemetry.trace.calls import Budget
from moe_telemetry.trace.manifest import TENSORS, LeftOut, Manifest, TracedRouter

if TYPE_CHECKING:
    from moe_telemetry.trace.writer import RouteWriter

__all__ = ["WAITING_BYTES", "Trace", "TraceOptions", "traced_routers"]

WAITING_BYTES = 256 * 2**20
"""Memory that captured calls may take before they are on the disk; calls beyond it are dropped and counted."""

_logger = logging.getLogger("moe_telemetry")
_CLOSE_SECONDS = 10.0
# the writer's thread holds its trace until all of it is on the disk
_unfinished: weakref.WeakSet[Trace] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """What to capture. Raises `ConfigError` naming the option, the value and what is allowed."""

    max_steps: int | None = None
    """Captured steps after which the trace ends by itself; None goes on until `close()`."""
    max_tokens_per_step: int | None = None
    """Rows of each router and step that are kept, the first ones; None keeps all."""
    every_n_steps: int = 1
    """One step in this many is captured, the first one first."""
    scores: bool = False
    hidden_states: bool = False
    router_weights: bool = False
    diagnostics: bool = False

    def __post_init__(self) -> None:
        """Check every option."""
        for name in ("max_steps", "max_tokens_per_step", "every_n_steps"):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_number and (value is not None or name == "every_n_steps"):
                allowed = "a whole number, 1 or more" + ("" if name == "every_n_steps" else ", or None")
                raise ConfigError(f"trace: {name}={value!r}: expected {allowed}")
        for name in TENSORS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"trace: {name}={getattr(self, name)!r}: expected True or False")

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of what is captured beside the routes."""
        return tuple(name for name in TENSORS if getattr(self, name))


class Trace:
    """A capture of routes that runs, or has ended; made by `Monitor.trace`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: TraceOptions,
        manifest: Manifest,
        taps: Mapping[RouterKey, Tap],
        *,
        stages: StageSlots,
        mask: TokenMask,
        coming_step: Callable[[], int],
    ) -> None:
        self.path = _local_path(path)
        """The folder of the trace's files."""
        self.is_running = False
        """Whether router calls are still captured."""
        self._options = options
        self._manifest = _with_options(manifest, options)
        self._taps = taps
        self._coming_step = coming_step
        self._process = os.getpid()
        budget = Budget(WAITING_BYTES)
        self._step = StepCapture(stages, mask, budget, tensors=options.tensors, max_tokens=options.max_tokens_per_step)
        self._captures = {key: RouterCapture(tap.site, self._step) for key, tap in taps.items()}
        self._num_ended = self._num_captured = 0
        self._has_reported = False
        self._writer = _start_writer(self.path, self._manifest, budget, self._describe)
        for key, tap in taps.items():
            tap.capture = self._captures[key]
        self.is_running = True
        _unfinished.add(self)

    @property
    def left_out(self) -> LeftOut:
        """What was seen so far and not written, by the reason."""
        step = self._step
        return LeftOut(
            calls_behind=step.calls_behind,
            calls_failed=step.calls_failed + self._writer.calls_failed,
            tokens_over_limit=step.tokens_over_limit,
            calls_of_other_steps=step.calls_of_other_steps,
            calls_in_graphs=step.calls_in_graphs,
            choices_over_top_k=self._writer.choices_over_top_k,
        )

    def end_step(self, number: int) -> None:
        """Give the calls since the last step their number; `Monitor.step` calls it."""
        if not self.is_running:
            return
        if self._step.is_on:
            # a rank without routers has no calls, and ends when the others do
            self._num_captured += self._step.has_calls or not self._taps
            self._report_gaps()
            self._hand_over(number)
        self._num_ended += 1
        self._step.is_on = self._num_ended % self._options.every_n_steps == 0
        if self._num_captured == self._options.max_steps:
            self._stop()

    def close(self) -> None:
        """End the capture and wait until all of it is on the disk, 10 seconds at most.

        Calls that no `step()` has ended are written under the number of the coming step. A second call
        does nothing, and `Monitor.close()` and the end of the process call it by themselves.
        """
        if os.getpid() != self._process:
            return
        if self.is_running:
            self._hand_over(self._coming_step())
            self._stop()
        self._writer.join(_CLOSE_SECONDS)

    def __enter__(self) -> Trace:
        """Return the trace itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the trace."""
        self.close()

    def _hand_over(self, number: int) -> None:
        calls = self._step.take_calls()
        if calls:
            self._writer.put(number, calls)

    def _stop(self) -> None:
        """Leave the routers, and have the writer end."""
        self.is_running = False
        for key, tap in self._taps.items():
            if tap.capture is self._captures[key]:
                tap.capture = None
        self._writer.finish()

    def _describe(self, is_complete: bool) -> Manifest:  # noqa: FBT001  # the writer's thread calls it
        return replace(
            self._manifest, is_complete=is_complete, left_out=self.left_out, silent_routers=self._silent_routers()
        )

    def _silent_routers(self) -> tuple[RouterKey, ...]:
        return tuple(key for key, capture in self._captures.items() if not capture.has_called)

    def _report_gaps(self) -> None:
        """Say once, after the first step, what this trace cannot hold."""
        if self._has_reported:
            return
        self._has_reported = True
        if silent := self._silent_routers():
            _logger.warning(
                "moe_telemetry: trace %s: no call came from %d of %d routers in the first step: %s. Call watch() "
                "before torch.compile, and trace without CUDA graphs: what they replay is seen by nobody",
                self.path,
                len(silent),
                len(self._captures),
                ", ".join(map(str, silent)),
            )
        if self._step.calls_in_graphs:
            _logger.warning(
                "moe_telemetry: trace %s: routers were called while a CUDA graph was captured; what the graph replays "
                "is in no trace: trace without CUDA graphs",
                self.path,
            )
        for name in self._options.tensors:
            if lacking := [str(key) for key, capture in self._captures.items() if name in capture.lacking]:
                _logger.warning(
                    "moe_telemetry: trace %s: no %s of routers %s: these do not show them",
                    self.path,
                    name,
                    ", ".join(lacking),
                )


def traced_routers(taps: Mapping[RouterKey, Tap]) -> list[TracedRouter]:
    """Return what a trace says of the routers of this rank."""
    return [
        TracedRouter(
            key=key,
            num_experts=tap.site.num_experts,
            top_k=tap.site.top_k,
            score_function=tap.site.score_function,
            is_biased=tap.site.is_biased,
        )
        for key, tap in taps.items()
    ]


def _local_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"trace({path!r}): expected the path of a folder")
    if "://" in os.fspath(path):
        raise ConfigError(f"trace({path!r}): a trace is written to a local folder, and may be copied from there")
    if "\0" in os.fspath(path):
        raise ConfigError(f"trace({path!r}): no path holds a NUL")
    # wherever the process goes: the name in messages stays that of the files
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111  # Path.expanduser fails where there is no home


def _with_options(manifest: Manifest, options: TraceOptions) -> Manifest:
    return replace(
        manifest,
        tensors=options.tensors,
        every_n_steps=options.every_n_steps,
        max_steps=options.max_steps,
        max_tokens_per_step=options.max_tokens_per_step,
    )


def _start_writer(
    folder: Path, manifest: Manifest, budget: Budget, describe: Callable[[bool], Manifest]
) -> RouteWriter:
    """Return the writer, its first manifest written.

    Raises:
        TraceError: the folder holds a trace or cannot be written to, or pyarrow is missing.
    """
    try:
        module: Any = import_module("moe_telemetry.trace.writer")
    except ModuleNotFoundError as error:
        raise TraceError(f"a trace needs the package {error.name!r}: pip install 'moe-telemetry[trace]'") from error
    try:
        writer: RouteWriter = module.RouteWriter(folder, manifest, budget, describe)
    except OSError as error:
        raise TraceError(f"trace: {folder} cannot be written to: {error}; name another folder") from error
    return writer


@atexit.register
def _finish_traces() -> None:
    for trace in list(_unfinished):
        trace.close()
