"""Event files of TensorBoard, written at once: what cannot be written is an error here, not in a thread.

A failed write may leave half a record, and readers stop there; so the file is then left as it is and the next
write begins another, to which readers go on.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from contextlib import suppress
from itertools import count
from typing import Any

from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["EventFiles", "folder_of_our_own"]

_logger = logging.getLogger("moe_telemetry")
_OURS = re.compile(r"\.moe\d{6}$")
_VERSION = "brain.Event:2"
_NUMBERS = count()


def folder_of_our_own(folder: str) -> str:
    """Return the folder, or one in it where another writer writes there.

    TensorBoard reads one writer a folder: what the other writes meanwhile is not shown, and our beginning
    would take away what it has written.
    """
    names = tf.io.gfile.glob(os.path.join(folder, "*tfevents*"))  # noqa: PTH118  # may be an address, as gs://...
    if all(_OURS.search(name) for name in names):
        return folder
    inside = os.path.join(folder, "moe")  # noqa: PTH118  # the same
    _logger.warning("moe_telemetry: another writer's events are in %s, so those of telemetry go to %s", folder, inside)
    return inside


class EventFiles:
    """The event files of one run in one folder, on this machine or wherever TensorBoard itself can write."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._records: Any = None

    def make_folder(self) -> None:
        """Make the folder; that it is there already is no error."""
        tf.io.gfile.makedirs(self._folder)

    def write(self, *events: Event) -> None:
        """Append events; all of them are in the file when this returns.

        Raises:
            OSError: the folder cannot be written to, is gone, or has no room. The next call tries anew.
        """
        if self._records is not None and not tf.io.gfile.exists(self._path):
            self.close()  # the folder was emptied or removed: go on in a file that can be found
        is_new = self._records is None
        try:
            if is_new:
                self._open()
            for event in (_header(), *events) if is_new else events:
                self._records.write(event.SerializeToString())
            self._records.flush()
        except BaseException:
            self.close()
            if is_new:
                with suppress(OSError):  # a full disk is tried again and again: leave no beginnings of files
                    os.remove(self._path)  # noqa: PTH107  # may be an address, as gs://...
            raise

    def _open(self) -> None:
        self.make_folder()
        # readers go through files in the order of their names: 9 has to come before 10
        number = f"{os.getpid()}.moe{next(_NUMBERS):06d}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{number}"
        self._path = os.path.join(self._folder, name)  # noqa: PTH118  # the same
        self._records = RecordWriter(tf.io.gfile.GFile(self._path, "wb"))

    def close(self) -> None:
        """Let go of the file."""
        if self._records is not None:
            with suppress(Exception):  # every write has been flushed, so a failure here is one that was raised
                self._records.close()
            self._records = None


def _header() -> Event:
    source = SourceMetadata(writer="moe-telemetry")
    return Event(wall_time=time.time(), file_version=_VERSION, source_metadata=source)
