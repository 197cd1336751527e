"""watch() and Monitor on a small model: what is counted, what is not, and what is left behind."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn

import moe_telemetry as mt
from moe_telemetry import monitor as monitor_module
from moe_telemetry.testing import RecordingExporter, TinyMoe

FIRST = mt.RouterKey("decoder", 0)


@pytest.fixture
def model() -> TinyMoe:
    return TinyMoe()


def _hidden(batch_size: int = 2, sequence_length: int = 3) -> torch.Tensor:
    return torch.randn(batch_size, sequence_length, 16, generator=torch.Generator().manual_seed(1))


def _watch(model: TinyMoe, **settings: object) -> mt.Monitor:
    return mt.watch(model, routers=model.routers, **{"every_n_steps": 1, **settings})


def _tokens(snapshot: mt.Snapshot | None, stage: str = "train") -> int:
    assert snapshot is not None
    total = snapshot.layers[FIRST].total
    return total[stage].tokens if stage in total else 0


def _recount(model: TinyMoe, hidden: torch.Tensor) -> list[int]:
    chosen: list[torch.Tensor] = []
    handle = model.layers[0].gate.register_forward_hook(lambda _module, _args, output: chosen.append(output[2]))
    model(hidden)
    handle.remove()
    return torch.bincount(torch.cat(chosen).flatten(), minlength=8).tolist()


def test_assignments_equal_a_recount_of_the_routers_own_output(model: TinyMoe) -> None:
    expected = _recount(model, _hidden(4, 50))
    with _watch(model) as monitor:
        model(_hidden(4, 50))
        snapshot = monitor.step(1)
    assert snapshot is not None
    counts = snapshot.layers[FIRST].total["train"]
    assert list(counts.assignments) == expected
    assert (counts.tokens, counts.padding_tokens, counts.dropped, counts.invalid) == (200, 0, 0, 0)


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_forward_is_counted_once_under_every_kind_of_checkpointing(
    use_reentrant: bool | None,
    is_training: bool,
) -> None:
    model = TinyMoe(use_reentrant=use_reentrant).train(is_training)
    with _watch(model) as monitor:
        hidden = _hidden().requires_grad_()
        with torch.set_grad_enabled(is_training):
            output = model(hidden)
        if is_training:
            output.sum().backward()
        snapshot = monitor.step(1)
    assert snapshot is not None
    assert sum(snapshot.layers[FIRST].total["train" if is_training else "eval"].assignments) == 12


def test_nested_checkpoints_are_counted_once() -> None:
    from torch.utils.checkpoint import checkpoint

    model = TinyMoe(use_reentrant=False)
    with _watch(model) as monitor:
        checkpoint(model, _hidden().requires_grad_(), use_reentrant=False).sum().backward()
        assert _tokens(monitor.step(1)) == 6


def test_selective_checkpointing_that_saves_scatters_still_works_and_counts_once() -> None:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def save_all(*_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    model = TinyMoe()
    with _watch(model) as monitor:
        context = partial(create_selective_checkpoint_contexts, save_all)
        checkpoint(model, _hidden().requires_grad_(), use_reentrant=False, context_fn=context).sum().backward()
        assert _tokens(monitor.step(1)) == 6


def test_every_microbatch_of_an_accumulated_step_counts(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        for batch_size in (1, 2, 3):
            model(_hidden(batch_size)).sum().backward()
        assert _tokens(monitor.step(1)) == 18


def test_training_and_evaluation_never_mix(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        model(_hidden(2))
        model.eval()
        model(_hidden(1))
        snapshot = monitor.step(1)
        assert (_tokens(snapshot), _tokens(snapshot, "eval")) == (6, 3)


def test_a_stage_of_the_users_takes_everything_inside_it(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with monitor.stage("rollout"):
            model(_hidden(2))
            model.eval()
            model(_hidden(1))
            with monitor.pause():
                model(_hidden(4))
        model(_hidden(1))
        snapshot = monitor.step(1)
        assert [_tokens(snapshot, stage) for stage in ("rollout", "eval", "train")] == [9, 3, 0]


def test_an_eighth_stage_is_refused(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        for name in "abcde":
            monitor.stage(name)
        with pytest.raises(mt.ConfigError, match="stage 'f' is one too many; a monitor keeps 7"):
            monitor.stage("f")


def test_nothing_is_counted_while_paused(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with monitor.pause():
            model(_hidden())
            model(_hidden())
        model(_hidden(1))
        assert _tokens(monitor.step(1)) == 3


def test_the_attention_mask_of_the_model_is_found_by_keyword_and_by_position(model: TinyMoe) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with _watch(model) as monitor:
        model(_hidden(), attention_mask=mask)
        model(_hidden(), mask)
        model(_hidden())
        snapshot = monitor.step(1)
    assert snapshot is not None
    counts = snapshot.layers[FIRST].total["train"]
    assert (counts.tokens, counts.padding_tokens, sum(counts.assignments)) == (12, 6, 24)


def test_a_stated_mask_holds_inside_its_context_alone(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with monitor.valid_tokens(torch.tensor([True, False, False, False, False, False])):
            model(_hidden(), torch.ones(2, 3))
        model(_hidden())
        assert _tokens(monitor.step(1)) == 7


@pytest.mark.parametrize("shape", [(7,), (3, 3)])
def test_a_stated_mask_of_the_wrong_shape_names_both_shapes(model: TinyMoe, shape: tuple[int, ...]) -> None:
    with _watch(model) as monitor, monitor.valid_tokens(torch.ones(shape)):
        with pytest.raises(mt.MaskError, match=r"mask of shape .* does not fit a router call of 6 tokens"):
            model(_hidden())


def test_a_mask_with_three_dimensions_is_refused_before_the_forward(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with pytest.raises(mt.MaskError, match=r"\(1, 2, 3\)"), monitor.valid_tokens(torch.ones(1, 2, 3)):
            pass


def test_a_mask_does_not_outlive_a_forward_that_fails(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 5), torch.tensor([[1, 0, 0], [1, 0, 0]]))
        model.layers[0](_hidden())
        assert _tokens(monitor.step(1)) == 6


def _run(model: TinyMoe) -> list[torch.Tensor]:
    torch.manual_seed(3)
    hidden = torch.nn.functional.dropout(_hidden(4, 9)).requires_grad_()
    output = model(hidden, torch.ones(4, 9))
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    return [output.detach(), *gradients, torch.get_rng_state(), torch.rand(3)]


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_watching_changes_no_bit_of_outputs_gradients_state_or_random_numbers(
    use_reentrant: bool | None,
) -> None:
    plain = TinyMoe(use_reentrant=use_reentrant)
    watched = TinyMoe(use_reentrant=use_reentrant)
    expected = _run(plain)
    with _watch(watched) as monitor:
        actual = _run(watched)
        monitor.step(1)
        assert list(watched.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in watched.named_buffers()] == []
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_close_leaves_the_model_as_it_was_and_may_come_twice(model: TinyMoe) -> None:
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    monitor = _watch(model)
    monitor.close()
    monitor.close()
    for name, module in model.named_modules():
        assert set(module.__dict__) == set(before[name])
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_closed_monitor_says_so(model: TinyMoe) -> None:
    monitor = _watch(model)
    monitor.close()
    for use in (monitor.step, monitor.snapshot, monitor.pause, lambda: monitor.stage("x")):
        with pytest.raises(mt.LifecycleError, match="this monitor is closed"):
            use()


def test_watching_a_model_twice_is_refused_and_the_first_monitor_goes_on(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        with pytest.raises(mt.LifecycleError, match="layers.0.gate' is watched already"):
            _watch(model)
        model(_hidden())
        assert _tokens(monitor.step(1)) == 6


def test_a_copy_of_a_watched_model_counts_nothing_and_can_be_watched_itself(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        reference = copy.deepcopy(model)
        reference(_hidden())
        with _watch(reference) as other:
            reference(_hidden(1))
            assert _tokens(other.step(1)) == 3
        assert _tokens(monitor.step(1)) == 0


def test_a_watched_model_can_be_pickled_and_comes_back_unwatched(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        twin = pickle.loads(pickle.dumps(model))
        twin(_hidden())
        torch.save(model, io.BytesIO())
        assert _tokens(monitor.step(1)) == 0


def test_a_model_that_is_dropped_with_its_monitor_is_freed() -> None:
    model = TinyMoe()
    monitor = _watch(model)
    alive = weakref.ref(model)
    del model, monitor
    gc.collect()
    assert alive() is None


def test_a_rebuilt_module_is_found_again_and_leaves_no_orphan(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        model(_hidden())
        monitor.step(1)
        model.layers = TinyMoe(seed=5).layers
        monitor.step(2)
        model(_hidden())
        snapshot = monitor.step(3)
        assert snapshot is not None
        assert list(snapshot.layers) == [mt.RouterKey("decoder", 0), mt.RouterKey("decoder", 1)]
        assert _tokens(snapshot) == 12


def test_a_router_that_never_fires_is_named_after_the_first_step(
    model: TinyMoe, caplog: pytest.LogCaptureFixture
) -> None:
    with _watch(model) as monitor:
        model.layers[0](_hidden())
        monitor.step(1)
        monitor.step(2)
    warnings = [record.getMessage() for record in caplog.records if "silent" in record.getMessage()]
    assert len(warnings) == 1
    assert "1 of 2 routers were observed in the first step; silent: layers.1.gate" in warnings[0]


@pytest.mark.parametrize(
    ("every_n_steps", "steps", "expected"),
    [
        (2, [None, None, None, None], [2, 4]),
        (2, [0, 1, 2, 3], [0, 2]),
        (10, [1003, 1009, 1010, 1025], [1010, 1025]),
        (1, [5, 6], [5, 6]),
    ],
)
def test_a_reduction_comes_whenever_the_step_passes_a_multiple(
    model: TinyMoe, every_n_steps: int, steps: list[int | None], expected: list[int]
) -> None:
    with _watch(model, every_n_steps=every_n_steps) as monitor:
        snapshots = [monitor.step(step) for step in steps]
    assert [snapshot.step for snapshot in snapshots if snapshot is not None] == expected


def test_a_step_that_goes_back_is_reported_and_counting_goes_on(
    model: TinyMoe, caplog: pytest.LogCaptureFixture
) -> None:
    with _watch(model) as monitor:
        model(_hidden())
        monitor.step(7)
        model(_hidden())
        snapshot = monitor.step(3)
        assert snapshot is not None
        assert (snapshot.step, _tokens(snapshot)) == (3, 12)
    assert "step() went from 7 back to 3" in caplog.text


def test_windows_hold_what_came_since_the_snapshot_before(model: TinyMoe) -> None:
    with _watch(model) as monitor:
        model(_hidden(1))
        monitor.step(1)
        model(_hidden(2))
        second = monitor.snapshot()
        third = monitor.snapshot()
    assert second.layers[FIRST].window["train"].tokens == 6
    assert second.layers[FIRST].total["train"].tokens == 9
    assert third.layers[FIRST].window == {}


def test_router_calls_can_be_fed_by_hand(model: TinyMoe) -> None:
    with mt.watch(model, routers={"decoder.5": mt.RouterSpec(num_experts=4)}) as monitor:
        monitor.observe(5, [[0, 1], [1, 3]])
        monitor.observe("decoder.5", torch.tensor([[2, -1]], dtype=torch.int16), training=False)
        snapshot = monitor.snapshot()
    layer = snapshot.layers[mt.RouterKey("decoder", 5)]
    assert layer.total["train"].assignments == (1, 2, 0, 1)
    assert (layer.total["eval"].assignments, layer.total["eval"].invalid) == ((0, 0, 1, 0), 1)


@pytest.mark.parametrize("ids", [[0, 1], [[0.5, 1.0]], [[True, False]]])
def test_ids_that_are_no_rows_of_integers_are_refused(model: TinyMoe, ids: list[object]) -> None:
    with _watch(model) as monitor, pytest.raises(mt.ConfigError, match=r"expected integers \[T, K\]"):
        monitor.observe(0, ids)


def test_an_unknown_layer_is_refused_with_those_that_exist(model: TinyMoe) -> None:
    with _watch(model) as monitor, pytest.raises(mt.ConfigError, match=r"no router decoder.9 .* decoder.0, decoder.1"):
        monitor.observe(9, [[0]])


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(mt.NoRouterFoundError, match="no router found in Sequential; no module looks like a router"):
        mt.watch(nn.Sequential(nn.Linear(4, 4)))


def test_what_looks_like_a_router_is_named_with_the_way_to_point_at_it(model: TinyMoe) -> None:
    with pytest.raises(mt.NoRouterFoundError, match=r"TinyRouter at 'layers.\*.gate'.*routers={'layers.\*.gate'"):
        mt.watch(model)


def test_a_pattern_that_matches_nothing_is_refused(model: TinyMoe) -> None:
    with pytest.raises(mt.ConfigError, match="'layers.*.router' matches no module"):
        mt.watch(model, routers={"layers.*.router": 8})


def test_two_routers_with_one_key_are_refused_with_both_names() -> None:
    pair = nn.ModuleDict({"a": TinyMoe(num_layers=1), "b": TinyMoe(num_layers=1)})
    with pytest.raises(mt.RouterKeyError, match=r"'a.layers.0.gate' and 'b.layers.0.gate' both are decoder.0"):
        mt.watch(pair, routers={"*.gate": 8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: expected a whole number, 1 or more"),
        ({"labels": {"layer": "x"}}, "'layer' is a label of moe-telemetry itself"),
        ({"evry_n_steps": 5}, "unknown setting evry_n_steps; known settings: every_n_steps"),
        ({"rank_timeout_seconds": -1}, "rank_timeout_seconds=-1: expected seconds above 0"),
    ],
)
def test_a_wrong_setting_is_refused_and_leaves_no_hook(
    model: TinyMoe, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(mt.ConfigError, match=message):
        _watch(model, **settings)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_routing_map_needs_to_know_k() -> None:
    class Mapped(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden > 0

    model = nn.ModuleDict({"gate": Mapped()})
    hidden = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, -1.0, -1.0]])
    with mt.watch(model, routers={"gate": 4}), pytest.raises(mt.ConfigError, match="does not tell K"):
        model["gate"](hidden)
    with mt.watch(model, routers={"gate": mt.RouterSpec(num_experts=4, top_k=2)}) as monitor:
        model["gate"](hidden)
        counts = monitor.snapshot().layers[FIRST].total["train"]
    assert (counts.tokens, counts.assignments) == (2, (2, 1, 0, 0))


def test_an_output_that_names_no_experts_is_refused_with_what_was_found(model: TinyMoe) -> None:
    with mt.watch(model, routers={"layers.[01]": 8}):
        with pytest.raises(mt.ConfigError, match=r"found \(2, 3, 16\) torch.float32"):
            model(_hidden())


def test_telemetry_logs_under_its_own_name_only(model: TinyMoe, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), _watch(model) as monitor:
        model.layers[0](_hidden())
        monitor.step(1)
    assert {record.name for record in caplog.records} == {"moe_telemetry"}


def test_a_reduction_that_fails_is_counted_and_the_next_one_works(
    model: TinyMoe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _watch(model) as monitor:
        model(_hidden())
        with monkeypatch.context() as patch:
            patch.setattr(monitor._reporting.reducer, "reduce", lambda *_args, **_options: 1 / 0)
            assert monitor.step(1) is None
        model(_hidden())
        snapshot = monitor.step(2)
        assert snapshot is not None
        assert _tokens(snapshot) == 12
        assert snapshot.health.skipped_reductions == 1
    assert "a reduction failed, training goes on: ZeroDivisionError" in caplog.text


def test_chunks_of_a_virtual_pipeline_are_told_apart_by_their_numbers() -> None:
    chunks = [TinyMoe(num_layers=1), TinyMoe(num_layers=1)]
    with pytest.raises(mt.RouterKeyError, match=r"'0.layers.0.gate' and '1.layers.0.gate' both are decoder.0"):
        mt.watch(chunks, routers={"layers.*.gate": 8})
    routers = {
        f"{chunk}.layers.0.gate": mt.RouterSpec(num_experts=8, key=mt.RouterKey("decoder", chunk)) for chunk in (0, 1)
    }
    with mt.watch(chunks, routers=routers) as monitor:
        chunks[1](_hidden())
        assert [len(layer.total) for layer in monitor.snapshot().layers.values()] == [0, 1]


@pytest.mark.parametrize("step", ["10", 10.0])
def test_a_step_that_is_no_whole_number_is_refused(model: TinyMoe, step: object) -> None:
    with _watch(model) as monitor, pytest.raises(mt.ConfigError, match="expected a whole number"):
        monitor.step(step)


@pytest.mark.parametrize("step", [torch.tensor(10), 2**40])
def test_steps_of_other_integer_types_and_of_any_size_are_plain_numbers_in_the_snapshot(
    model: TinyMoe, step: int
) -> None:
    with _watch(model) as monitor:
        snapshot = monitor.step(step)
    assert snapshot is not None
    assert type(snapshot.step) is int
    assert snapshot.step == int(step)


def test_ids_with_another_number_of_choices_are_refused(model: TinyMoe) -> None:
    with _watch(model) as monitor, pytest.raises(mt.ConfigError, match="has 2 choices a token, these ids 4"):
        monitor.observe(0, [[0, 1, 2, 3]])


def test_a_mask_that_does_not_tell_padding_is_reported_once(model: TinyMoe, caplog: pytest.LogCaptureFixture) -> None:
    with _watch(model) as monitor:
        for _ in range(2):
            model(_hidden(), torch.ones(2, 1, 3, 3))
        assert _tokens(monitor.step(1)) == 12
    assert caplog.text.count("an attention mask that is already expanded") == 1


def test_two_exporters_of_one_kind_are_counted_apart(model: TinyMoe) -> None:
    class Failing:
        def export(self, _snapshot: mt.Snapshot, /) -> None:
            raise SystemExit(3)

        def close(self) -> None:
            pass

    class Working(Failing):
        def export(self, _snapshot: mt.Snapshot, /) -> None:
            pass

    Working.__name__ = "Failing"
    monitor = mt.watch(model, Failing(), Working(), routers=model.routers, every_n_steps=1)
    monitor.step(1)
    monitor.close()
    assert monitor._reporting.delivery.errors == {"Failing": 2, "Failing-2": 0}


def test_an_exporter_of_two_monitors_is_refused_until_the_first_is_closed(model: TinyMoe) -> None:
    exporter, other = RecordingExporter(), TinyMoe()
    with mt.watch(model, exporter, routers=model.routers):
        for exporters in ([exporter], [RecordingExporter(), *[RecordingExporter()] * 2]):
            with pytest.raises(mt.LifecycleError, match="this RecordingExporter is in use already"):
                mt.watch(other, *exporters, routers=other.routers)
    with mt.watch(other, exporter, routers=other.routers):
        pass
    assert (exporter.num_starts, exporter.num_closes) == (2, 2)


def test_a_monitor_that_exports_and_that_nobody_holds_is_closed_at_exit(model: TinyMoe) -> None:
    exporter = RecordingExporter()
    _ = mt.watch(model, exporter, routers=model.routers, every_n_steps=5)
    del _
    gc.collect()
    monitor_module._close_open_monitors()
    assert [snapshot.health.run_finished for snapshot in exporter.snapshots] == [True]
    with _watch(model):
        pass


def test_a_misspelt_variable_is_reported_when_a_model_is_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_EVERY_N_STEP", "5")
    model = TinyMoe()
    with mt.watch(model, routers=model.routers):
        assert "did you mean MOE_TELEMETRY_EVERY_N_STEPS?" in caplog.text


def test_choices_that_name_no_expert_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    routers = {"decoder.0": mt.RouterSpec(num_experts=4), "decoder.1": mt.RouterSpec(num_experts=4)}
    with mt.watch(torch.nn.Linear(1, 1), routers=routers, every_n_steps=1) as monitor:
        for _ in range(2):
            monitor.observe("decoder.1", [[0, 4], [5, 6]])
            monitor.step()
    (message,) = [message for message in caplog.messages if "is num_experts right?" in message]
    assert "3 choices of router decoder.1 name none of its 4 experts" in message
    assert "(1 of 2 routers have such choices)" in message


def test_a_last_reduction_that_fails_exports_no_window_twice(caplog: pytest.LogCaptureFixture) -> None:
    exporter = RecordingExporter()
    routers = {"decoder.0": mt.RouterSpec(num_experts=4)}
    with mt.watch(torch.nn.Linear(1, 1), exporter, routers=routers, every_n_steps=2) as monitor:
        for _ in range(3):
            monitor.observe("decoder.0", [[0, 1]])
            monitor.step()
        monitor._reporting.reducer._ranks.meet = lambda *_: [1]  # type: ignore[method-assign]
    before, last = exporter.snapshots
    key = mt.RouterKey("decoder", 0)
    assert (before.layers[key].window["train"].tokens, before.health.run_finished) == (2, False)
    assert (last.layers[key].window, last.layers[key].total["train"].tokens) == ({}, 2)
    assert last.health.run_finished
    assert "what was counted since the last export is in none" in caplog.text
