"""What an author of an exporter needs: snapshots to export, and the contract that every exporter passes."""
# ruff: noqa: S101  # the contract is a test

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path

from moe_telemetry.environment import fields_from_env
from moe_telemetry.identity import RouterKey
from moe_telemetry.load_shape import relative_load_histogram
from moe_telemetry.plugins import Exporter
from moe_telemetry.records import Counts, Health, LayerSnapshot, Share
from moe_telemetry.replay_totals import REPLAY_SUMS, ReplayTotals
from moe_telemetry.score_statistics import ScoreStatistics
from moe_telemetry.snapshot import Snapshot

__all__ = ["ExporterContract", "RecordingExporter", "make_snapshot"]


def make_snapshot(
    *,
    step: int = 10,
    num_layers: int = 3,
    num_experts: int = 8,
    top_k: int = 2,
    tokens_per_step: int = 256,
    window_steps: int = 10,
    stages: Sequence[str] = ("train",),
    run: str = "run-1",
    labels: Mapping[str, str] | None = None,
    replayed: bool = False,
    per_expert: bool = False,
    expert_parallel_ranks: int | None = None,
    max_series: int = 50_000,
    node: int = 0,
    num_nodes: int = 1,
    first_layer: int = 0,
    seed: int = 0,
) -> Snapshot:
    """Return the snapshot of a job whose experts are unevenly loaded, the same at every step.

    Counts grow by the same amount each step, so snapshots of one seed at growing steps are a run, and
    those of all `node` below `num_nodes` are what the endpoints of one job export. `window_steps=0` is a
    window in which nothing was counted.
    """
    window_steps = min(window_steps, step)
    chance = random.Random(seed)  # noqa: S311  # the same figures in every test
    layers = {}
    for layer in range(first_layer, first_layer + num_layers):
        of_a_step = {stage: _counts_of_step(chance, num_experts, top_k, tokens_per_step) for stage in stages}
        if replayed:
            of_a_step = {stage: _replayed(counts, top_k) for stage, counts in of_a_step.items()}
        total = {stage: _times(counts, step) for stage, counts in of_a_step.items()}
        layers[RouterKey("decoder", layer)] = LayerSnapshot(
            num_experts=num_experts,
            total=total,
            window={stage: _times(counts, window_steps) for stage, counts in of_a_step.items() if window_steps},
            share={stage: _part(counts.as_share(), node, num_nodes) for stage, counts in total.items()},
            relative_load={stage: _relative_load(counts, step) for stage, counts in of_a_step.items() if step},
            worst_rank_zero_overlap=0.005 if replayed and window_steps else None,
        )
    return Snapshot(
        run=run,
        step=step,
        time=1_700_000_000.0 + step,
        world_size=num_nodes,
        layers=layers,
        health=Health(routers_expected=num_layers, routers_observed=num_layers, overhead_seconds=step / 1024),
        labels=dict(labels or {}),
        leads=node == 0,
        per_expert=per_expert,
        max_series=max_series,
        expert_parallel_ranks=expert_parallel_ranks,
    )


