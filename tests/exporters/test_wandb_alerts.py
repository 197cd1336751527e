"""Which alerts W&B is told, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_telemetry import Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.wandb.alerts import AlertLog, Notice
from tests.exporters.snapshots import misaligned

ZERO_OVERLAP = "MoeReplayZeroOverlapHigh"


def _at(time: float, snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, time=time)


def _notices(log: AlertLog, snapshot: Snapshot) -> list[Notice]:
    return [notice for notice in log.notices(snapshot) if notice.title == ZERO_OVERLAP]


def test_all_layers_of_an_alert_are_one_message() -> None:
    (notice,) = _notices(AlertLog(), misaligned(make_snapshot(num_layers=61, step=30)))
    assert notice.level == "ERROR"
    lines = notice.text.splitlines()
    assert lines[0] == "step 30:"
    assert lines[1] == "50.0% of the replayed tokens of decoder.0 share no expert with the router's own choice"
    assert lines[-1] == "and 53 more layers"
    assert len(lines) == 10


def test_it_names_the_cause_where_that_is_known() -> None:
    snapshot = misaligned(make_snapshot())
    health = replace(snapshot.health, misalignment="token_shift", misalignment_offset=1)
    (notice,) = _notices(AlertLog(), replace(snapshot, health=health))
    assert notice.text.splitlines()[-1] == "cause: token_shift, offset 1"


def test_a_layer_is_told_once_and_another_when_it_joins() -> None:
    log = AlertLog()
    assert len(_notices(log, _at(10, misaligned(make_snapshot(), layers={1})))) == 1
    assert _notices(log, _at(20, misaligned(make_snapshot(), layers={1}))) == []
    (notice,) = _notices(log, _at(30, misaligned(make_snapshot(), layers={1, 2})))
    assert "decoder.2" in notice.text
    assert "decoder.1" not in notice.text
    assert _notices(log, _at(10_000, misaligned(make_snapshot(), layers={1, 2}))) == []


@pytest.mark.parametrize(("pause", "times_told"), [(599, 1), (600, 2)])
def test_one_that_comes_back_is_told_again_after_ten_minutes(pause: float, times_told: int) -> None:
    log = AlertLog()
    told = len(_notices(log, _at(1000, misaligned(make_snapshot()))))
    assert _notices(log, _at(1100, make_snapshot(replayed=True))) == []
    told += len(_notices(log, _at(1000 + pause, misaligned(make_snapshot()))))
    assert told == times_told


def test_a_healthy_replay_and_an_uneven_load_are_not_told() -> None:
    assert list(AlertLog().notices(make_snapshot(replayed=True, num_experts=64, tokens_per_step=16))) == []


def test_a_check_that_is_blind_is_not_told() -> None:
    snapshot = make_snapshot(num_experts=4, top_k=2, replayed=True)
    layers = {
        key: replace(
            layer,
            window={
                stage: replace(counts, replay=replace(counts.replay, top_k=3, shared_experts=3 * counts.replay.checked))
                for stage, counts in layer.window.items()
                if counts.replay is not None
            },
        )
        for key, layer in snapshot.layers.items()
    }
    assert list(AlertLog().notices(replace(snapshot, layers=layers))) == []
