"""JsonlExporter: every snapshot as one line of JSON, appended to a file.

with open("moe-telemetry.jsonl", "rb") as lines:
    snapshots = [Snapshot.from_json(line) for line in lines]
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.settings import check_types

__all__ = ["JsonlExporter"]


@dataclass(eq=False)
class JsonlExporter:
    """Appends snapshots to a file; each line is whole in the file when `export` returns.

    A line that finds no room on the disk is taken back and raised, and the next one is tried anew; a file that was
    removed, or moved away as log rotation does, is made again. A line holds the counts of every expert, about 10
    bytes each: at 61 layers of 256 experts a few hundred kilobytes.
    """

    path: str | os.PathLike[str] = "moe-telemetry.jsonl"
    """The file; its folder is made where it is missing."""

    _file: FileIO | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)

    def start(self) -> None:
        """Open the file, and end a line that a killed run left half."""
        self._opened()

    def export(self, snapshot: Snapshot) -> None:
        """Append one line."""
        file = self._opened()
        end = file.seek(0, os.SEEK_END) if file.seekable() else None
        try:
            _write(file, snapshot.to_json().encode() + b"\n")
        except BaseException:
            if end is not None:
                with suppress(OSError):  # where it cannot be taken back, opening the file again ends the half line
                    file.truncate(end)
            self.close()
            raise

    def _opened(self) -> FileIO:
        path = Path(self.path)
        if self._file is not None and not _is_at(self._file, path):
            self.close()
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            half_line = _ends_within_line(path)
            file = FileIO(path, "ab")  # without a buffer, which would keep what could not be written
            if half_line:
                _write(file, b"\n")
            self._file = file
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write(file: FileIO, data: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part first, and says no to the rest."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _ends_within_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
