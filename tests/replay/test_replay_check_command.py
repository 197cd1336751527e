"""`moe-telemetry replay check`: exit codes, the table, the verdict and JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from moe_telemetry.cli.replay import check as replay_check
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes

KEYS = tuple(RouterKey("decoder", layer) for layer in range(1, 4))


def _check(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    replay_check.add_parser(parser.add_subparsers())
    namespace = parser.parse_args(["check", *map(str, arguments)])
    exit_code: int = namespace.run(namespace)
    return exit_code


def _save(ids: torch.Tensor, path: Path, *, num_experts: int | None = 64, keys: tuple[RouterKey, ...] = KEYS) -> Path:
    Routes(ids, (len(ids) // 2, len(ids) // 2), keys, num_experts).save(path)
    return path


@pytest.fixture
def own_ids() -> torch.Tensor:
    return torch.rand(400, 3, 64, generator=torch.Generator().manual_seed(0)).topk(4).indices


@pytest.fixture
def trainer(own_ids: torch.Tensor, tmp_path: Path) -> Path:
    return _save(own_ids, tmp_path / "trainer.safetensors")


def test_aligned_routes_exit_with_0(
    own_ids: torch.Tensor, trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed = own_ids.clone()
    replayed[[199, 399]] = -1
    assert _check(_save(replayed, tmp_path / "rollout.safetensors"), trainer) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "router",
        "replayed",
        "checked",
        "agreement",
        "zero",
        "overlap",
        "coverage",
        "equal",
        "run",
    ]
    assert lines[1].split() == ["decoder.1", "400", "398", "1.0000", "0.0000", "0.9950", "1"]
    assert lines[4] == "aligned"
    assert lines[5] == "routes belong to their tokens: agreement 1.00, 0.06 by chance"


def test_shifted_routes_exit_with_1_and_say_how(
    own_ids: torch.Tensor, trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = _save(own_ids.unflatten(0, (2, -1)).roll(1, 1).flatten(0, 1), tmp_path / "rollout.safetensors")
    assert _check(rollout, trainer) == 1
    output = capsys.readouterr().out
    assert "! decoder.1" in output
    assert "NOT ALIGNED: token_shift" in output
    assert "1.00 when moved by -1" in output
    assert _check(rollout, trainer, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["aligned"] is False
    assert found["misaligned_layers"] == ["decoder.1", "decoder.2", "decoder.3"]
    assert (found["misalignment"]["cause"], found["misalignment"]["offset"]) == ("token_shift", 1)
    assert found["layers"]["decoder.2"]["checked"] == 400


def test_one_bad_layer_is_found_among_good_ones_and_can_be_left_out(
    own_ids: torch.Tensor, trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed = own_ids.clone()
    replayed[:, 1] = replayed[:, 1].roll(-2, 0)
    rollout = _save(replayed, tmp_path / "rollout.safetensors")
    assert _check(rollout, trainer) == 1
    assert "decoder.2" in capsys.readouterr().out.split("!")[1]
    assert _check(rollout, trainer, "--skip", "decoder.2") == 0


def test_nothing_to_check_is_not_aligned(own_ids: torch.Tensor, trainer: Path, tmp_path: Path) -> None:
    assert _check(_save(torch.zeros_like(own_ids), tmp_path / "zeros.safetensors"), trainer) == 1


def test_an_unknown_number_of_experts_is_said(
    own_ids: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = _save(own_ids, tmp_path / "bare.safetensors", num_experts=None)
    assert _check(bare, bare) == 0
    assert "taken as 64" in capsys.readouterr().out
    assert _check(bare, bare, "--num-experts", 64) == 0
    assert "taken as" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "problem", ["missing", "garbage", "other routers", "other length", "other experts", "bad name"]
)
def test_what_cannot_be_compared_exits_with_2_and_one_line(
    problem: str, own_ids: torch.Tensor, trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, options = tmp_path / "rollout.safetensors", []
    if problem == "garbage":
        rollout.write_bytes(b"no routes")
    elif problem == "other routers":
        _save(own_ids, rollout, keys=tuple(RouterKey("mtp0", layer) for layer in range(3)))
    elif problem == "other length":
        _save(own_ids[:300], rollout)
    elif problem == "other experts":
        _save(own_ids, rollout, num_experts=128)
    elif problem == "bad name":
        _save(own_ids, rollout)
        options = ["--skip", "three"]
    assert _check(rollout, trainer, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("moe-telemetry: ")
    assert len(captured.err.splitlines()) == 1
