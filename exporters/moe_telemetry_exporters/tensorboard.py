"""TensorBoardExporter: layers and their spread as scalars, one event a snapshot, with TensorBoard's own writer.

Tags, by metric name without `moe_` and `_total`:

    moe/<metric>/<block>.<layer>            of stage train, as moe/load_max_violation_ratio/decoder.3
    moe/<metric>/<stage>/<block>.<layer>    of every other stage
    moe/<metric>/{mean,max,min,p90}         over the layers; with a stage in between, as above

Single layers have tags for what one looks at first: tokens, MaxVio, dead experts, the entropies of load and
scores, and the replay check; every gauge has its spread over the layers. Counters have `mean` and `max`
only, and experts have none, so that a snapshot of many layers stays below 10 tags a layer. A stage that saw
no token in the window is left out of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from moe_telemetry.catalog import METRICS
from moe_telemetry.errors import ConfigError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import is_of_layer, spread_over_layers, tokens_by_stage

__all__ = ["TensorBoardExporter", "scalars"]

_BY_LAYER = frozenset(
    {
        "moe_load_dead_experts",
        "moe_load_entropy_ratio",
        "moe_load_max_violation_ratio",
        "moe_replay_agreement_ratio",
        "moe_replay_zero_overlap_ratio",
        "moe_router_tokens_total",
        "moe_score_entropy_ratio",
    }
)


@dataclass(eq=False)
class TensorBoardExporter:
    """Writes event files to a folder that no other writer uses at the same time.

    Training that goes on in the same folder replaces what the run before wrote at the same and later steps,
    so that no point comes twice.
    """

    logdir: str | os.PathLike[str] = "runs/moe"
    """Folder of the event files; TensorBoard shows it as one run."""
    _: KW_ONLY
    resume_step: int | None = None
    """Drop what earlier runs wrote from this step on; None takes the step of the first snapshot."""
    flush_seconds: float = 10.0
    """The longest that points wait before they are in the file."""

    _writer: Any = field(init=False, default=None, repr=False)
    _is_resumed: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.flush_seconds > 0:
            raise ConfigError(f"flush_seconds={self.flush_seconds!r}: expected seconds above 0")

    def start(self) -> None:
        """Make the folder and the event file."""
        if self._writer is None:
            self._writer = EventFileWriter(os.fspath(self.logdir), flush_secs=self.flush_seconds)
            self._is_resumed = False

    def export(self, snapshot: Snapshot) -> None:
        """Write one event with all values of the snapshot."""
        self.start()
        if not self._is_resumed:
            step = snapshot.step if self.resume_step is None else self.resume_step
            # readers drop what they have of this and later steps
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=snapshot.time, step=step, session_log=session))
            self._is_resumed = True
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(snapshot)]
        self._writer.add_event(Event(wall_time=snapshot.time, step=snapshot.step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is buffered and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of every scalar of a snapshot."""
    stages = tokens_by_stage(snapshot, "window")
    samples = [
        sample for sample in snapshot.samples() if is_of_layer(sample) and sample.labels.get("stage", "train") in stages
    ]
    for name, labels, value in samples:
        if name in _BY_LAYER:
            yield _tag(name, labels.get("stage", "train"), f"{labels['block']}.{labels['layer']}"), value
    for (name, stage), spread in spread_over_layers(samples).items():
        for what, value in spread._asdict().items():
            if METRICS[name].kind == "gauge" or what in {"mean", "max"}:
                yield _tag(name, stage, what), value


def _tag(name: str, stage: str, last: str) -> str:
    metric = name.removeprefix("moe_").removesuffix("_total")
    return "/".join(["moe", metric, last] if stage == "train" else ["moe", metric, stage, last])