def _counts_of_step(chance: random.Random, num_experts: int, top_k: int, tokens: int) -> Counts:
    weights = [chance.gammavariate(2.0, 1.0) for _ in range(num_experts)]
    chosen = Counter(chance.choices(range(num_experts), weights, k=tokens * top_k))
    assignments = tuple(chosen[expert] for expert in range(num_experts))
    counts = Counts(tokens=tokens, padding_tokens=tokens // 16, assignments=assignments, dropped=tokens // 64)
    return replace(counts, scores=_scores(counts, top_k), microbatch_max_violation=1.5)


def _replayed(counts: Counts, top_k: int) -> Counts:
    """Return the counts of a step in which one token in 64 has no route, and one choice in 128 differs."""
    missing = counts.tokens // 64
    checked = counts.tokens - missing
    shared = checked * top_k - checked // 64
    replay = ReplayTotals(
        num_experts=len(counts.assignments),
        top_k=top_k,
        replayed=counts.tokens,
        missing=missing,
        checked=checked,
        shared_experts=shared,
        tie_checked=checked,
        tie_shared_experts=shared,
        longest_equal_run=1,
    )
    return replace(counts, replay=replay)


def _scores(counts: Counts, top_k: int) -> ScoreStatistics:
    """Return statistics of a router with an expert bias, all of whose tokens were sampled."""
    num_experts, total = len(counts.assignments), sum(counts.assignments)
    shares = tuple(count / total for count in counts.assignments)
    return ScoreStatistics(
        rows=counts.tokens - 1,
        nan_rows=1,
        infinite_rows=0,
        score_mean=0.125,
        entropy=0.75,
        selected_mass=0.5 + top_k / num_experts / 2,
        boundary_margin=0.25,
        z=4.5,
        logit_max=7.5,
        balance_loss=num_experts * sum(share * share for share in shares),
        bias_overlap=0.875,
        bias_min=-0.25,
        bias_max=0.5,
        bias_std=0.125,
        mean_probabilities=shares,
    )


def _relative_load(counts: Counts, windows: int) -> tuple[int, ...]:
    """Return the histogram after that many windows of one load."""
    buckets = relative_load_histogram(counts.assignments)
    assert buckets is not None
    return tuple(count * windows for count in buckets)


def _times(counts: Counts, steps: int) -> Counts:
    assert counts.scores is not None
    scores = replace(counts.scores, rows=counts.scores.rows * steps, nan_rows=counts.scores.nan_rows * steps)
    return Counts(
        tokens=counts.tokens * steps,
        padding_tokens=counts.padding_tokens * steps,
        assignments=tuple(count * steps for count in counts.assignments),
        dropped=counts.dropped * steps,
        invalid=counts.invalid * steps,
        replay=None if counts.replay is None else _each(counts.replay, lambda count: count * steps),
        scores=scores,
        microbatch_max_violation=counts.microbatch_max_violation,
    )


def _part(share: Share, node: int, num_nodes: int) -> Share:
    def of(count: int) -> int:
        return count * (node + 1) // num_nodes - count * node // num_nodes

    return Share(
        tokens=of(share.tokens),
        padding_tokens=of(share.padding_tokens),
        assignments=of(share.assignments),
        dropped=of(share.dropped),
        invalid=of(share.invalid),
        replay=None if share.replay is None else _each(share.replay, of),
    )


def _each(replay: ReplayTotals, change: Callable[[int], int]) -> ReplayTotals:
    return replace(replay, **{name: change(getattr(replay, name)) for name in REPLAY_SUMS})


class RecordingExporter:
    """Keeps every snapshot that it is given, in `snapshots`."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.num_starts = 0
        self.num_closes = 0

    def start(self) -> None:
        """Count a start."""
        self.num_starts += 1

    def export(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        self.snapshots.append(snapshot)

    def close(self) -> None:
        """Count a close."""
        self.num_closes += 1


class ExporterContract:
    """What every exporter must do; subclass it in a test module, and say how yours is made."""

    def make_exporter(self, tmp_path: Path) -> Exporter:
        """Return a new exporter that writes to `tmp_path`, if it writes files at all."""
        raise NotImplementedError

    def run_exporter(self, tmp_path: Path, *snapshots: Snapshot) -> Exporter:
        """Start an exporter, export and close, as a monitor does; the exporter is then over."""
        exporter = self.make_exporter(tmp_path)
        _start(exporter)
        try:
            for snapshot in snapshots:
                before = snapshot.to_json()
                exporter.export(snapshot)
                assert snapshot.to_json() == before, "export() changed the snapshot"
        finally:
            exporter.close()
        return exporter

    def test_is_an_exporter(self, tmp_path: Path) -> None:
        """It has `export` and `close`, and a known scope."""
        exporter = self.make_exporter(tmp_path)
        assert isinstance(exporter, Exporter)
        assert getattr(exporter, "scope", "job") in {"job", "node"}

    def test_making_one_only_keeps_settings(self, tmp_path: Path) -> None:
        """It is made on every rank and used on few: no file, no thread, no connection yet."""
        threads = set(threading.enumerate())
        self.make_exporter(tmp_path)
        assert set(tmp_path.rglob("*")) == set()
        assert set(threading.enumerate()) <= threads

    def test_exports_growing_snapshots_and_closes(self, tmp_path: Path) -> None:
        """A run of three snapshots."""
        self.run_exporter(tmp_path, *(make_snapshot(step=step) for step in (10, 20, 30)))

    def test_closes_without_an_export(self, tmp_path: Path) -> None:
        """A run may end before its first snapshot."""
        self.run_exporter(tmp_path)

    def test_closes_without_a_start(self, tmp_path: Path) -> None:
        """A start may have failed."""
        self.make_exporter(tmp_path).close()

    def test_closes_twice(self, tmp_path: Path) -> None:
        """The second close does nothing."""
        self.run_exporter(tmp_path, make_snapshot()).close()

    def test_leaves_no_thread_behind(self, tmp_path: Path) -> None:
        """After `close` everything is let go of."""
        threads = set(threading.enumerate())
        self.run_exporter(tmp_path, make_snapshot())
        assert set(threading.enumerate()) <= threads

    def test_takes_any_text_in_names(self, tmp_path: Path) -> None:
        """Labels, runs and stages are the user's: quotes, line ends, braces, percent signs, any script."""
        odd = 'a"b\\c\nd{e}=100%s [red],é漢🙂'
        self.run_exporter(tmp_path, make_snapshot(run=odd, labels={"team": odd}, stages=("train", odd)))

    def test_takes_layers_that_come_and_go(self, tmp_path: Path) -> None:
        """A later snapshot may have more layers, fewer, others or none, and experts of another number."""
        few, many, others = make_snapshot(), make_snapshot(step=20, num_layers=5), make_snapshot(step=30, first_layer=7)
        none = make_snapshot(step=40, num_layers=0)
        self.run_exporter(tmp_path, few, many, others, none, make_snapshot(step=50, num_experts=3))

    def test_takes_an_empty_window(self, tmp_path: Path) -> None:
        """Ratios over nothing are absent; that is no failure."""
        self.run_exporter(tmp_path, make_snapshot(window_steps=0), make_snapshot(step=20))

    def test_takes_many_layers_and_a_series_an_expert(self, tmp_path: Path) -> None:
        """A large model: 61 layers of 256 experts."""
        self.run_exporter(tmp_path, make_snapshot(num_layers=61, num_experts=256, per_expert=True))

    def test_takes_the_share_of_a_node_that_does_not_lead(self, tmp_path: Path) -> None:
        """A node that is not the first has no gauges to show."""
        self.run_exporter(tmp_path, make_snapshot(node=1, num_nodes=2))

    def test_takes_a_step_that_goes_back(self, tmp_path: Path) -> None:
        """Training may be rolled back to a checkpoint."""
        self.run_exporter(tmp_path, make_snapshot(step=20), replace(make_snapshot(step=20), step=5))

    def test_settings_can_come_from_the_environment(self, tmp_path: Path) -> None:
        """Every setting that is a text or a number, of an exporter that is a dataclass."""
        exporter = self.make_exporter(tmp_path)
        if not is_dataclass(exporter):
            return
        values = {item.name: item.default for item in fields(exporter) if item.init and item.default is not MISSING}
        plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
        environ = {f"PREFIX_{name.upper()}": str(value) for name, value in plain.items()}
        assert fields_from_env(type(exporter), "PREFIX_", environ) == plain


def _start(exporter: Exporter) -> None:
    start = getattr(exporter, "start", None)
    if start is not None:
        start()
