"""Delivery: exporters that hang or fall behind cost others nothing, and what is lost is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from moe_telemetry.delivery import Delivery
from moe_telemetry.plugins import Exporter
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.testing import RecordingExporter, make_snapshot

ENOUGH_SECONDS = 20.0


class Blocked(RecordingExporter):
    """A sink that takes nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_called, self.let_go = threading.Event(), threading.Event()

    def export(self, snapshot: Snapshot) -> None:
        self.is_called.set()
        self.let_go.wait()
        super().export(snapshot)


@pytest.fixture
def blocked() -> Blocked:
    return Blocked()


@pytest.fixture
def deliver(request: pytest.FixtureRequest, blocked: Blocked) -> Callable[..., Delivery]:
    """Make a delivery that ends with the test, whatever is blocked in it."""

    def make(**exporters: Exporter) -> Delivery:
        delivery = Delivery([*exporters.items()])
        request.addfinalizer(lambda: delivery.close(ENOUGH_SECONDS))
        request.addfinalizer(blocked.let_go.set)
        return delivery

    return make


def test_an_exporter_that_hangs_takes_no_time_from_the_others(
    blocked: Blocked, deliver: Callable[..., Delivery]
) -> None:
    class Last(RecordingExporter):
        def close(self) -> None:
            super().close()
            blocked.let_go.set()

    last = Last()
    delivery = deliver(blocked=blocked, last=last)
    delivery.put(make_snapshot())
    delivery.close(ENOUGH_SECONDS)
    assert (len(last.snapshots), last.num_closes) == (1, 1)
    assert delivery.errors == {"blocked": 0, "last": 0}


def test_an_exporter_that_does_not_finish_is_left_and_counted(
    blocked: Blocked, deliver: Callable[..., Delivery], caplog: pytest.LogCaptureFixture
) -> None:
    delivery = deliver(blocked=blocked)
    delivery.put(make_snapshot())
    delivery.close(0.0)
    assert delivery.errors == {"blocked": 1}
    assert "exporter blocked did not finish in time" in caplog.text


def test_an_exporter_that_falls_behind_loses_the_oldest_and_gets_the_last(
    blocked: Blocked, deliver: Callable[..., Delivery], caplog: pytest.LogCaptureFixture
) -> None:
    delivery = deliver(blocked=blocked)
    delivery.put(make_snapshot(step=1))
    blocked.is_called.wait()
    for step in range(2, 101):
        delivery.put(make_snapshot(step=step))
    blocked.let_go.set()
    delivery.close(ENOUGH_SECONDS)
    assert [snapshot.step for snapshot in blocked.snapshots] == [1, *range(37, 101)]
    assert delivery.errors == {"blocked": 35}
    assert caplog.messages == ["moe_telemetry: exporter blocked is 64 snapshots behind; the oldest is lost (failure 1)"]


def test_what_is_behind_at_the_end_is_finished_in_the_time_there_is(deliver: Callable[..., Delivery]) -> None:
    working = RecordingExporter()
    delivery = deliver(working=working)
    for step in range(1, 51):
        delivery.put(make_snapshot(step=step))
    delivery.close(ENOUGH_SECONDS)
    assert [snapshot.step for snapshot in working.snapshots] == [*range(1, 51)]
    assert delivery.errors == {"working": 0}
