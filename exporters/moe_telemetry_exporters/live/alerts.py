"""Since when each alert stands, from one snapshot to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from moe_telemetry.alerts import FRESH_SECONDS, RULES, Alert, stalled_after, stalled_alert, standing_alerts
from moe_telemetry.identity import RouterKey
from moe_telemetry.snapshot import Snapshot

__all__ = ["AlertLog", "Standing"]

_ERROR_SECONDS = 1800.0
"""How far back failures of exporters count, as in the rule."""
_SECONDS_BETWEEN_MARKS = 60.0


class Standing(NamedTuple):
    """An alert, and since when it stands (Unix time)."""

    alert: Alert
    since: float
    last_held: float

    def is_firing(self, now: float) -> bool:
        """Tell whether it has stood as long as its rule asks for."""
        return now - self.since >= RULES[self.alert.name].hold_seconds


class AlertLog:
    """Follows the alerts of a run; one thread observes, any may read `standing`."""

    def __init__(self) -> None:
        self.standing: tuple[Standing, ...] = ()
        """In the order of severity."""
        self._errors: deque[tuple[float, Mapping[str, int]]] = deque()

    def observe(self, snapshot: Snapshot, now: float) -> None:
        """Take the alerts of the newest snapshot; its window decides, and what it says nothing about stays."""
        before = {_subject(standing.alert): standing for standing in self.standing}
        held = {
            _subject(alert): alert
            for alert in standing_alerts(snapshot, recent_errors=self._recent_errors(snapshot, now))
        }
        kept = {
            subject: Standing(alert, before[subject].since if subject in before else now, now)
            for subject, alert in held.items()
        }
        for subject, standing in before.items():
            is_recent = now - standing.last_held < FRESH_SECONDS and not snapshot.health.run_finished
            if subject not in kept and is_recent and not _judges(snapshot, standing.alert):
                kept[subject] = standing
        order = list(RULES)
        self.standing = tuple(sorted(kept.values(), key=lambda standing: order.index(standing.alert.name)))

    def at(self, now: float, last_export: float, usual_gap: float | None) -> tuple[Standing, ...]:
        """Return what stands at `now`: once the last export is old, only that it is."""
        if now - last_export < FRESH_SECONDS:
            return self.standing
        alert = stalled_alert(now - last_export, usual_gap)
        return () if alert is None else (Standing(alert, last_export + stalled_after(usual_gap), now),)

    def _recent_errors(self, snapshot: Snapshot, now: float) -> dict[str, int]:
        errors = snapshot.health.export_errors
        while len(self._errors) > 1 and self._errors[1][0] <= now - _ERROR_SECONDS:
            self._errors.popleft()
        # one entry of half an hour ago or earlier, if there is one, is what newer ones are compared with
        is_known = bool(self._errors) and self._errors[0][0] <= now - _ERROR_SECONDS
        earlier = self._errors[0][1] if is_known else {}
        if not self._errors or now - self._errors[-1][0] >= _SECONDS_BETWEEN_MARKS:
            self._errors.append((now, dict(errors)))
        return {exporter: count - earlier.get(exporter, 0) for exporter, count in errors.items()}


def _subject(alert: Alert) -> tuple[str, RouterKey | None, str | None]:
    return alert.name, alert.layer, alert.exporter


def _judges(snapshot: Snapshot, alert: Alert) -> bool:
    """Tell whether the window has what the alert is about; the last one of a run often has no tokens at all."""
    if alert.layer is None:
        return True
    layer = snapshot.layers.get(alert.layer)
    if layer is None:
        return True
    return layer.replay is not None if alert.name.startswith("MoeReplay") else "train" in layer.window
