"""Which alerts of a snapshot a W&B run is told: a misaligned replay, once for every layer while it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from moe_telemetry.alerts import Alert, standing_alerts
from moe_telemetry.identity import RouterKey
from moe_telemetry.snapshot import Snapshot

__all__ = ["AlertLog", "Notice"]

_LEVELS = {"critical": "ERROR", "warning": "WARN"}
_MOST_LAYERS = 8

_Key = tuple[str, "RouterKey | None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What goes to W&B: one message for all layers that an alert newly stands for."""

    title: str
    text: str
    level: str


class AlertLog:
    """Remembers what was told, so that nobody is told again at every snapshot.

    An alert that goes and comes back within `quiet_seconds` is not told a second time.
    """

    def __init__(self, quiet_seconds: float = 600.0) -> None:
        self._quiet_seconds = quiet_seconds
        self._standing: set[_Key] = set()
        self._told: dict[_Key, float] = {}

    def notices(self, snapshot: Snapshot) -> Iterator[Notice]:
        """Yield what is new in a snapshot."""
        alerts = [
            alert
            for alert in standing_alerts(snapshot)
            if alert.name.startswith("MoeReplay") and alert.severity in _LEVELS
        ]
        new = [alert for alert in alerts if self._is_new((alert.name, alert.layer), snapshot.time)]
        self._standing = {(alert.name, alert.layer) for alert in alerts}
        self._told.update({(alert.name, alert.layer): snapshot.time for alert in new})
        for name, of_name in groupby(sorted(new, key=attrgetter("name")), attrgetter("name")):
            yield _notice(name, list(of_name), snapshot)

    def _is_new(self, key: _Key, now: float) -> bool:
        return key not in self._standing and now - self._told.get(key, float("-inf")) >= self._quiet_seconds


def _notice(name: str, alerts: Sequence[Alert], snapshot: Snapshot) -> Notice:
    lines = [f"step {snapshot.step}:", *(alert.summary for alert in alerts[:_MOST_LAYERS])]
    if len(alerts) > _MOST_LAYERS:
        lines.append(f"and {len(alerts) - _MOST_LAYERS} more layers")
    if (cause := snapshot.health.misalignment) is not None:
        lines.append(f"cause: {cause}, offset {snapshot.health.misalignment_offset}")
    return Notice(title=name, text="\n".join(lines), level=_LEVELS[alerts[0].severity])
