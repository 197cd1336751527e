"""Several ranks give one rank's totals, to the integer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.testing.ranks import run_ranks

NUM_TOKENS = 24


def _tokens() -> torch.Tensor:
    return torch.randn(4, NUM_TOKENS // 4, 16, generator=torch.Generator().manual_seed(7))


def _masks() -> torch.Tensor:
    lengths = torch.tensor([6, 4, 1, 0])
    return (torch.arange(6) < lengths.unsqueeze(1)).long()


def _data_parallel(rank: int, num_ranks: int) -> str:
    model = TinyMoe()
    with mt.watch(model, routers=model.routers, every_n_steps=1, run="test") as monitor:
        model(_tokens().chunk(num_ranks)[rank], attention_mask=_masks().chunk(num_ranks)[rank])
        snapshot = monitor.step(1)
    assert (snapshot is not None) == (rank == 0)
    return "" if snapshot is None else snapshot.to_json()


def _without_microbatches(layers: Mapping[mt.RouterKey, mt.LayerSnapshot]) -> dict[mt.RouterKey, mt.LayerSnapshot]:
    """Leave out what is a mean over calls, of which several ranks have more."""
    return {
        key: replace(
            layer,
            total={stage: replace(counts, microbatch_max_violation=None) for stage, counts in layer.total.items()},
            window={stage: replace(counts, microbatch_max_violation=None) for stage, counts in layer.window.items()},
        )
        for key, layer in layers.items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_with_a_part_of_the_tokens_count_what_one_process_counts_of_all(num_ranks: int) -> None:
    model = TinyMoe()
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        model(_tokens(), attention_mask=_masks())
        alone = monitor.step(1)
    assert alone is not None
    together = mt.Snapshot.from_json(run_ranks(_data_parallel, num_ranks, num_ranks)[0])
    assert _without_microbatches(together.layers) == _without_microbatches(alone.layers)
    assert together.world_size == num_ranks
    assert together.layers[mt.RouterKey("decoder", 0)].total["train"].tokens == 11


def _context_parallel(rank: int) -> str:
    model = TinyMoe()
    hidden, mask = _tokens(), _masks()
    hidden[0, 2] = torch.nan
    with mt.watch(model, routers=model.routers, every_n_steps=1, run="test") as monitor:
        # a cut that leaves rank 1 the longer part, and only some of each sequence's real tokens
        part = [slice(None, 2), slice(2, None)][rank]
        model(hidden[:, part], attention_mask=mask[:, part])
        return monitor.snapshot().to_json()


def test_ranks_that_cut_sequences_give_the_statistics_of_whole_sequences() -> None:
    model = TinyMoe()
    hidden = _tokens()
    hidden[0, 2] = torch.nan
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        model(hidden, attention_mask=_masks())
        alone = monitor.snapshot()
    for text in run_ranks(_context_parallel, 2):
        together = mt.Snapshot.from_json(text)
        for key, layer in alone.layers.items():
            expected = layer.window["train"].scores
            assert expected is not None
            assert (expected.rows, expected.nan_rows) == (10, 1)
            assert together.layers[key].window["train"].scores == expected


def _pipeline(rank: int) -> str:
    model = TinyMoe(num_layers=4)
    tokens = _tokens()
    owned = {0: (0, 1), 1: (2, 3), 2: ()}[rank]
    routers = {
        f"layers.{layer}.gate": mt.RouterSpec(num_experts=8, top_k=2, key=mt.RouterKey("decoder", layer))
        for layer in owned
    }
    with mt.watch(model, routers=routers, every_n_steps=1) as monitor:
        model(tokens)
        monitor.step(0)
        return monitor.snapshot().to_json()


def test_ranks_that_own_different_layers_or_none_report_every_layer() -> None:
    snapshots = [mt.Snapshot.from_json(text) for text in run_ranks(_pipeline, 3)]
    for snapshot in snapshots:
        assert [str(key) for key in snapshot.layers] == ["decoder.0", "decoder.1", "decoder.2", "decoder.3"]
        assert [layer.total["train"].tokens for layer in snapshot.layers.values()] == [NUM_TOKENS] * 4


def _tensor_parallel(rank: int, declared: bool) -> int:
    replicas = [rank // 2 * 2, rank // 2 * 2 + 1] if declared else None
    model = TinyMoe()
    with mt.watch(model, routers=model.routers, every_n_steps=1, token_replicas=replicas) as monitor:
        model(_tokens().chunk(2)[rank // 2])
        return monitor.snapshot().layers[mt.RouterKey("decoder", 1)].total["train"].tokens


def test_ranks_with_equal_tokens_are_counted_once_when_declared() -> None:
    assert run_ranks(_tensor_parallel, 4, True) == [NUM_TOKENS] * 4
    assert run_ranks(_tensor_parallel, 4, False) == [2 * NUM_TOKENS] * 4


def _stages(rank: int) -> dict[str, int]:
    model = TinyMoe()
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        for name in [["rollout", "reference"], ["judge", "reference"]][rank]:
            with monitor.stage(name):
                model(_tokens()[: rank + 1])
        snapshot = monitor.snapshot()
        model(_tokens())
        snapshot = monitor.snapshot()
    layer = snapshot.layers[mt.RouterKey("decoder", 0)]
    return {stage: counts.tokens for stage, counts in layer.total.items()}


def test_stages_that_ranks_meet_in_different_orders_are_added_up_by_name() -> None:
    expected = {"train": 48, "judge": 12, "reference": 18, "rollout": 6}
    assert run_ranks(_stages, 2) == [expected, expected]


def _nodes(rank: int, monkeypatched_nodes: list[str]) -> list[tuple[str, str, float]]:
    import moe_telemetry.reduce as module

    module.node_of_this_process = lambda: monkeypatched_nodes[rank]
    model = TinyMoe(num_layers=1)
    with mt.watch(model, routers=model.routers, every_n_steps=1, per_expert=True) as monitor:
        model(_tokens()[: rank + 1])
        snapshot = monitor.snapshot()
    return [(name, str(sorted(labels.items())), value) for name, labels, value in snapshot.samples("node")]


def test_the_counters_of_all_endpoints_add_up_to_the_job_and_no_series_appears_twice() -> None:
    ranks = run_ranks(_nodes, 4, ["a", "a", "b", "b"])
    first, second = ranks[0], ranks[2]
    router = "moe_router_tokens_total"
    assert sum(value for name, _, value in first if name == router) == 6 + 12
    assert sum(value for name, _, value in second if name == router) == 18 + 24
    experts = [value for name, _, value in first if name == "moe_expert_assignments_total"]
    assert sum(experts) == 2 * 60
    names = {name for name, _, _ in second}
    assert "moe_expert_assignments_total" not in names
    assert not any(name.startswith("moe_load_") for name in names)


def _one_rank_stops(rank: int) -> tuple[list[bool], float, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_telemetry").addHandler(handler)
    model = TinyMoe()
    monitor = mt.watch(model, routers=model.routers, every_n_steps=1, rank_timeout_seconds=1.5)
    reduced = []
    for step in range(1, 5):
        dist.barrier()  # as the gradients' own reduction keeps ranks together
        model(_tokens())
        if rank == 0 or step not in (2, 3):
            reduced.append(monitor.step(step) is not None)
    total = monitor.snapshot().layers[mt.RouterKey("decoder", 0)].total["train"].tokens
    monitor.close()
    return reduced, total, records


def test_a_rank_that_misses_steps_is_named_and_nothing_is_lost() -> None:
    (first, total, records), _ = run_ranks(_one_rank_stops, 2)
    assert first == [True, False, False, True]
    assert total == 2 * 4 * NUM_TOKENS
    assert any("rank 1 did not come to reduction" in record for record in records)


def _differing(rank: int, case: str) -> str:
    model = TinyMoe(num_experts=8 + rank if case == "experts" else 8)
    routers = {"nothing.*": 8} if case == "error" and rank == 1 else model.routers
    every_n_steps = 1 + rank if case == "steps" else 1
    try:
        mt.watch(model, routers=routers, every_n_steps=every_n_steps, scores=case != "scores" or rank == 0)
    except mt.TelemetryError as error:
        return f"{type(error).__name__}: {error}"
    return "watched"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("experts", "ReductionError: router decoder.0 has 8 experts on rank 0 and 9 on rank 1"),
        ("steps", "ReductionError: every_n_steps differs: 1 on rank 0, 2 on rank 1"),
        ("scores", "ReductionError: scores differs: True on rank 0, False on rank 1"),
        ("error", "ReductionError: watch() failed on rank 1: ConfigError: routers: 'nothing.*' matches no module"),
    ],
)
def test_ranks_that_differ_fail_together_before_the_first_step(case: str, message: str) -> None:
    first, second = run_ranks(_differing, 2, case)
    assert first.startswith(message)
    assert second.startswith(
        message.removeprefix("ReductionError: watch() failed on rank 1: ") if case == "error" else message
    )


def _watch_on_one_rank(rank: int) -> str:
    if rank == 1:
        return ""
    model = TinyMoe()
    with pytest.raises(mt.ReductionError) as caught:
        mt.watch(model, routers=model.routers, rank_timeout_seconds=1)
    assert not any(module._forward_hooks for module in model.modules())
    return str(caught.value)


def test_watch_on_one_rank_alone_names_the_rank_that_is_missing() -> None:
    assert "for rank 1 in vain" in run_ranks(_watch_on_one_rank, 2)[0]
