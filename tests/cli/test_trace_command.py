"""`moe-telemetry trace ...`: tables of 80 columns, JSON, files, exit codes, errors in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_telemetry import RouterKey
from moe_telemetry.analysis import concentration, drift, predictability
from moe_telemetry.cli import main
from moe_telemetry.testing import make_trace
from moe_telemetry.trace.manifest import LeftOut
from moe_telemetry.trace.reader import open_trace

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    keys = [RouterKey("decoder", layer) for layer in (9, 10, 11)]
    return make_trace(
        tmp_path / "trace", keys=keys, num_experts=128, top_k=8, hidden_size=4, token_groups=(0, 0), num_tokens=32
    )


def _lines(printed: Printed) -> list[str]:
    lines = printed.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("note: ")) <= 80
    return lines


def test_info_says_what_a_trace_holds(trace: str, capsys: Printed) -> None:
    assert main(["trace", "info", trace]) == 0
    text = "\n".join(_lines(capsys))
    assert "run-1, model TinyMoe" in text
    assert "3: decoder.9 to decoder.11 (E=128, K=8)" in text
    assert "4: 0 to 3; stages train" in text
    assert "2 of 2, 1 with the tokens of others (not counted)" in text
    assert "12, 384 tokens x layers, 3,072 choices" in text
    assert "hidden_states, router_weights" in text


def test_info_as_json_has_the_bytes_of_the_files(trace: str, capsys: Printed) -> None:
    assert main(["trace", "info", trace, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    files = {path.name: path.stat().st_size for path in Path(trace).iterdir()}
    assert found["route_bytes"] == sum(size for name, size in files.items() if name.startswith("routes-00000"))
    assert found["tensor_bytes"] == sum(size for name, size in files.items() if name.startswith("tensors"))
    assert found["bytes_per_token_layer"] == found["route_bytes"] / 384
    assert [router["key"] for router in found["routers"]] == ["decoder.9", "decoder.10", "decoder.11"]


def test_info_finds_a_trace_that_is_not_whole(tmp_path: Path, capsys: Printed) -> None:
    make_trace(tmp_path / "killed", is_complete=False)
    make_trace(tmp_path / "behind", left_out=LeftOut(calls_behind=3))
    make_trace(tmp_path / "limited", left_out=LeftOut(tokens_over_limit=7192))
    assert [main(["trace", "info", str(tmp_path / name)]) for name in ("killed", "behind", "limited")] == [1, 1, 0]
    text = capsys.readouterr().out
    assert "note: ranks whose capture has not ended (killed, or still running): 0" in text
    assert "calls behind: 3" in text
    assert "tokens over limit: 7192" in text


def test_concentration_prints_a_line_a_router(trace: str, capsys: Printed) -> None:
    assert main(["trace", "concentration", trace, "--top", "8"]) == 0
    lines = _lines(capsys)
    (head,) = (line for line in lines if "hottest" in line and "tokens" in line)
    assert head.split() == ["layer", "tokens", "in", "use", "top", "8", "even", "x", "stay", "hottest"]
    rows = [line.split() for line in lines if line.strip().startswith("decoder")]
    assert [row[0] for row in rows] == ["decoder.9", "decoder.10", "decoder.11"]
    layer = concentration(trace, top=8).layers[0]
    assert layer.persistence is not None
    assert rows[0][1:6] == [
        "128",
        f"{layer.unique_experts}/128",
        f"{layer.coverage():.1%}",
        "6.2%",
        f"{layer.coverage_over_uniform:.1f}",
    ]
    assert rows[0][6] == f"{layer.persistence:.1%}"
    assert tuple(map(int, rows[0][7:])) == layer.hottest(3)


def test_predictability_prints_a_line_a_pair(trace: str, capsys: Printed) -> None:
    assert main(["trace", "predictability", trace]) == 0
    rows = [line.split() for line in _lines(capsys) if line.strip().startswith("decoder")]
    pair = predictability(trace).pairs[0]
    assert [row[0] for row in rows] == ["decoder.10", "decoder.11"]
    assert rows[0][1:5] == [
        f"{pair.recall:.1%}",
        "6.2%",
        f"{pair.prediction.cosine:.3f}",
        f"{pair.last_step.cosine:.3f}",
    ]


def test_a_stage_without_a_token_that_is_taken_has_no_table(tmp_path: Path, capsys: Printed) -> None:
    trace = make_trace(tmp_path, num_tokens=4, num_sequences=4, stage="decode", token_groups=(0, 1), num_layers=1)
    part = tmp_path / "routes-00001-000000.parquet"
    make_trace(tmp_path / "other", num_tokens=4, num_sequences=1, stage="prompt", token_groups=(0, 1), num_layers=1)
    part.write_bytes((tmp_path / "other" / part.name).read_bytes())
    assert main(["trace", "concentration", trace]) == 0
    assert [line.split()[1] for line in _lines(capsys) if line.startswith("stage")] == ["decode:", "prompt:"]
    assert main(["trace", "concentration", trace, "--decode"]) == 0
    assert [line.split()[1] for line in _lines(capsys) if line.startswith("stage")] == ["decode:"]


def test_large_models_and_counts_fit_into_80_columns(tmp_path: Path, capsys: Printed) -> None:
    keys = [RouterKey("decoder", 100), RouterKey("language_model.decoder", 101)]
    trace = make_trace(tmp_path, keys=keys, num_experts=512, top_k=22, num_tokens=1200, num_steps=2)
    assert main(["trace", "concentration", trace]) == 0
    assert any("language_model.decoder.101" in line for line in _lines(capsys))


@pytest.mark.parametrize("command", ["concentration", "predictability"])
def test_json_is_all_figures(command: str, trace: str, capsys: Printed) -> None:
    analyse = {"concentration": concentration, "predictability": predictability}[command]
    assert main(["trace", command, trace, "--json", "--steps", "1:3", "--stage", "train", "--top", "4"]) == 0
    expected = analyse(trace, steps=(1, 3), stage="train", top=4).as_dict()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))
    assert expected["selection"] == "--stage train --steps 1:3"


def test_drift_is_the_second_trace_against_the_first(trace: str, tmp_path: Path, capsys: Printed) -> None:
    keys = [RouterKey("decoder", layer) for layer in (9, 10)]
    later = make_trace(tmp_path / "later", keys=keys, num_experts=128, top_k=8, seed=5)
    assert main(["trace", "concentration", trace, later, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = drift(concentration(trace), concentration(later))
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert main(["trace", "concentration", trace, later]) == 0
    lines = _lines(capsys)
    assert f"{expected.layers[0].total_variation:.3f}" in next(line for line in lines if "decoder.9" in line)
    assert any("decoder.11 (train)" in line for line in lines)


def test_figures_go_to_files(trace: str, tmp_path: Path, capsys: Printed) -> None:
    out = tmp_path / "new" / "folder"
    files = ["--csv", f"{out}/a.csv", "--png", f"{out}/a.png", "--html", f"{out}/a.html"]
    assert main(["trace", "concentration", trace, "--json", *files]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["layers"]
    assert printed.err.splitlines() == [f"written: {out}/a.{kind}" for kind in ("csv", "png", "html")]
    with (out / "a.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 128
    assert (out / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "a.html").read_text().startswith("<!doctype html>")
    assert main(["trace", "predictability", trace, "--png", f"{out}/pictures"]) == 0
    names = {path.name for path in (out / "pictures").iterdir()}
    assert names == {"recall-train.png", "cosine-train.png", "spearman-train.png", "hot-overlap-train.png"}


@pytest.mark.parametrize("target", ["file", "-"])
def test_export_is_read_back_to_the_same_counts(target: str, trace: str, tmp_path: Path, capsys: Printed) -> None:
    path = tmp_path / "routes.jsonl"
    assert main(["trace", "export", trace, "--jsonl", str(path) if target == "file" else "-"]) == 0
    printed = capsys.readouterr()
    if target == "-":
        path.write_text(printed.out)
    else:
        assert printed.err == f"written: {path}, 12 lines\n"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["layer"]) for line in lines] == [(s, layer) for s in range(4) for layer in (9, 10, 11)]
    whole = open_trace(trace)
    first = next(row for chunk in whole.chunks() for row in whole.rows(chunk))
    np.testing.assert_array_equal(lines[0]["top_indices"], first.expert_ids)
    exported = concentration(path, num_experts=128)
    assert [layer.assignments for layer in exported.layers] == [
        layer.assignments for layer in concentration(trace).layers
    ]


@pytest.mark.parametrize("command", ["info", "export", "concentration", "predictability"])
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("none", "no such folder; expected the folder that monitor.trace() wrote to"),
        ("empty", "has no manifest-*.json; expected the folder that monitor.trace() wrote to"),
        ("half", "routes-00000-000001.parquet is no whole Parquet file"),
        ("two jobs", "holds traces of two jobs: manifest-00000.json has run 'run-1', manifest-00001.json has 'run-2'"),
        ("no routes", "has manifests and no routes yet"),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line_and_exit_code_2(
    command: str, problem: str, message: str, tmp_path: Path, capsys: Printed
) -> None:
    folder = tmp_path / "trace"
    if problem == "empty":
        folder.mkdir()
    elif problem != "none":
        make_trace(folder, token_groups=(0, 1), hidden_size=4, num_steps=0 if problem == "no routes" else 4)
    if problem == "half":
        part = folder / "routes-00000-000001.parquet"
        part.write_bytes(part.read_bytes()[:100])
    if problem == "two jobs":
        manifest = folder / "manifest-00001.json"
        manifest.write_text(manifest.read_text().replace("run-1", "run-2"))
    extra = ["--jsonl", "-"] if command == "export" else []
    assert main(["trace", command, str(folder), *extra]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert command == "export" or printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["concentration", "--stage", "eval"], "--stage eval leaves no token"),
        (["concentration", "--decode"], "--decode leaves no token"),
        (["predictability", "--steps", "90:"], "--steps 90: leaves no token"),
        (["concentration", "--steps", "5:5"], "steps=(5, 5): expected a first step below"),
        (["concentration", "--top", "129"], "top=129: expected 1 to 128"),
        (["predictability", "--png", "/dev/null/a.png"], "'/dev/null'"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, trace: str, capsys: Printed
) -> None:
    assert main(["trace", arguments[0], trace, *arguments[1:]]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("steps", ["5", "a:b", "1:2:3", ""])
def test_steps_of_another_form_are_refused(steps: str, capsys: Printed) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "concentration", "trace", "--steps", steps])
    assert ended.value.code == 2
    assert f"argument --steps: {steps!r}: expected A:B, as in 100:200, 100: or :200" in capsys.readouterr().err


def test_without_states_the_options_that_make_them_are_named(tmp_path: Path, capsys: Printed) -> None:
    assert main(["trace", "predictability", make_trace(tmp_path)]) == 2
    assert "monitor.trace(..., hidden_states=True, router_weights=True)" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["pyarrow", "matplotlib.figure"])
def test_a_missing_package_is_named_with_its_extra(package: str, trace: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from moe_telemetry.cli import main\n"
        f"options = ['--png', {str(tmp_path / 'a.png')!r}, '--csv', {str(tmp_path / 'a.csv')!r}]\n"
        f"sys.exit(main(['trace', 'concentration', {trace!r}, *options]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == f"moe-telemetry: moe-telemetry trace needs {package}: pip install 'moe-telemetry[trace]'\n"
    # said before anything was counted
    assert not (tmp_path / "a.csv").exists()


def test_an_analysis_loads_neither_torch_nor_what_it_does_not_draw(trace: str) -> None:
    program = (
        "import sys\n"
        "from moe_telemetry.cli import main\n"
        f"assert main(['trace', 'predictability', {trace!r}]) == 0\n"
        "sys.exit(str([name for name in ('torch', 'ray', 'matplotlib', 'polars') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == "[]\n"
