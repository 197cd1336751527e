"""Per-sequence diagnostics from the hooks of a running model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_telemetry as mt
from moe_telemetry.routers import RouterOutput
from moe_telemetry.testing.models import TinyMoe

FIRST = mt.RouterKey("decoder", 0)
CHANNELS = mt.RouterDiagnosticChannel


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _hidden(batch_size: int = 2, sequence_length: int = 3) -> torch.Tensor:
    return torch.randn(batch_size, sequence_length, 16, generator=torch.Generator().manual_seed(1))


def _watch(model: TinyMoe, **settings: object) -> mt.Monitor:
    return mt.watch(model, **{"routers": model.routers, "per_sequence": True, **settings})


def _expected(model: TinyMoe, hidden: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the diagnostics of the first router, from its logits put into the order of positions."""
    logits_BSE = hidden @ model.layers[0].gate.weight.t()
    scores = logits_BSE.transpose(0, 1).reshape(-1, 8).softmax(-1)
    routing_map = torch.zeros_like(scores).scatter_(1, scores.topk(2).indices, 1) > 0
    batch_size, sequence_length = hidden.shape[:2]
    padding = (valid == 0).t()
    return mt.build_router_diagnostics(scores, routing_map, routing_map, None, sequence_length, batch_size, padding)


def test_the_last_microbatch_is_summarised_by_sequence_in_the_order_of_the_batch() -> None:
    model, mask = TinyMoe(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    with _watch(model) as monitor:
        assert monitor.router_diagnostics() == {}
        model(_hidden(5))
        model(_hidden(), mask)
        found = monitor.router_diagnostics()
    assert list(found) == list(monitor.routers)
    torch.testing.assert_close(found[FIRST], _expected(model, _hidden(), mask))
    assert found[FIRST][:, CHANNELS.VALID_TOKEN_COUNT, 0].tolist() == [2, 1]


def test_without_a_mask_the_batch_is_taken_from_the_models_input() -> None:
    model = TinyMoe()
    with _watch(model) as monitor:
        model(_hidden(3, 4))
        found = monitor.router_diagnostics()[FIRST]
    torch.testing.assert_close(found, _expected(model, _hidden(3, 4), torch.ones(3, 4)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_gives_the_same_in_one_graph(fresh_compiler: None) -> None:
    model, mask = TinyMoe(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    with _watch(model) as monitor:
        torch.compile(model, fullgraph=True, backend="aot_eager")(_hidden(), mask)
        torch.testing.assert_close(monitor.router_diagnostics()[FIRST], _expected(model, _hidden(), mask))


def test_recomputation_leaves_the_last_call_as_it_was() -> None:
    model = TinyMoe(use_reentrant=False)
    with _watch(model) as monitor:
        first = model(_hidden().requires_grad_())
        model(_hidden(4))
        first.sum().backward()
        assert monitor.router_diagnostics()[FIRST].shape == (4, 7, 8)


def test_a_paused_call_leaves_the_last_call_as_it_was() -> None:
    model = TinyMoe()
    with _watch(model) as monitor:
        model(_hidden())
        with monitor.pause():
            model(_hidden(4))
        assert monitor.router_diagnostics()[FIRST].shape == (2, 7, 8)


def _read_ids_alone(_args: Any, _kwargs: Any, output: Any) -> RouterOutput:
    return RouterOutput(expert_ids=output[2])


def test_a_router_without_scores_says_which_channels_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    spec = mt.RouterSpec(num_experts=8, top_k=2, read=_read_ids_alone)
    model = TinyMoe(num_layers=1)
    with _watch(model, routers={"layers.*.gate": spec}) as monitor:
        model(_hidden())
        found = monitor.router_diagnostics()[FIRST]
        monitor.router_diagnostics()
    missing = [channel.name for channel in CHANNELS if found[:, channel].isnan().all()]
    assert missing == ["MEAN_SCORE", "AUX_LOAD", "AUX_ACTUAL_OVERLAP", "TOPK_BOUNDARY_RELATIVE_MARGIN"]
    assert caplog.text.count(f"'layers.0.gate' does not show its scores: channels {', '.join(missing)}") == 1
    assert found[:, CHANNELS.ACTUAL_LOAD].sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_asking_without_having_asked_for_them_is_an_error_that_names_the_setting() -> None:
    with _watch(TinyMoe(), per_sequence=False) as monitor, pytest.raises(mt.ConfigError, match="per_sequence=True"):
        monitor.router_diagnostics()


def test_keeping_them_changes_no_bit_of_outputs_and_gradients() -> None:
    plain, watched = TinyMoe(), TinyMoe()
    with _watch(watched):
        outputs = [model(_hidden()) for model in (plain, watched)]
        for output in outputs:
            output.sum().backward()
    assert torch.equal(*outputs)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
