"""record(), replay() and check() in a running model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe

FIRST = mt.RouterKey("decoder", 1)


@pytest.fixture
def model() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.fixture
def monitor(model: nn.Module) -> Iterator[mt.Monitor]:
    with mt.watch(model, every_n_steps=1) as monitor:
        yield monitor


def _batch(seed: int = 1, batch_size: int = 4, length: int = 32) -> Tensor:
    return torch.randint(0, 64, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def _run(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


def _record(model: nn.Module, monitor: mt.Monitor, ids: Tensor, mask: Tensor | None = None) -> mt.Routes:
    with torch.no_grad(), monitor.record() as recording:
        _run(model, ids, mask)
    return recording.routes()


def _rolled(routes: mt.Routes) -> mt.Routes:
    return replace(routes, ids=routes.ids.roll(1, 0))


def _seen_by_experts(model: nn.Module, ids: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: seen.append(args[1].clone()))
        for layer in model.model.layers[1:]
    ]
    _run(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def test_recorded_routes_are_what_the_experts_received(model: nn.Module, monitor: mt.Monitor) -> None:
    expected = _seen_by_experts(model, _batch())
    routes = _record(model, monitor, _batch())
    assert routes.keys == tuple(mt.RouterKey("decoder", layer) for layer in (1, 2, 3))
    assert routes.sequence_lengths == (32,) * 4
    assert torch.equal(routes.ids, torch.stack(expected, dim=1).to(torch.int32))


def test_all_layers_use_the_routes_of_another_batch(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch(1))
    with monitor.replay(routes):
        seen = _seen_by_experts(model, _batch(2))
    assert torch.equal(torch.stack(seen, dim=1).to(torch.int32), routes.ids)


def test_a_model_that_replays_its_own_routes_gives_the_same_bits(model: nn.Module, monitor: mt.Monitor) -> None:
    expected = _run(model, _batch())
    with monitor.replay(_record(model, monitor, _batch())):
        assert torch.equal(_run(model, _batch()), expected)


def test_check_changes_no_bit_and_counts_the_same(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _rolled(_record(model, monitor, _batch()))
    monitor.snapshot()
    expected = _run(model, _batch())
    with monitor.check(routes):
        assert torch.equal(_run(model, _batch()), expected)
    checked = monitor.snapshot().layers[FIRST].replay
    with monitor.replay(routes):
        _run(model, _batch())
    assert checked == monitor.snapshot().layers[FIRST].replay
    assert checked is not None
    assert (checked.agreement or 0) < 0.9


def test_nothing_changes_outside_the_context(model: nn.Module, monitor: mt.Monitor) -> None:
    expected = _run(model, _batch())
    with monitor.replay(_rolled(_record(model, monitor, _batch()))):
        assert not torch.equal(_run(model, _batch()), expected)
    assert torch.equal(_run(model, _batch()), expected)


def test_gradients_equal_those_of_a_replay_written_by_hand(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch(2))
    with monitor.replay(routes):
        _run(model, _batch(1)).square().mean().backward()
    replayed = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    monitor.close()
    handles = [_replay_by_hand(model.model.layers[key.layer].mlp.gate, routes.layer(key)) for key in routes.keys]
    _run(model, _batch(1)).square().mean().backward()
    for handle in handles:
        handle.remove()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == replayed.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(replayed[name], gradient, rtol=1e-4, atol=1e-9)
    assert replayed["model.layers.1.mlp.gate.weight"].abs().sum() > 0


def _replay_by_hand(gate: nn.Module, routes_TK: Tensor) -> torch.utils.hooks.RemovableHandle:
    def hook(_module: nn.Module, _args: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ids_TK = routes_TK.to(torch.int64)
        weights_TK = output[0].float().softmax(-1).gather(-1, ids_TK)
        if gate.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return output[0], weights_TK.to(output[1].dtype), ids_TK

    return gate.register_forward_hook(hook)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_every_microbatch_with_its_own_routes(
    model: nn.Module, monitor: mt.Monitor, use_reentrant: bool
) -> None:
    first, second = _record(model, monitor, _batch(3)), _rolled(_record(model, monitor, _batch(4)))
    expected = _gradients_of_two(model, monitor, first, second)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    before = monitor.snapshot().layers[FIRST].total["train"].replay
    actual = _gradients_of_two(model, monitor, first, second)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
    after = monitor.snapshot().layers[FIRST].window["train"].replay
    assert before is not None
    assert after is not None
    assert after.replayed == 2 * 128  # the recomputation is not counted


def _gradients_of_two(model: nn.Module, monitor: mt.Monitor, first: mt.Routes, second: mt.Routes) -> list[Tensor]:
    """Run two microbatches, then their backward passes in the other order, outside of any context."""
    model.train()
    model.zero_grad()
    with monitor.replay(first):
        loss_of_first = _run(model, _batch(1)).square().mean()
    with monitor.replay(second):
        loss_of_second = _run(model, _batch(2)).square().mean()
    loss_of_plain = _run(model, _batch(5)).square().mean()
    loss_of_second.backward()
    loss_of_plain.backward()
    loss_of_first.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_knows_its_routes_also_where_only_a_part_of_the_model_is_called(
    model: nn.Module, monitor: mt.Monitor, use_reentrant: bool
) -> None:
    first, second = _record(model, monitor, _batch(3)), _record(model, monitor, _batch(4))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        losses = []
        for routes, batch in ((first, _batch(1)), (second, _batch(2))):
            with monitor.replay(routes):
                hidden = model.model(inputs_embeds=model.get_input_embeddings()(batch)).last_hidden_state
            losses.append(model.lm_head(hidden).square().mean())
        for loss in losses:
            loss.backward()
        monitor.step()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.train()
    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for one, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_nothing_is_remembered_of_forwards_whose_inputs_are_gone(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch())
    for _ in range(5):
        with torch.no_grad(), monitor.check(routes):
            _run(model, _batch())
    remembered = monitor._routes._state._of_input
    assert [reference for reference, _ in remembered.values() if reference() is None] == []
    assert {replaying for _, replaying in remembered.values()} <= {None}


def test_a_router_that_was_rebuilt_is_replayed_into_like_the_others(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _rolled(_record(model, monitor, _batch()))
    with monitor.replay(routes):
        _run(model, _batch())
    model.model.layers[1] = copy.deepcopy(model).model.layers[1]
    monitor.step(1)
    with monitor.replay(routes):
        seen = _seen_by_experts(model, _batch())
    assert torch.equal(torch.stack(seen, dim=1).to(torch.int32), routes.ids)


def test_a_gate_with_one_group_is_replayed_by_its_choice_and_not_by_its_groups() -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with mt.watch(model, every_n_steps=1) as monitor:
        routes = _record(model, monitor, _batch())
        routes = replace(routes, ids=(routes.ids + 3) % 8)
        monitor.snapshot()
        with monitor.replay(routes):
            seen = _seen_by_experts(model, _batch())
        replay = monitor.snapshot().layers[FIRST].replay
    assert torch.equal(seen[0].sort(-1).values.int(), routes.layer(FIRST).sort(-1).values)
    assert replay is not None
    assert replay.replayed == 128


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore::DeprecationWarning")
def test_a_compiled_model_replays_the_routes_of_each_block_and_recomputes_none() -> None:
    torch._dynamo.reset()
    model = TinyMoe()
    hidden = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        with monitor.record() as recording:
            model(hidden)
        own = recording.routes()
        other = replace(own, ids=own.ids.roll(3, 0))
        expected = []
        for routes in (own, other):
            with monitor.replay(routes):
                expected.append(model(hidden))
        monitor.snapshot()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for routes, output in zip((own, other, own), (*expected, expected[0]), strict=True):
            with monitor.replay(routes):
                torch.testing.assert_close(compiled(hidden), output)
        with monitor.check(other):
            torch.testing.assert_close(compiled(hidden), expected[0])
        replay = monitor.snapshot().layers[mt.RouterKey("decoder", 0)].replay
    torch._dynamo.reset()
    assert replay is not None
    assert replay.replayed == 4 * 40


def test_what_is_compared_while_paused_is_in_no_figure() -> None:
    model = TinyMoe()
    hidden = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        with monitor.record() as recording:
            model(hidden)
        routes = recording.routes()
        with monitor.pause(), monitor.check(replace(routes, ids=routes.ids.roll(1, 0))):
            model(hidden)
        with monitor.check(routes):
            model(hidden)
        layer = monitor.snapshot().layers[mt.RouterKey("decoder", 0)]
    assert layer.replay is not None
    assert (layer.replay.replayed, layer.worst_rank_zero_overlap) == (40, 0.0)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_routes_of_real_tokens_find_their_rows_under_padding(
    model: nn.Module, monitor: mt.Monitor, padding_side: str
) -> None:
    lengths = (32, 20, 1, 7)
    mask = torch.stack([(torch.arange(32) < length).long() for length in lengths])
    mask = mask.flip(1) if padding_side == "left" else mask
    full = _record(model, monitor, _batch(), mask)
    real = mt.Routes(full.ids[mask.flatten() > 0], lengths, full.keys, 16)
    monitor.snapshot()
    with monitor.replay(real):
        _run(model, _batch(), mask)
    replay = monitor.snapshot().layers[FIRST].replay
    assert replay is not None
    assert (replay.replayed, replay.missing, replay.agreement) == (sum(lengths), 0, 1.0)


def test_rows_without_a_route_fall_back_to_the_routers_own_choice(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch())
    ids = routes.ids.clone()
    ids[5], ids[9, :, 1], ids[20, :, 0], ids[30] = -1, -1, 99, ids[30, :, :1]
    monitor.snapshot()
    with monitor.replay(replace(routes, ids=ids)):
        seen = _seen_by_experts(model, _batch())
    assert torch.equal(torch.stack(seen, dim=1).to(torch.int32), routes.ids)
    replay = monitor.snapshot().layers[FIRST].replay
    assert replay is not None
    assert (replay.missing, replay.malformed, replay.out_of_range, replay.repeated) == (1, 1, 1, 1)
    assert replay.fallback == 4


def test_a_roll_by_one_token_is_reported_with_its_cause(
    model: nn.Module, monitor: mt.Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    routes = _rolled(_record(model, monitor, _batch(length=64)))
    with monitor.replay(routes):
        _run(model, _batch(length=64))
    monitor.step(1)
    monitor._routes.wait(30)
    assert "share no expert with the router's own choice (limit 1.0%" in caplog.text
    assert "routes lag their tokens by one row within sequences" in caplog.text
    snapshot = monitor.step(2)
    assert snapshot is not None
    labels = [sample.labels for sample in snapshot.samples() if sample.name == "moe_replay_misalignment_info"]
    assert labels == [{"cause": "token_shift", "offset": "1"}]


def test_a_healthy_replay_says_nothing(model: nn.Module, monitor: mt.Monitor, caplog: pytest.LogCaptureFixture) -> None:
    with monitor.replay(_record(model, monitor, _batch(length=64))):
        _run(model, _batch(length=64))
    monitor.step(1)
    assert caplog.text == ""


def test_routes_of_which_nothing_can_be_checked_are_reported(
    model: nn.Module, monitor: mt.Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    routes = _record(model, monitor, _batch())
    with monitor.check(replace(routes, ids=torch.zeros_like(routes.ids))):
        _run(model, _batch())
    snapshot = monitor.step(1)
    assert snapshot is not None
    replay = snapshot.layers[FIRST].replay
    assert replay is not None
    assert (replay.coverage, replay.zero_overlap_ratio) == (0.0, None)
    assert "none of them could be checked" in caplog.text


def test_routes_for_another_number_of_tokens_are_refused_before_anything_changes(
    model: nn.Module, monitor: mt.Monitor
) -> None:
    routes = _record(model, monitor, _batch(length=31))
    with monitor.replay(routes), pytest.raises(mt.RoutesError, match="124 tokens in 4 sequences .* call of 128 rows"):
        _run(model, _batch())
    assert monitor.snapshot().layers[FIRST].replay is None


def test_routes_of_another_model_are_refused(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch())
    for other, message in [
        (
            mt.Routes(routes.ids, routes.sequence_lengths, tuple(mt.RouterKey("mtp0", n) for n in range(3))),
            "no routes of",
        ),
        (mt.Routes(routes.ids[:, :, :1], routes.sequence_lengths, routes.keys), "K=1 experts a token"),
        (replace(routes, num_experts=32), "a model with 32 experts"),
    ]:
        with pytest.raises(mt.RoutesError, match=message), monitor.replay(other):
            pass


def test_replays_cannot_be_nested(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _record(model, monitor, _batch())
    with monitor.replay(routes), pytest.raises(mt.LifecycleError, match="cannot be nested"), monitor.check(routes):
        pass


def test_recording_nothing_is_refused(monitor: mt.Monitor) -> None:
    with monitor.record() as recording, pytest.raises(mt.RoutesError, match="nothing was recorded"):
        recording.routes()


def test_close_takes_the_interception_out(model: nn.Module, monitor: mt.Monitor) -> None:
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with monitor.replay(_record(model, monitor, _batch())):
        pass
    monitor.close()
    for name, module in model.named_modules():
        assert set(module.__dict__) <= before[name]
        assert "forward" not in module.__dict__


def test_close_puts_back_a_forward_that_somebody_else_had_replaced(model: nn.Module, monitor: mt.Monitor) -> None:
    gate = model.model.layers[1].mlp.gate
    routes = _record(model, monitor, _batch())
    replaced = gate.forward
    gate.forward = replaced
    with monitor.replay(routes):
        _run(model, _batch())
    monitor.close()
    assert gate.forward is replaced


def test_two_forwards_in_one_block_find_their_rows_by_their_own_masks(model: nn.Module, monitor: mt.Monitor) -> None:
    right = torch.tensor([[1] * 20 + [0] * 12] * 4)
    full = _record(model, monitor, _batch(), right)
    real = mt.Routes(full.ids[right.flatten() > 0], (20,) * 4, full.keys, 16)
    monitor.snapshot()
    with monitor.check(real):
        _run(model, _batch(), right)
        _run(model, _batch().roll(12, 1), right.flip(1))
    replay = monitor.snapshot().layers[FIRST].replay
    assert replay is not None
    assert (replay.replayed, replay.missing) == (160, 0)
    assert (replay.agreement or 0) > 0.95


def test_copies_of_a_replaying_model_replay_nothing(model: nn.Module, monitor: mt.Monitor) -> None:
    routes = _rolled(_record(model, monitor, _batch()))
    expected = _run(model, _batch())
    with monitor.replay(routes):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(_run(twin, _batch()), expected)


def test_a_router_of_a_custom_model_is_replayed_into_as_well() -> None:
    model = TinyMoe()
    hidden = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        expected = model(hidden)
        with monitor.record() as recording:
            model(hidden)
        with monitor.replay(recording.routes()):
            assert torch.equal(model(hidden), expected)
        replay = monitor.snapshot().layers[mt.RouterKey("decoder", 0)].replay
    assert replay is not None
    assert (replay.replayed, replay.agreement) == (40, 1.0)


def test_a_router_without_a_top_k_is_refused_by_name_and_can_be_checked() -> None:
    class HandMade(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.argsort(-1, descending=True)[:, :2]

    model = nn.ModuleDict({"gate": HandMade()})
    hidden = torch.randn(6, 4)
    routes = mt.Routes(model["gate"](hidden).unsqueeze(1), (6,), (mt.RouterKey("decoder", 0),))
    with mt.watch(model, routers={"gate": 4}) as monitor:
        with (
            monitor.replay(routes),
            pytest.raises(mt.RoutesError, match=r"'gate' \(HandMade\) makes its choice by no top-k"),
        ):
            model["gate"](hidden)
        with monitor.check(routes):
            model["gate"](hidden)
        replay = monitor.snapshot().layers[mt.RouterKey("decoder", 0)].replay
    assert replay is not None
    assert replay.agreement == 1.0


def test_the_longest_run_of_a_stage_that_is_new_in_the_window_is_not_lost() -> None:
    model = TinyMoe()
    hidden = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0))
    with mt.watch(model, routers=model.routers, every_n_steps=1) as monitor:
        with monitor.record() as recording:
            model(hidden)
        routes = recording.routes()
        ids = routes.ids.clone()
        ids[5:9] = ids[5]
        with monitor.stage("rollout"), monitor.check(replace(routes, ids=ids)):
            model(hidden)
        replay = monitor.snapshot().layers[mt.RouterKey("decoder", 0)].replay
    assert replay is not None
    assert replay.longest_equal_run >= 4
