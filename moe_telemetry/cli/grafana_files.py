"""The packaged files about Prometheus and Grafana: where they are, and what is the user's own in their copies."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from moe_telemetry.errors import TelemetryError

__all__ = ["RUNBOOK", "add_out", "add_runbook_url", "packaged", "write"]

RUNBOOK = "runbook.md"


def packaged(pattern: str) -> dict[str, str]:
    """Return the text of the packaged files that match, by their path in the folder, in order."""
    folder = _folder()
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise TelemetryError(f"files are missing from this installation: no {pattern} in {folder}")
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def write(files: Mapping[str, str], out: Path) -> None:
    """Write files into a folder, over files of the same names, and print their paths.

    Raises:
        TelemetryError: a file cannot be written; those before it are.
    """
    for name, text in files.items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TelemetryError(f"cannot write {path} ({error.strerror}): name another folder with --out") from error
        print(path)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made where missing")


def add_runbook_url(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option for the runbook's address, which `what` link to."""
    parser.add_argument(
        "--runbook-url",
        type=_address,
        default=RUNBOOK,
        metavar="URL",
        help=f"address of the runbook, which {what} link to (runbook.md, a copy of which is written)",
    )


def _address(text: str) -> str:
    # it is written into YAML and JSON, and sections are added to it
    if re.fullmatch(r"[^\s\"'\\#<>{}]+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an address without spaces, quotes, braces and '#'")
    return text


def _folder() -> Path:
    """Return the folder in the wheel, else in the source tree."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_grafana", package.parent / "grafana"):
        if (folder / "rules").is_dir():
            return folder
    raise TelemetryError(f"the packaged files are missing from this installation: no folder {package / '_grafana'}")
