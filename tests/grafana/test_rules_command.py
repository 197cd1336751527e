"""`moe-telemetry rules`: the packaged rules in a folder of the user's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moe_telemetry.cli import main

FOLDER = Path(__file__).resolve().parent.parent.parent / "grafana"
SOURCES = {path.name: path.read_text() for path in (*(FOLDER / "rules").glob("*.yaml"), FOLDER / "runbook.md")} | {
    "alertmanager/routing.yml": (FOLDER / "alertmanager" / "routing.yml").read_text()
}


def _written(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_the_rules_and_the_runbook_are_written_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "etc" / "rules"
    assert main(["rules", "--out", str(out)]) == 0
    assert _written(out) == SOURCES
    assert sorted(capsys.readouterr().out.splitlines()) == [str(out / name) for name in sorted(SOURCES)]


def test_an_older_copy_is_replaced_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "moe-replay.yaml").write_text("old")
    (tmp_path / "own.yaml").write_text("own")
    assert main(["rules", "--out", str(tmp_path)]) == 0
    assert _written(tmp_path) == {**SOURCES, "own.yaml": "own"}


def test_the_alerts_link_to_the_runbook_where_it_is(tmp_path: Path) -> None:
    assert main(["rules", "--out", str(tmp_path), "--runbook-url", "https://wiki.example/moe"]) == 0
    links = [line.split()[1] for text in _written(tmp_path).values() for line in text.splitlines() if "_url:" in line]
    assert "https://wiki.example/moe#moereplayzerooverlaphigh" in links
    assert [link for link in links if not link.startswith("https://wiki.example/moe#")] == []


def test_a_folder_that_cannot_be_made_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "rules"):
        assert main(["rules", "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"moe-telemetry: cannot write {out / 'moe-load.yaml'} (")
        assert line.endswith("): name another folder with --out")


@pytest.mark.stack
def test_prometheus_takes_what_was_written(tmp_path: Path) -> None:
    main(["rules", "--out", str(tmp_path), "--runbook-url", "https://wiki.example/moe"])
    config = tmp_path / "prometheus.yml"
    config.write_text("rule_files: ['moe-*.yaml']\n")
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize("address", ["", "a b", 'x"y', "https://wiki.example/moe#top", "{{ . }}"])
def test_an_address_that_would_break_the_files_is_refused(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rules", "--out", str(tmp_path), "--runbook-url", address])
    assert ended.value.code == 2
    assert "expected an address without" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
