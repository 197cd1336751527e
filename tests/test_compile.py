"""Counting under torch.compile: exact, without graph breaks, and compiled once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:None of the inputs have requires_grad",
    # the tracer looks at every tensor's .grad, and hides the warning in a way that "error" defeats
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _hidden(num_tokens: int = 6) -> torch.Tensor:
    return torch.randn(2, num_tokens // 2, 16, requires_grad=True)


def _tokens(monitor: mt.Monitor, stage: str = "train") -> list[int]:
    return [layer.total[stage].tokens for layer in monitor.snapshot().layers.values()]


def _watch(model: TinyMoe) -> mt.Monitor:
    return mt.watch(model, routers=model.routers)


def test_a_whole_compiled_model_counts_exactly_in_one_graph() -> None:
    model = TinyMoe(num_layers=3)
    backend = CompileCounterWithBackend("aot_eager")
    with _watch(model) as monitor:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        for _ in range(3):
            compiled(_hidden(), mask).sum().backward()
        assert _tokens(monitor) == [9, 9, 9]
        assert backend.frame_count == 1
        model.eval()
        with torch.inference_mode():
            compiled(_hidden())
        assert _tokens(monitor, "eval") == [6, 6, 6]
        assert _tokens(monitor) == [9, 9, 9]


def test_blocks_compiled_one_by_one_share_their_graphs_over_layers() -> None:
    model = TinyMoe(num_layers=12)
    bare = CompileCounterWithBackend("aot_eager")
    _run_blocks(TinyMoe(num_layers=12), bare)
    watched = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    with _watch(model) as monitor:
        _run_blocks(model, watched)
        assert _tokens(monitor) == [18] * 12
    assert watched.frame_count == bare.frame_count


def _run_blocks(model: TinyMoe, backend: CompileCounterWithBackend) -> None:
    blocks = [torch.compile(layer, fullgraph=True, backend=backend) for layer in model.layers]
    for _ in range(3):
        hidden = _hidden()
        for block in blocks:
            hidden = block(hidden)
        hidden.sum().backward()


def _checkpointed_inside(use_reentrant: bool) -> Callable[[TinyMoe], Callable[[torch.Tensor], torch.Tensor]]:
    def wrap(model: TinyMoe) -> Callable[[torch.Tensor], torch.Tensor]:
        model.use_reentrant = use_reentrant
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]

    return wrap


def _checkpointed_outside(use_reentrant: bool) -> Callable[[TinyMoe], Callable[[torch.Tensor], torch.Tensor]]:
    def wrap(model: TinyMoe) -> Callable[[torch.Tensor], torch.Tensor]:
        blocks = [torch.compile(layer, backend="aot_eager") for layer in model.layers]

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            return hidden

        return forward

    return wrap


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(_checkpointed_inside(use_reentrant=False), id="checkpoint-in-compile"),
        pytest.param(_checkpointed_outside(use_reentrant=False), id="compile-in-checkpoint"),
        pytest.param(_checkpointed_outside(use_reentrant=True), id="compile-in-reentrant-checkpoint"),
    ],
)
def test_compiling_and_checkpointing_together_count_a_forward_once(
    wrap: Callable[[TinyMoe], Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    model = TinyMoe()
    with _watch(model) as monitor:
        forward = wrap(model)
        for _ in range(2):
            forward(_hidden()).sum().backward()
        assert _tokens(monitor) == [12, 12]


def test_stages_and_pauses_hold_in_compiled_code_without_compiling_again() -> None:
    model = TinyMoe()
    backend = CompileCounterWithBackend("aot_eager")
    with _watch(model) as monitor:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        compiled(_hidden())
        with monitor.stage("rollout"):
            compiled(_hidden())
            with monitor.pause():
                compiled(_hidden())
        assert _tokens(monitor) == [6, 6]
        assert _tokens(monitor, "rollout") == [6, 6]
    assert backend.frame_count == 1


def test_a_model_watched_after_its_first_compiled_call_is_compiled_again_and_counts() -> None:
    model = TinyMoe()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(_hidden())
    model.layers[0].compile(backend="aot_eager")
    with _watch(model) as monitor:
        compiled(_hidden())
        assert _tokens(monitor) == [6, 6]


def test_a_function_compiled_before_the_watch_is_reported_as_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = TinyMoe()

    @torch.compile(backend="aot_eager")
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return model(hidden)  # type: ignore[no-any-return]

    forward(_hidden())
    with _watch(model) as monitor:
        forward(_hidden())
        monitor.step(1)
    assert "0 of 2 routers were observed in the first step" in caplog.text


def test_a_closed_monitor_leaves_compiled_code_that_works() -> None:
    model = TinyMoe()
    with _watch(model) as monitor:
        compiled = torch.compile(model, backend="aot_eager")
        compiled(_hidden())
        cells = [tap.cells for tap in monitor._taps.values()]
    before = [tensor.clone() for tensor in cells]
    compiled(_hidden())
    assert all(torch.equal(one, other) for one, other in zip(cells, before, strict=True))


@pytest.mark.parametrize(
    ("family", "implementation", "backend"),
    [
        ("qwen3_moe", "grouped_mm", "inductor"),
        ("qwen3_moe", "batched_mm", "aot_eager"),
        ("mixtral", "grouped_mm", "aot_eager"),
        ("deepseek_v3", "batched_mm", "aot_eager"),
        ("gpt_oss", "grouped_mm", "aot_eager"),
    ],
)
def test_compiled_transformers_models_count_exactly_without_a_graph_break(
    family: str, implementation: str, backend: str
) -> None:
    model = _transformers_model(family).train()
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    ids = torch.randint(0, 64, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with mt.watch(model) as monitor:
        expected = _recount(model, ids, mask)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for _ in range(2):
            compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
        layers = monitor.snapshot().layers
    for key, counts in expected.items():
        total = layers[key].total["train"]
        assert total.tokens == 3 * 13
        assert list(total.assignments) == [3 * count for count in counts]


def _recount(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> dict[mt.RouterKey, list[int]]:
    """Return the assignments of real tokens in one eager forward, seen at the experts' own input."""
    counts: dict[mt.RouterKey, list[int]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            key = mt.RouterKey("decoder", int(name.split(".")[2]))

            def see(_module: nn.Module, args: tuple[torch.Tensor, ...], key: mt.RouterKey = key) -> None:
                counts[key] = torch.bincount(args[1][mask.flatten() > 0].flatten(), minlength=8).tolist()

            handles.append(module.register_forward_pre_hook(see))
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    return counts


def _transformers_model(family: str) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    own = {
        "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [0], "head_dim": 16},
        "mixtral": {"num_local_experts": 8},
        "deepseek_v3": {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
    }
    config = transformers.AutoConfig.for_model(family, **sizes, **own[family])
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model
