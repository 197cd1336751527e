"""The command line: help, options, exit codes, errors in one line, JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from moe_telemetry import METRICS, ConfigError, __version__
from moe_telemetry.cli import build_parser, doctor, main, metrics

OPTIONS = {
    "": {"--help", "--version"},
    "dashboards": {"--alerts", "--datasource", "--help", "--out", "--runbook-url"},
    "demo": {"--every", "--help", "--json", "--logdir", "--port", "--ranks", "--scenario", "--serve", "--steps"},
    "doctor": {"--help", "--json"},
    "metrics": {"--help", "--json"},
    "replay": {"--help"},
    "replay check": {"--help", "--json", "--num-experts", "--skip"},
    "rules": {"--help", "--out", "--runbook-url"},
    "trace": {"--help"},
    "trace concentration": {
        "--csv",
        "--decode",
        "--engine",
        "--help",
        "--html",
        "--json",
        "--num-experts",
        "--png",
        "--stage",
        "--steps",
        "--top",
        "--workers",
    },
    "trace export": {"--help", "--jsonl"},
    "trace info": {"--help", "--json"},
    "trace predictability": {
        "--csv",
        "--decode",
        "--engine",
        "--help",
        "--html",
        "--json",
        "--png",
        "--stage",
        "--steps",
        "--top",
        "--workers",
    },
    "watch": {"--every", "--help", "--insecure", "--json", "--layer", "--once", "--stage"},
    "wandb-workspace": {"--dry-run", "--entity", "--help", "--name", "--project"},
}


def _parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command by its name, the whole command line as ''."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from _parsers(command, f"{name} {word}".strip())


COMMANDS = dict(_parsers(build_parser()))


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_telemetry.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_commands_and_their_options_are_these() -> None:
    found = {
        name: {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
        for name, parser in COMMANDS.items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_ends_in_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())  # the lines are as long as the terminal is wide
    assert words.endswith(" ".join((COMMANDS[name].epilog or "no example").split()))
    assert f"moe-telemetry {name}".strip() in (COMMANDS[name].epilog or "")


@pytest.mark.parametrize("name", sorted(name for name in COMMANDS if name))
def test_the_example_of_the_help_can_be_parsed(name: str) -> None:
    example = (COMMANDS[name].epilog or "").removeprefix("Example: moe-telemetry ")
    assert callable(build_parser().parse_args(example.split()).run)


def test_help_of_every_command_loads_no_torch() -> None:
    program = (
        "import sys\n"
        "from moe_telemetry.cli import main\n"
        f"for name in {sorted(COMMANDS)!r}:\n"
        "    try: main([*name.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"moe-telemetry {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "moe-telemetry: the following arguments are required: COMMAND"),
        (["dmeo"], "moe-telemetry: argument COMMAND: invalid choice: 'dmeo'"),
        (["demo", "--step", "x"], "moe-telemetry demo: argument --steps: 'x': expected a whole number of at least 1"),
        (["demo", "--ranks", "0"], "moe-telemetry demo: argument --ranks: '0': expected a whole number of at least 1"),
        (["demo", "--port", "65536"], "argument --port: '65536': expected a whole number from 0 to 65535"),
        (["metrics", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_a_wrong_option_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert "--help)" in printed.err


@pytest.mark.parametrize("error", [ConfigError("port=-1: expected more"), OSError("disk full")])
def test_what_cannot_run_is_one_line_on_stderr_and_exit_code_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(metrics, "run", fail)
    assert main(["metrics"]) == 2
    assert capsys.readouterr() == ("", f"moe-telemetry: {error}\n")


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics, "run", interrupt)
    assert main(["metrics"]) == 130


def test_a_reader_that_has_enough_is_no_error() -> None:
    script = '"$0" -m moe_telemetry.cli metrics | head -n 1; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def test_metrics_lists_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert [head.split()[0] for head in heads] == list(METRICS)


def test_metrics_as_json_are_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["kind"], tuple(row["labels"])) for row in table] == [
        (metric.name, metric.kind, metric.labels) for metric in METRICS.values()
    ]


def test_doctor_as_json_names_versions_exporters_and_adapters() -> None:
    done = _run("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    findings = json.loads(done.stdout)
    assert findings["moe-telemetry"] == __version__
    assert set(findings["packages"]) >= {"torch", "transformers", "prometheus-client", "tensorboard"}
    assert set(findings["exporters"]) >= {"console", "jsonl", "prometheus", "tensorboard"}
    assert findings["adapters"]["transformers"] == "ok"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (
            ModuleNotFoundError("No module named 'wandb'", name="wandb"),
            "needs wandb: pip install 'moe-telemetry[mine]'",
        ),
        (RuntimeError("no licence"), "fails to load: RuntimeError: no licence"),
    ],
)
def test_doctor_finds_a_plug_in_that_does_not_load(
    error: Exception, state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: EntryPoint) -> None:
        raise error

    monkeypatch.setattr(EntryPoint, "load", fail)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint("mine", "mine:Mine", group)])
    assert main(["doctor"]) == 1
    assert f"  mine                {state}\n" in capsys.readouterr().out
