"""Capture: what a trace holds of a running model, from which calls, under which numbers."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import moe_telemetry as mt
from moe_telemetry import route_capture, tracing
from moe_telemetry.masks import TokenMask
from moe_telemetry.route_capture import RouterCapture, StepCapture, narrow_ids
from moe_telemetry.stages import StageSlots
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace.calls import Budget
from moe_telemetry.trace.manifest import LeftOut, Manifest, TracedRouter
from moe_telemetry.tracing import Trace, TraceOptions

FIRST = mt.RouterKey("decoder", 0)


def _hidden(batch_size: int = 2, sequence_length: int = 3, seed: int = 1) -> torch.Tensor:
    values = torch.randn(batch_size, sequence_length, 16, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("routes-*.parquet")) for row in pq.read_table(path).to_pylist()]


def _where(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in _rows(folder)]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("tensors-*")) for name, tensor in load_file(path).items()}


def _manifest(folder: Path) -> Manifest:
    return Manifest.from_json((folder / "manifest-00000.json").read_text())


@pytest.fixture
def model() -> TinyMoe:
    return TinyMoe()


@pytest.fixture
def monitor(model: TinyMoe) -> Iterator[mt.Monitor]:
    with mt.watch(model, routers=model.routers) as monitor:
        yield monitor


# which calls, under which numbers


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_step_of_two_microbatches_is_a_record_of_each_layer_and_microbatch(
    tmp_path: Path, use_reentrant: bool | None
) -> None:
    model = TinyMoe(use_reentrant=use_reentrant)
    with mt.watch(model, routers=model.routers) as monitor, monitor.trace(tmp_path):
        for seed in (1, 2):
            model(_hidden(seed=seed)).sum().backward()
        monitor.step(0)
    assert _where(tmp_path, "step", "microbatch", "layer") == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_steps_have_the_callers_numbers_and_as_many_are_captured_as_were_asked_for(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    trace = monitor.trace(tmp_path, max_steps=2)
    for step in range(1000, 1005):
        assert trace.is_running == (step < 1002)
        model(_hidden())
        monitor.step(step)
    trace.close()
    assert _where(tmp_path, "step", "layer") == [(1000, 0), (1000, 1), (1001, 0), (1001, 1)]
    assert _manifest(tmp_path).max_steps == 2
    assert [tap.capture for tap in monitor._taps.values()] == [None, None]


def test_a_step_without_a_call_is_not_one_of_the_captured_steps(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path, max_steps=1) as trace:
        monitor.step(1)
        assert trace.is_running
        model(_hidden())
        monitor.step(2)
        assert not trace.is_running
    assert _where(tmp_path, "step") == [(2,), (2,)]


def test_one_step_in_several_is_captured_the_first_one_first(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path, every_n_steps=3) as trace:
        for step in range(1, 8):
            model(_hidden())
            monitor.step(step)
    assert _where(tmp_path, "step", "microbatch", "layer") == [(n, 0, layer) for n in (1, 4, 7) for layer in (0, 1)]
    assert trace.left_out == LeftOut(calls_of_other_steps=8)


def test_calls_that_no_step_has_ended_are_of_the_coming_step(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path / "first"), torch.inference_mode():
        model(_hidden())
    assert _where(tmp_path / "first", "step", "microbatch") == [(1, 0), (1, 0)]
    monitor.step(10)
    monitor.step(20)
    with monitor.trace(tmp_path / "second"):
        model(_hidden())
        model(_hidden())
    assert _where(tmp_path / "second", "step", "microbatch") == [(30, 0), (30, 0), (30, 1), (30, 1)]


def test_stages_are_recorded_and_paused_calls_are_not(model: TinyMoe, monitor: mt.Monitor, tmp_path: Path) -> None:
    with monitor.trace(tmp_path):
        model(_hidden())
        with monitor.pause():
            model(_hidden())
        with monitor.stage("rollout"), torch.no_grad():
            model(_hidden())
        model.eval()
        with torch.no_grad():
            model(_hidden())
        monitor.step(1)
    found = _where(tmp_path, "stage", "microbatch", "layer")
    assert found[::2] == [("train", 0, 0), ("rollout", 1, 0), ("eval", 2, 0)]


def test_layers_are_numbered_as_the_model_numbers_them(tmp_path: Path) -> None:
    model = TinyMoe(num_layers=13)
    spec = mt.RouterSpec(num_experts=8, top_k=2)
    routers = {f"layers.{layer}.gate": spec for layer in (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)}
    with mt.watch(model, routers=routers) as monitor, monitor.trace(tmp_path):
        model(_hidden())
    assert _where(tmp_path, "layer") == [(layer,) for layer in range(1, 13)]
    manifest = _manifest(tmp_path)
    assert [str(router.key) for router in manifest.routers] == [f"decoder.{layer}" for layer in range(1, 13)]
    assert (manifest.model, manifest.rank, manifest.world_size, manifest.token_group) == ("TinyMoe", 0, 1, 0)


# what is kept of a call


def test_ids_are_those_that_record_gives_in_the_routers_own_order(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path), monitor.record() as recording:
        model(_hidden(), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    routes = recording.routes().ids
    for layer, row in enumerate(_rows(tmp_path)):
        ids = torch.tensor(row["expert_ids"]).view(-1, 2)
        real = torch.tensor(row["valid"])
        assert real.tolist() == [True, True, False, True, True, True]
        assert torch.equal(ids[real], routes[real, layer].long())
        assert (row["num_tokens"], row["top_k"], row["is_sorted"]) == (6, 2, False)
        assert row["sequence_starts"] == [0, 3]


class _MapRouter(nn.Module):
    def __init__(self, routing_map: torch.Tensor) -> None:
        super().__init__()
        self.routing_map = routing_map

    def forward(self, _hidden: torch.Tensor) -> torch.Tensor:
        return self.routing_map


def test_a_routing_map_gives_ascending_ids_and_says_so(tmp_path: Path) -> None:
    chosen = [[7, 2], [5, 0], [3], []]
    routing_map = torch.zeros(4, 8, dtype=torch.bool)
    for token, experts in enumerate(chosen):
        routing_map[token, experts] = True
    model = nn.ModuleDict({"gate": _MapRouter(routing_map)})
    with mt.watch(model, routers={"gate": mt.RouterSpec(num_experts=8, top_k=2)}) as monitor, monitor.trace(tmp_path):
        model["gate"](torch.zeros(4, 16))
    (row,) = _rows(tmp_path)
    assert row["expert_ids"] == [2, 7, 0, 5, 3, -1, -1, -1]
    assert row["is_sorted"]
    assert _manifest(tmp_path).left_out == LeftOut()


def test_choices_of_a_map_beyond_k_a_token_are_counted(tmp_path: Path) -> None:
    routing_map = torch.zeros(3, 8, dtype=torch.bool)
    routing_map[0, [1, 2, 3]] = routing_map[2, [4, 5, 6, 7]] = True
    model = nn.ModuleDict({"gate": _MapRouter(routing_map)})
    with mt.watch(model, routers={"gate": mt.RouterSpec(num_experts=8, top_k=2)}) as monitor, monitor.trace(tmp_path):
        model["gate"](torch.zeros(3, 16))
    assert _where(tmp_path, "expert_ids") == [([1, 2, -1, -1, 4, 5],)]
    assert _manifest(tmp_path).left_out == LeftOut(choices_over_top_k=3)


def test_the_order_of_chosen_experts_is_kept_and_ids_that_are_no_expert_are_minus_one(
    monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path):
        for dtype in (torch.int64, torch.int32, torch.int16):
            monitor.observe(0, torch.tensor([[7, 2], [-1, 3], [9, 0], [-5, 255]], dtype=dtype))
        monitor.observe(0, torch.tensor([[7, 2], [255, 8]], dtype=torch.uint8))
        monitor.observe(0, torch.tensor([[7, 2], [-128, 127]], dtype=torch.int8))
    found = _where(tmp_path, "expert_ids")
    assert found[:3] == [([7, 2, -1, 3, -1, 0, -1, -1],)] * 3
    assert found[3:] == [([7, 2, -1, -1],)] * 2


@pytest.mark.parametrize("num_experts", [1, 127, 128, 129, 254, 255, 256, 2**15 - 1, 2**15, 40_000])
def test_ids_of_any_number_of_experts_are_kept(tmp_path: Path, num_experts: int) -> None:
    ids = [[0, num_experts - 1], [num_experts, -1], [num_experts // 2, num_experts + 1]]
    with mt.watch(nn.Identity(), routers={"decoder.0": num_experts}) as monitor, monitor.trace(tmp_path):
        monitor.observe(0, ids)
    assert _where(tmp_path, "expert_ids") == [([0, num_experts - 1, -1, -1, num_experts // 2, -1],)]


def test_of_more_tokens_than_the_limit_the_first_are_kept_and_the_others_counted(
    monitor: mt.Monitor, tmp_path: Path
) -> None:
    ids = torch.randint(0, 8, (8192, 2))
    with monitor.trace(tmp_path, max_tokens_per_step=1000) as trace:
        for part in ids.split([600, 1000, 6592]):
            monitor.observe(0, part, valid=torch.ones(len(part)))
        monitor.step(1)
        monitor.observe(0, ids[:100])
        monitor.step(2)
    found = _rows(tmp_path)
    assert [(row["num_tokens"], len(row["expert_ids"]) // 2) for row in found] == [
        (600, 600),
        (1000, 400),
        (6592, 0),
        (100, 100),
    ]
    assert [row["valid"] and len(row["valid"]) for row in found] == [600, 400, [], None]
    assert [row["sequence_starts"] for row in found] == [[0], [0], [], [0]]
    assert [expert for row in found[:3] for expert in row["expert_ids"]] == ids[:1000].flatten().tolist()
    assert trace.left_out == LeftOut(tokens_over_limit=7192)
    assert not trace.left_out.has_losses
    assert _manifest(tmp_path).left_out == trace.left_out


def test_sequences_are_taken_from_the_mask_the_ids_or_the_models_input(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    ids = torch.zeros(6, 2, dtype=torch.int64)
    with monitor.trace(tmp_path):
        model(_hidden(3, 4))  # of three sequences, by the model's input
        monitor.observe(0, ids, valid=torch.ones(2, 3))
        monitor.observe(0, ids.view(3, 2, 2))
        monitor.observe(0, ids, valid=torch.ones(6))
        monitor.observe(0, ids[:0])
    assert [starts for layer, starts in _where(tmp_path, "layer", "sequence_starts") if layer == 0] == [
        [0, 4, 8],
        [0, 3],
        [0, 2, 4],
        [0],
        [],
    ]


# what may come beside the routes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_input_weight_and_diagnostics_are_the_models_own(tmp_path: Path, dtype: torch.dtype) -> None:
    model = TinyMoe().to(dtype)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gate = model.layers[1].gate
    gate.register_forward_hook(lambda _module, args, output: seen.append((args[0].clone(), output[0].clone())))
    hidden = _hidden().detach().to(dtype)
    with mt.watch(model, routers=model.routers, per_sequence=True) as monitor:
        with monitor.trace(tmp_path, scores=True, hidden_states=True, router_weights=True, diagnostics=True):
            for step in (1, 2):
                weight = gate.weight.detach().clone()
                for _ in range(2):
                    model(hidden).sum().backward()
                monitor.step(step)
                with torch.no_grad():
                    gate.weight.add_(1)
            diagnostics = monitor.router_diagnostics()[mt.RouterKey("decoder", 1)]
    found = _tensors(tmp_path)
    names = {name: tuple(tensor.shape) for name, tensor in found.items() if name.endswith("decoder.1")}
    assert names == {
        f"{what}/{step}/{microbatch}/decoder.1": shape
        for what, shape in (("scores", (6, 8)), ("hidden_states", (6, 16)), ("diagnostics", (2, 7, 8)))
        for step in (1, 2)
        for microbatch in (0, 1)
    } | {f"router_weights/{step}/0/decoder.1": (8, 16) for step in (1, 2)}
    for place, (gate_input, logits) in zip(("1/0", "1/1", "2/0", "2/1"), seen, strict=True):
        assert torch.equal(found[f"hidden_states/{place}/decoder.1"], gate_input)
        assert torch.equal(found[f"scores/{place}/decoder.1"], logits)
        assert found[f"scores/{place}/decoder.1"].dtype == dtype
    assert torch.equal(found["router_weights/2/0/decoder.1"], weight)
    assert not torch.equal(found["router_weights/1/0/decoder.1"], weight)
    assert torch.equal(found["diagnostics/2/1/decoder.1"], diagnostics)
    assert _manifest(tmp_path).tensors == ("scores", "hidden_states", "router_weights", "diagnostics")


def test_tensors_of_tokens_over_the_limit_are_left_out_too(model: TinyMoe, monitor: mt.Monitor, tmp_path: Path) -> None:
    with monitor.trace(tmp_path, max_tokens_per_step=4, scores=True, hidden_states=True):
        model(_hidden())
        model(_hidden())
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(tmp_path).items() if name.endswith("decoder.0")}
    assert shapes == {
        "scores/1/0/decoder.0": (4, 8),
        "hidden_states/1/0/decoder.0": (4, 16),
        "scores/1/1/decoder.0": (0, 8),
        "hidden_states/1/1/decoder.0": (0, 16),
    }


def test_the_expert_bias_comes_with_the_weights(tmp_path: Path) -> None:
    model = TinyMoe(num_layers=1)
    bias = torch.arange(8.0)
    spec = mt.RouterSpec(num_experts=8, top_k=2, read_bias=lambda _module: bias)
    with mt.watch(model, routers={"layers.0.gate": spec}) as monitor, monitor.trace(tmp_path, router_weights=True):
        model(_hidden())
    assert torch.equal(_tensors(tmp_path)["expert_bias/1/0/decoder.0"], bias)


def test_what_a_router_does_not_show_is_named_once(
    monitor: mt.Monitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with monitor.trace(tmp_path, scores=True, hidden_states=True):
        for step in (1, 2):
            monitor.observe(0, [[1, 2]])
            monitor.step(step)
    text = [message for message in caplog.messages if "these do not show them" in message]
    assert [message.partition(": no ")[2].partition(" of")[0] for message in text] == ["scores", "hidden_states"]
    assert "routers decoder.0: " in text[0]
    assert len(_rows(tmp_path)) == 2


# memory and the device


def test_calls_beyond_the_memory_that_may_wait_are_dropped_and_counted(
    model: TinyMoe,
    monitor: mt.Monitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # each call is 6 tokens of 2 bytes; inference that never says step() ends here, and not in swap
    monkeypatch.setattr(tracing, "WAITING_BYTES", 3 * 12)
    with monitor.trace(tmp_path) as trace, torch.inference_mode():
        for _ in range(5):
            model(_hidden())
    assert _where(tmp_path, "microbatch", "layer") == [(0, 0), (0, 1), (1, 0)]
    assert trace.left_out == LeftOut(calls_behind=7)
    assert "left out: calls behind: 7" in caplog.text
    assert caplog.text.count("Call monitor.step() after each batch, set max_tokens_per_step, or") == 1


@pytest.mark.parametrize("choices", [torch.randint(0, 8, (6, 2)), torch.rand(6, 8) > 0.5], ids=["ids", "map"])
@pytest.mark.parametrize("valid", [None, torch.ones(2, 3)], ids=["unmasked", "masked"])
def test_nothing_reads_the_device_on_the_way_to_the_copy(
    monkeypatch: pytest.MonkeyPatch, choices: torch.Tensor, valid: torch.Tensor | None
) -> None:
    # a meta tensor has no values: whatever would wait for one raises. It cannot be copied either, so the
    # copies themselves, which are queued and not waited for, are left out
    monkeypatch.setattr(route_capture, "leave_device", lambda tensors: (dict(tensors), None))
    step = StepCapture(StageSlots(), TokenMask(), Budget(10_000), tensors=("scores", "hidden_states", "diagnostics"))
    meta = torch.device("meta")
    site = next(iter(mt.watch(model := TinyMoe(), routers=model.routers)._taps.values())).site
    capture = RouterCapture(site, step)
    mask = None if valid is None else valid.to(meta)
    scores, hidden = torch.empty(6, 8, device=meta), torch.empty(6, 16, device=meta)
    capture.add(choices.to(meta), mask, scores, hidden, training=True, strict=True)
    (call,) = step.take_calls()
    assert step.calls_failed == 0
    assert (call.ids_NK.shape, call.ids_NK.dtype, set(call.tensors)) == ((6, 2), torch.uint8, set(step.wanted))


def test_ids_take_a_byte_up_to_254_experts() -> None:
    for num_experts, dtype in ((254, torch.uint8), (255, torch.int16), (2**15, torch.int32)):
        assert narrow_ids(torch.zeros(1, 1, dtype=torch.int64), num_experts, 1).dtype == dtype


def test_a_device_that_fails_costs_the_call_and_nothing_else(
    model: TinyMoe,
    monitor: mt.Monitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_tensors: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monitor.trace(tmp_path) as trace:
        with monkeypatch.context() as broken:
            broken.setattr(route_capture, "leave_device", fail)
            model(_hidden()).sum().backward()
        model(_hidden())
        assert trace.left_out == LeftOut(calls_failed=2)
    assert len(_rows(tmp_path)) == 2
    assert caplog.text.count("was not traced: no memory") == 1


def test_a_rank_without_routers_ends_when_the_others_do(tmp_path: Path) -> None:
    key = mt.RouterKey("decoder", 0)
    manifest = Manifest(
        run="r", model="m", rank=1, world_size=2, token_group=1, routers=(TracedRouter(key=key, num_experts=8),)
    )
    options = TraceOptions(max_steps=2)
    trace = Trace(tmp_path, options, manifest, {}, stages=StageSlots(), mask=TokenMask(), coming_step=lambda: 1)
    for step in (1, 2):
        assert trace.is_running
        trace.end_step(step)
    assert not trace.is_running
    trace.close()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest-00001.json"]


# the model is left as it was


def test_a_trace_changes_no_output_gradient_or_random_number(tmp_path: Path) -> None:
    results = []
    for traced in (False, True):
        model = TinyMoe()
        hidden = _hidden()
        torch.manual_seed(3)
        with mt.watch(model, routers=model.routers) as monitor:
            options = dict.fromkeys(("scores", "hidden_states", "router_weights", "diagnostics"), True)
            with monitor.trace(tmp_path, **options) if traced else nullcontext():  # type: ignore[arg-type]
                output = model(hidden)
                output.sum().backward()
            results.append((output, hidden.grad, model.layers[0].gate.weight.grad, torch.rand(1), model.state_dict()))
    for one, other in zip(*results, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
        else:
            assert torch.equal(one, other)


def test_a_copy_of_a_traced_model_is_not_traced(model: TinyMoe, monitor: mt.Monitor, tmp_path: Path) -> None:
    with monitor.trace(tmp_path):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(_hidden())
    assert _rows(tmp_path) == []


def test_a_router_that_is_rebuilt_goes_on_in_the_same_trace(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path
) -> None:
    with monitor.trace(tmp_path, router_weights=True):
        model.layers[0] = TinyMoe(seed=5).layers[0]
        monitor.step(9)
        monitor.step(10)
        model(_hidden())
        monitor.step(11)
    assert _where(tmp_path, "step", "layer") == [(11, 0), (11, 1)]
    assert torch.equal(_tensors(tmp_path)["router_weights/11/0/decoder.0"], model.layers[0].gate.weight)


# the handle


def test_one_trace_runs_at_a_time_and_another_may_follow(model: TinyMoe, monitor: mt.Monitor, tmp_path: Path) -> None:
    first = monitor.trace(tmp_path / "first")
    with pytest.raises(mt.LifecycleError, match=r"running already, to .*first: close\(\) it first"):
        monitor.trace(tmp_path / "second")
    model(_hidden())
    first.close()
    first.close()
    assert not first.is_running
    with monitor.trace(str(tmp_path / "second")) as second:
        model(_hidden())
        assert second.path == tmp_path / "second"
    assert len(_rows(tmp_path / "first")) == len(_rows(tmp_path / "second")) == 2


def test_closing_the_monitor_ends_the_trace(tmp_path: Path, model: TinyMoe) -> None:
    monitor = mt.watch(model, routers=model.routers)
    trace = monitor.trace(tmp_path)
    model(_hidden())
    monitor.close()
    assert not trace.is_running
    assert (len(_rows(tmp_path)), _manifest(tmp_path).is_complete) == (2, True)
    with pytest.raises(mt.LifecycleError, match="closed"):
        monitor.trace(tmp_path / "other")


def test_a_folder_that_holds_a_trace_is_refused(monitor: mt.Monitor, model: TinyMoe, tmp_path: Path) -> None:
    with monitor.trace(tmp_path):
        model(_hidden())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(mt.TraceError, match="holds a trace already: name another folder, or remove this one"):
        monitor.trace(tmp_path)
    (tmp_path / "manifest-00000.json").rename(tmp_path / "manifest-00001.json")
    with pytest.raises(mt.TraceError, match="holds a trace already"):
        monitor.trace(tmp_path)
    (tmp_path / "routes-00000-000000.parquet").unlink()
    with (
        mt.watch(other := TinyMoe(), routers=other.routers) as another,
        pytest.raises(mt.TraceError, match="another run"),
    ):
        another.trace(tmp_path)
    assert {path.read_bytes() for path in tmp_path.iterdir()} <= set(before.values())
    assert [tap.capture for tap in monitor._taps.values()] == [None, None]


def test_a_path_that_is_no_folder_is_refused(monitor: mt.Monitor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(mt.TraceError, match="file.* cannot be written to: .*; name another folder"):
            monitor.trace(path)


def test_a_path_is_the_same_wherever_the_process_goes(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for path, expected in (("there", tmp_path / "there"), ("~/trace", tmp_path / "home" / "trace")):
        with monitor.trace(path) as trace:
            assert trace.path == expected
        assert (expected / "manifest-00000.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "trace: max_steps=0: expected a whole number, 1 or more, or None"),
        ({"max_steps": True}, "trace: max_steps=True: expected"),
        ({"max_tokens_per_step": 1.5}, "trace: max_tokens_per_step=1.5: expected"),
        ({"every_n_steps": None}, "trace: every_n_steps=None: expected a whole number, 1 or more$"),
        ({"scores": 1}, "trace: scores=1: expected True or False"),
        ({"diagnostics": "yes"}, "trace: diagnostics='yes': expected True or False"),
        ({"path": ""}, r"trace\(''\): expected the path of a folder"),
        ({"path": 7}, r"trace\(7\): expected the path of a folder"),
        ({"path": "s3://bucket/trace"}, "a trace is written to a local folder"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    monitor: mt.Monitor, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(mt.ConfigError, match=message):
        monitor.trace(**{"path": tmp_path / "trace", **options})
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_the_error_says_what_to_install(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("writer", "parts", "format"):
        monkeypatch.delitem(sys.modules, f"moe_telemetry.trace.{name}", raising=False)
    with pytest.raises(mt.TraceError, match=r"needs the package 'pyarrow': pip install 'moe-telemetry\[trace\]'"):
        monitor.trace(tmp_path)


def test_a_first_step_that_is_paused_is_no_reason_to_doubt_a_router(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), monitor.trace(tmp_path):
        with monitor.pause():
            model(_hidden())
        monitor.step(1)
    assert f"trace {tmp_path}: no call" not in caplog.text
    assert _manifest(tmp_path).silent_routers == ()


def test_routers_that_never_call_are_named_in_the_log_and_the_manifest(
    model: TinyMoe, monitor: mt.Monitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), monitor.trace(tmp_path):
        for step in (1, 2):
            model.layers[0](_hidden())
            monitor.step(step)
    assert caplog.text.count("no call came from 1 of 2 routers in the first step: decoder.1") == 1
    assert _manifest(tmp_path).silent_routers == (mt.RouterKey("decoder", 1),)
