"""record(), replay() and check() of a monitor, and what it says when routes do not belong to their tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from moe_telemetry.config import TelemetryConfig
from moe_telemetry.errors import LifecycleError, RoutesError, TelemetryError
from moe_telemetry.identity import RouterKey
from moe_telemetry.recording import Recording
from moe_telemetry.records import LayerSnapshot
from moe_telemetry.replay import Misalignment, Routes, locate_misalignment
from moe_telemetry.replaying import Replaying, ReplaySample, ReplayState
from moe_telemetry.route_verdict import complaint
from moe_telemetry.taps import Tap

__all__ = ["RouteControl"]

_logger = logging.getLogger("moe_telemetry")
_SECONDS_BETWEEN_REPORTS = 60.0


class RouteControl:
    """The routes of one monitor: recorded, replayed, compared, and judged when a reduction has come."""

    def __init__(self, models: Sequence[nn.Module], taps: Mapping[RouterKey, Tap], config: TelemetryConfig) -> None:
        self._models = list(models)
        self._taps = taps
        self._config = config
        self._state = ReplayState()
        self._last_report = float("-inf")
        self._thread: threading.Thread | None = None
        self.finding: Misalignment | None = None
        """What was last found wrong with the routes; None where nothing was looked into."""

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Keep what the routers choose inside the context.

        Raises:
            LifecycleError: something records already.
        """
        if any(tap.recording is not None for tap in self._taps.values()):
            raise LifecycleError("routes are recorded already: record() cannot be nested")
        recording = Recording({key: tap.site.num_experts for key, tap in self._taps.items()})
        for tap in self._taps.values():
            tap.recording = recording
        try:
            yield recording
        finally:
            for tap in self._taps.values():
                tap.recording = None

    @contextmanager
    def use(self, routes: Routes, *, compares_only: bool) -> Iterator[None]:
        """Put routes in force inside the context.

        Raises:
            RoutesError: the routes are of another model, or a router cannot be replayed into.
            LifecycleError: other routes are in force.
        """
        for tap in self._taps.values():
            if tap.site.chooses_by_score:
                self._check_router(tap, routes, compares_only=compares_only)
        self._state.install(self._models, self._taps)
        self._state.sample = ReplaySample() if self._state.wants_sample else None
        with self._state.use(Replaying(routes, compares_only=compares_only)):
            yield

    def _check_router(self, tap: Tap, routes: Routes, *, compares_only: bool) -> None:
        site = tap.site
        routes.layer(site.key)
        top_k = routes.ids.shape[-1]
        if site.top_k not in (None, top_k):
            raise RoutesError(f"routes have K={top_k} experts a token, router {site.name!r} chooses {site.top_k}")
        if routes.num_experts not in (None, site.num_experts):
            raise RoutesError(
                f"routes are of a model with {routes.num_experts} experts, router {site.name!r} has {site.num_experts}"
            )
        obstacle = site.replay_obstacle or ("its experts are only seen once chosen" if site.hook == "input" else None)
        if obstacle is not None and not compares_only:
            raise RoutesError(
                f"router {site.name!r} ({type(site.module).__name__}) cannot be replayed into: {obstacle}; "
                "use check() in place of replay()"
            )

    def sample_next_step(self, *, wanted: bool) -> None:
        """Say, at the end of a step, whether the next one's rows may be looked into."""
        self._state.forget()
        self._state.wants_sample = wanted

    def judge(self, layers: Mapping[RouterKey, LayerSnapshot]) -> None:
        """Warn where the window's replay is misaligned, and have the cause looked for, at a limited rate."""
        checks = {key: replay for key, layer in layers.items() if (replay := layer.replay) is not None}
        if not checks or time.monotonic() - self._last_report < _SECONDS_BETWEEN_REPORTS:
            return
        message = complaint(checks, self._config)
        if message is None:
            return
        self._last_report = time.monotonic()
        _logger.warning("moe_telemetry: %s", message)
        if self._state.sample is not None and self._state.sample.own:
            self._thread = threading.Thread(target=self._locate, args=(self._state.sample,), daemon=True)
            self._thread.start()

    def _locate(self, sample: ReplaySample) -> None:
        """Look for the cause, in a thread of its own."""
        try:
            self.finding = _locate(sample, {key: tap.site.num_experts for key, tap in self._taps.items()})
        except (TelemetryError, RuntimeError) as error:
            _logger.warning("moe_telemetry: the cause of the misaligned replay was not found: %s", error)
            return
        _logger.warning("moe_telemetry: replay check: %s (%s)", self.finding.advice, self.finding.cause)

    def wait(self, timeout_seconds: float) -> None:
        """Let a search for the cause end."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def close(self) -> None:
        """Take everything out of the model's routers."""
        self._state.remove()


def _locate(sample: ReplaySample, num_experts: Mapping[RouterKey, int]) -> Misalignment:
    keys = list(sample.own)
    most = max(num_experts[key] for key in keys)
    alike = [key for key in keys if num_experts[key] == most]
    replayed_TLK = torch.stack([sample.replayed[key] for key in alike], dim=1)
    own_TLK = torch.stack([sample.own[key].to(torch.int32) for key in alike], dim=1)
    num_rows = len(own_TLK)
    if sample.rows is None:
        raise RoutesError("no rows were sampled")
    starts_T = sample.rows.starts_T
    return locate_misalignment(
        replayed_TLK,
        own_TLK,
        num_experts=most,
        valid=None if sample.valid is None else sample.valid[:num_rows],
        sequence_starts=starts_T[starts_T < num_rows],
    )
