"""Capture from compiled code: the same routes, compiled again once at most, and never silently empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace.manifest import Manifest

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:None of the inputs have requires_grad",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Forward = Callable[[torch.Tensor], torch.Tensor]


def _whole(model: TinyMoe, backend: CompileCounterWithBackend) -> Forward:
    return torch.compile(model, fullgraph=True, backend=backend)  # type: ignore[return-value]


def _by_blocks(model: TinyMoe, backend: CompileCounterWithBackend) -> Forward:
    blocks = [torch.compile(layer, fullgraph=True, backend=backend) for layer in model.layers]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            hidden = block(hidden)
        return hidden

    return forward


def _checkpointed_blocks(model: TinyMoe, backend: CompileCounterWithBackend) -> Forward:
    blocks = [torch.compile(layer, fullgraph=True, backend=backend) for layer in model.layers]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden

    return forward


def _hidden(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _rows(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "microbatch", "layer", "expert_ids")
    found = [pq.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))]
    return [tuple(row[name] for name in names) for rows in found for row in rows]


@pytest.mark.parametrize(("compile_model", "num_layers"), [(_whole, 3), (_by_blocks, 12), (_checkpointed_blocks, 12)])
def test_a_trace_that_starts_after_compiled_steps_compiles_once_more_and_holds_what_eager_code_does(
    tmp_path: Path, compile_model: Callable[[TinyMoe, CompileCounterWithBackend], Forward], num_layers: int
) -> None:
    eager = TinyMoe(num_layers=num_layers)
    with mt.watch(eager, routers=eager.routers) as monitor, monitor.trace(tmp_path / "eager"):
        for seed in (1, 2):
            eager(_hidden(seed))
        monitor.step(2)
    model = TinyMoe(num_layers=num_layers)
    backend = CompileCounterWithBackend("aot_eager")
    with mt.watch(model, routers=model.routers) as monitor:
        forward = compile_model(model, backend)
        forward(_hidden(0)).sum().backward()
        monitor.step(1)
        assert backend.frame_count == 1
        for name in ("first", "second"):
            with monitor.trace(tmp_path / name):
                for seed in (1, 2):
                    forward(_hidden(seed)).sum().backward()
                monitor.step(2)
            forward(_hidden(3)).sum().backward()
        assert backend.frame_count == 2
    assert _rows(tmp_path / "first") == _rows(tmp_path / "eager")
    assert _rows(tmp_path / "second") == _rows(tmp_path / "eager")


def test_a_model_compiled_by_inductor_gives_its_routes_scores_and_inputs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = TinyMoe(num_layers=1)
    with mt.watch(model, routers=model.routers) as monitor:
        compiled = torch.compile(model, fullgraph=True)
        with monitor.trace(tmp_path, scores=True, hidden_states=True, router_weights=True, diagnostics=True):
            with torch.no_grad():
                compiled(_hidden(1), torch.tensor([[1, 1, 0], [1, 1, 1]]))
        with monitor.record() as recording, torch.no_grad():
            model(_hidden(1))
    ((*_, expert_ids),) = _rows(tmp_path)
    real = torch.tensor([1, 1, 0, 1, 1, 1]) > 0
    assert torch.equal(torch.tensor(expert_ids).view(6, 2)[real], recording.routes().ids[real, 0].long())
    found = load_file(tmp_path / "tensors-00000-000000.safetensors")
    weight = found["router_weights/1/0/decoder.0"]
    assert torch.equal(weight, model.layers[0].gate.weight)
    logits = found["hidden_states/1/0/decoder.0"] @ weight.t()
    torch.testing.assert_close(found["scores/1/0/decoder.0"], logits)
    assert found["diagnostics/1/0/decoder.0"].shape == (2, 7, 8)


def test_code_compiled_before_the_watch_is_reported_and_never_silently_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyMoe()

    @torch.compile(backend="aot_eager")
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return model(hidden)  # type: ignore[no-any-return]

    forward(_hidden(1))
    with mt.watch(model, routers=model.routers) as monitor, monitor.trace(tmp_path):
        forward(_hidden(1))
        monitor.step(1)
    assert "no call came from 2 of 2 routers in the first step: decoder.0, decoder.1" in caplog.text
    manifest = Manifest.from_json((tmp_path / "manifest-00000.json").read_text())
    assert manifest.silent_routers == (mt.RouterKey("decoder", 0), mt.RouterKey("decoder", 1))
