"""JsonlExporter: every snapshot as one line of JSON, appended to a file.

with open("moe-telemetry.jsonl", "rb") as lines:
    snapshots = [Snapshot.from_json(line) for line in lines]
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moe_telemetry.snapshot import Snapshot

__all__ = ["JsonlExporter"]


@dataclass(eq=False)
class JsonlExporter:
    """Appends snapshots to a file; each line is whole in the file when `export` returns.

    A line holds the counts of every expert, about 10 bytes each: at 61 layers of 256 experts a few
    hundred kilobytes.
    """

    path: str | os.PathLike[str] = "moe-telemetry.jsonl"
    """The file; its folder is made where it is missing."""

    _file: BinaryIO | None = field(init=False, default=None, repr=False)

    def start(self) -> None:
        """Open the file, and end a line that a killed run left half."""
        self._opened()

    def export(self, snapshot: Snapshot) -> None:
        """Append one line."""
        file = self._opened()
        file.write(snapshot.to_json().encode() + b"\n")
        file.flush()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            path = Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            half_line = _ends_within_line(path)
            self._file = path.open("ab")
            if half_line:
                self._file.write(b"\n")
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_within_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
