"""TensorBoardExporter: layers and their spread as scalars, experts as a picture, one event a snapshot.

Tags are those of `moe_telemetry.charts`, fewer than 10 a layer, and `moe/expert_relative_load` for the picture. The
page of custom scalars shows the first look: load, scores, replay and telemetry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from moe_telemetry.charts import tag
from moe_telemetry.errors import ConfigError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.heatmap import heatmaps
from moe_telemetry_exporters.scalars import scalars
from moe_telemetry_exporters.settings import check_types
from moe_telemetry_exporters.tensorboard.events import EventFiles, folder_of_our_own
from moe_telemetry_exporters.tensorboard.layout import layout_summary

__all__ = ["TensorBoardExporter"]


@dataclass(eq=False)
class TensorBoardExporter:
    """Writes event files to a folder of its own; where another writer uses it, to the folder `moe` in it.

    A snapshot is in the file when `export` returns: it outlives the process from then on, the one that shows what
    went wrong too. Training that goes on in the same folder replaces what the run before wrote at the same and
    later steps, so that no point comes twice.
    """

    logdir: str | os.PathLike[str] = "runs/moe"
    """Folder of the event files, which TensorBoard shows as one run."""
    _: KW_ONLY
    resume_step: int | None = None
    """Drop what earlier runs wrote from this step on; None takes the step of the first snapshot."""
    heatmap_every: int = 10
    """Exports between two pictures of all experts' load; 0 draws none."""

    _files: EventFiles | None = field(init=False, default=None, repr=False)
    _num_exports: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        if self.heatmap_every < 0:
            raise ConfigError(f"heatmap_every={self.heatmap_every!r}: expected a whole number, 0 (never) or more")

    def start(self) -> None:
        """Make the folder."""
        self._opened().make_folder()

    def export(self, snapshot: Snapshot) -> None:
        """Write one event with all values of the snapshot."""
        files = self._opened()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(snapshot)]
        if self.heatmap_every and self._num_exports % self.heatmap_every == 0:
            values += _pictures(snapshot)
        event = Event(wall_time=snapshot.time, step=snapshot.step, summary=Summary(value=values))
        beginning = () if self._num_exports else _beginning(snapshot, self.resume_step)
        files.write(*beginning, event)
        self._num_exports += 1

    def _opened(self) -> EventFiles:
        if self._files is None:
            self._files = EventFiles(folder_of_our_own(os.fspath(self.logdir)))
            self._num_exports = 0
        return self._files

    def close(self) -> None:
        """Let go of the file."""
        if self._files is not None:
            self._files.close()
            self._files = None


def _beginning(snapshot: Snapshot, resume_step: int | None) -> tuple[Event, ...]:
    """Return what a run writes first: from where readers drop what an earlier run wrote, and the layout."""
    step = snapshot.step if resume_step is None else resume_step
    session = SessionLog(status=SessionLog.START)
    return (
        Event(wall_time=snapshot.time, step=step, session_log=session),
        Event(wall_time=snapshot.time, step=step, summary=layout_summary()),
    )


def _pictures(snapshot: Snapshot) -> Iterator[Summary.Value]:
    for picture in heatmaps(snapshot):
        image = Summary.Image(
            width=picture.width, height=picture.height, colorspace=3, encoded_image_string=picture.png
        )
        yield Summary.Value(tag=tag("moe_expert_relative_load", stage=picture.stage), image=image)
