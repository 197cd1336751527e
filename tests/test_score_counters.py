"""Score counters: what a running model adds to them, when, and what it never does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moe_telemetry as mt
from moe_telemetry.counters import NUM_SLOTS, UNCOUNTED_SLOT, slot_value
from moe_telemetry.identity import RouterKey
from moe_telemetry.routers import RouterSite, read_output
from moe_telemetry.score_counters import NUM_SCORE_ROWS, Sampling, count_scores, note_bias
from moe_telemetry.score_statistics import MAX_FIELDS, NOTHING, NUM_SUM_FIELDS, ScoreStatistics
from moe_telemetry.testing.models import TinyMoe

FIRST = RouterKey("decoder", 0)
CPU = torch.device("cpu")
COMPILING = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _site(num_experts: int = 8, **fields: object) -> RouterSite:
    known = {
        "key": FIRST,
        "name": "gate",
        "module": None,
        "read": lambda _args, _kwargs, output: read_output(output, 8),
    }
    return RouterSite(num_experts=num_experts, **{**known, **fields})  # type: ignore[arg-type]


def _counters(num_experts: int = 8, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    sums_FS = torch.zeros(NUM_SCORE_ROWS + num_experts, NUM_SLOTS, dtype=torch.int64, device=device)
    return sums_FS, torch.full((1 + len(MAX_FIELDS), NUM_SLOTS), NOTHING, dtype=torch.int64, device=device)


def _hidden(batch_size: int = 2, sequence_length: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch_size, sequence_length, 16, generator=torch.Generator().manual_seed(seed))


def _scores(snapshot: mt.Snapshot | None, stage: str = "train") -> ScoreStatistics:
    assert snapshot is not None
    scores = snapshot.layers[FIRST].window[stage].scores
    assert scores is not None
    return scores


def _watch(model: TinyMoe, **settings: object) -> mt.Monitor:
    return mt.watch(model, routers=model.routers, **{"every_n_steps": 1, **settings})


@pytest.fixture
def model() -> TinyMoe:
    return TinyMoe()


# what is counted


def test_microbatches_of_unequal_size_give_what_one_batch_of_their_tokens_gives(model: TinyMoe) -> None:
    hidden = _hidden(6)
    with _watch(model) as monitor:
        for part in hidden.split([1, 2, 3]):
            model(part).sum().backward()
        parts = monitor.step(1)
        model(hidden)
        whole = monitor.step(2)
    assert _scores(parts) == _scores(whole)
    assert _scores(parts).rows == 18


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_under_checkpointing_adds_nothing(use_reentrant: bool) -> None:
    model = TinyMoe(use_reentrant=use_reentrant)
    with _watch(model) as monitor:
        model(_hidden().requires_grad_()).sum().backward()
        assert _scores(monitor.step(1)).rows == 6


def test_padding_is_in_no_statistic(model: TinyMoe) -> None:
    hidden = _hidden()
    hidden[1, 1:] = torch.nan
    with _watch(model) as monitor:
        model(hidden, attention_mask=torch.tensor([[1, 1, 1], [1, 0, 0]]))
        scores = _scores(monitor.step(1))
    assert (scores.rows, scores.nan_rows, scores.infinite_rows) == (4, 0, 0)


def test_tokens_with_a_nan_or_an_infinity_are_counted_and_poison_nothing(model: TinyMoe) -> None:
    hidden = _hidden(1, 6)
    bad = hidden.clone()
    bad[0, 1], bad[0, 4, 0] = torch.nan, torch.inf
    with _watch(model) as monitor:
        model(bad)
        found = monitor.step(1)
        model(hidden[:, [0, 2, 3, 5]])
        clean = _scores(monitor.step(2))
    scores = _scores(found)
    assert (scores.rows, scores.nan_rows + scores.infinite_rows) == (4, 2)
    assert (scores.entropy, scores.z, scores.logit_max) == (clean.entropy, clean.z, clean.logit_max)
    assert found is not None
    values = {sample.name: sample.value for sample in found.samples() if sample.labels.get("layer") == "0"}
    assert values["moe_score_nonfinite_tokens_total"] == 2


def test_a_paused_call_leaves_no_sum_and_no_maximum(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with monitor.pause():
            model(100 * _hidden())
        model(_hidden())
        scores = _scores(monitor.step(1))
    assert scores.rows == 6
    assert scores.logit_max is not None
    assert scores.logit_max < 50


def test_stages_have_statistics_of_their_own_and_training_is_what_is_exported(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        model.eval()
        model(_hidden(seed=5))
        alone = monitor.step(1)
        model(_hidden(seed=5))
        model.train()
        model(_hidden())
        both = monitor.step(2)
    assert both is not None
    assert alone is not None
    assert _scores(both, "eval").entropy == _scores(alone, "eval").entropy
    for snapshot, stage in ((alone, "eval"), (both, "train")):
        (value,) = (
            sample.value
            for sample in snapshot.samples()
            if sample.name == "moe_score_entropy_ratio" and sample.labels["layer"] == "0"
        )
        assert value == _scores(snapshot, stage).entropy


def test_the_mean_over_microbatches_of_maxvio_does_not_cancel_out(model: TinyMoe) -> None:
    with mt.watch(nn.Module(), routers={"decoder.0": 2}, every_n_steps=1) as monitor:
        for expert in (0, 1):
            monitor.observe(0, [[expert], [expert]])
        snapshot = monitor.step(1)
    assert snapshot is not None
    assert snapshot.layers[FIRST].window["train"].microbatch_max_violation == 1.0
    assert snapshot.layers[FIRST].window["train"].scores is None
    names = {sample.name for sample in snapshot.samples()}
    assert "moe_load_microbatch_max_violation_ratio" in names
    assert not {name for name in names if name.startswith(("moe_score", "moe_logit", "moe_router_z"))}


def test_scores_given_by_hand_are_counted_as_those_of_a_hook(model: TinyMoe) -> None:
    calls: list[torch.Tensor] = []
    handle = model.layers[0].gate.register_forward_hook(lambda _module, _args, output: calls.extend(output))
    with _watch(model) as monitor:
        model(_hidden())
        hooked = _scores(monitor.step(1))
    handle.remove()
    logits, _, ids = calls
    with mt.watch(nn.Module(), routers={"decoder.0": 8}, every_n_steps=1) as monitor:
        monitor.observe(0, ids, scores=logits)
        assert _scores(monitor.step(1)) == hooked


def test_the_bias_is_read_when_the_window_ends() -> None:
    bias = torch.zeros(4)
    _, peaks = _counters(4)
    site = _site(4, read_bias=lambda: bias)
    bias += torch.tensor([1.0, -2.0, 0.0, 1.0])
    note_bias(peaks, site)
    statistics = ScoreStatistics.of([*[0] * (NUM_SUM_FIELDS - 1), 1, 0, 0, 0, 0], peaks[1:, 0].tolist())
    assert statistics is not None
    assert (statistics.bias_max, statistics.bias_min) == (1.0, -2.0)
    assert statistics.bias_std == pytest.approx(float(bias.std(correction=0)))


def test_scores_that_do_not_fit_the_choices_are_reported_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    sums_FS, peaks = _counters(8)
    for _ in range(2):
        count_scores(
            sums_FS,
            peaks,
            torch.tensor(slot_value(0)),
            torch.randn(6, 5),
            torch.zeros(6, 2, dtype=torch.int64),
            None,
            sampling=Sampling(),
            site=_site(),
            strict=True,
        )
    assert caplog.text.count("scores with 5 columns do not fit choices with 2 among 8 experts") == 1
    assert not sums_FS[:-2].any()


def test_without_scores_nothing_is_kept_and_nothing_exported(model: TinyMoe) -> None:
    with _watch(model, scores=False) as monitor:
        model(_hidden())
        snapshot = monitor.step(1)
    assert snapshot is not None
    assert snapshot.layers[FIRST].window["train"].scores is None
    assert snapshot.layers[FIRST].window["train"].microbatch_max_violation is None


# when


def test_scores_are_taken_before_the_first_step_and_in_steps_that_end_in_a_reduction(model: TinyMoe) -> None:
    with _watch(model, every_n_steps=3) as monitor:
        rows = []
        for step in range(1, 10):
            for _ in range(2):
                model(_hidden())
            if (snapshot := monitor.step(step)) is not None:
                rows.append(_scores(snapshot).rows)
                assert snapshot.layers[FIRST].window["train"].tokens == 36
    assert rows == [24, 12, 12]


@COMPILING
def test_compiled_code_obeys_sampling_and_counts_once_without_compiling_again(fresh_compiler: None) -> None:
    model = TinyMoe(num_layers=3)
    backend = CompileCounterWithBackend("aot_eager")
    rows = []
    with _watch(model, every_n_steps=3) as monitor:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for step in range(1, 7):
            compiled(_hidden().requires_grad_()).sum().backward()
            if (snapshot := monitor.step(step)) is not None:
                rows.append(_scores(snapshot).rows)
    assert rows == [12, 6]
    assert backend.frame_count == 1


# what it never does


@pytest.mark.parametrize("choices", [torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, 8, dtype=torch.bool)])
@pytest.mark.parametrize("valid", [None, torch.ones(2, 3)])
@pytest.mark.parametrize("is_biased", [False, True])
def test_nothing_reads_the_device(choices: torch.Tensor, valid: torch.Tensor | None, is_biased: bool) -> None:
    # a meta tensor has no values: whatever would wait for one raises
    meta = torch.device("meta")
    count_scores(
        *_counters(device=meta),
        torch.tensor(slot_value(0), device=meta),
        torch.randn(6, 8, device=meta),
        choices.to(meta),
        None if valid is None else valid.to(meta),
        sampling=Sampling(),
        site=_site(top_k=2, is_biased=is_biased),
        strict=True,
    )


def test_the_operator_passes_the_checks_of_torch_for_custom_operators() -> None:
    sampling = Sampling()
    scores, ids, valid = torch.randn(3, 8), torch.tensor([[0, 1]] * 3), torch.tensor([True, True, False])
    what = (sampling.handle, 2, True, "logits", "softmax", False)
    arguments = (*_counters(), torch.tensor(slot_value(0)), scores, ids, valid, *what)
    torch.library.opcheck(torch.ops.moe_telemetry.score.default, arguments)


def test_a_slot_that_is_not_read_takes_no_maximum() -> None:
    sums_FS, peaks = _counters()
    slot = torch.tensor(slot_value(UNCOUNTED_SLOT))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    count_scores(sums_FS, peaks, slot, torch.ones(3, 8), ids, None, sampling=Sampling(), site=_site(), strict=True)
    assert (peaks[:, :UNCOUNTED_SLOT] == NOTHING).all()
    assert not sums_FS[:, :UNCOUNTED_SLOT].any()
