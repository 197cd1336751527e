"""WandbExporter: layers and their spread into the history of a Weights & Biases run, experts as a picture.

    run = wandb.init(project="pretraining")
    with mt.watch(model, "wandb") as monitor: ...

Keys are the tags of `moe_telemetry.charts`; charts of them are over `moe/step`, the training step, whatever step the
training loop logs with. `moe-telemetry wandb-workspace` makes a workspace of the first look.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import wandb
from PIL import Image

from moe_telemetry._version import __version__
from moe_telemetry.charts import tag
from moe_telemetry.errors import ConfigError, ExporterError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.heatmap import heatmaps
from moe_telemetry_exporters.scalars import scalars
from moe_telemetry_exporters.settings import check_types
from moe_telemetry_exporters.wandb.alerts import AlertLog
from moe_telemetry_exporters.wandb.rows import STEP_KEY, Rows
from moe_telemetry_exporters.wandb.start import start_run
from moe_telemetry_exporters.wandb.summary import WORST, RunSummary

__all__ = ["WandbExporter"]

_logger = logging.getLogger("moe_telemetry")
_MODES = (None, "online", "offline", "shared", "disabled")
_CONFIG_KEY = "moe_telemetry"
_RETRY_SECONDS = 60.0


@dataclass(kw_only=True, eq=False)
class WandbExporter:
    """Logs to the current W&B run, `wandb.run`; where there is none at the first export, it starts one.

    A run that was there is left open at the end, one that was started here is finished. W&B's own variables
    (`WANDB_PROJECT`, `WANDB_MODE`, `WANDB_RUN_ID`, `WANDB_RESUME`, ...) hold for a run that is started here.
    """

    project: str | None = None
    """Project of a run that is started here; None leaves it to W&B."""
    entity: str | None = None
    """User or team of a run that is started here; None leaves it to W&B."""
    name: str | None = None
    """Name of a run that is started here; None takes the id of the run."""
    mode: str | None = None
    """`online`, `offline`, `shared` or `disabled`, of a run that is started here; None leaves it to W&B."""
    dir: str | os.PathLike[str] | None = None
    """Folder for the files of a run that is started here; None leaves it to W&B."""
    init_timeout_seconds: float = 30.0
    """How long to wait for the W&B server when a run is started here; a minute later it is tried again."""
    heatmap_every: int = 10
    """Exports between two pictures of all experts' load; 0 draws none."""
    alerts: bool = True
    """Alert by W&B, once for each layer, when the routes of a replay are misaligned."""

    _run: Any = field(init=False, default=None, repr=False)
    _is_own: bool = field(init=False, default=False, repr=False)
    _is_listed: bool = field(init=False, default=True, repr=False)
    _rows: Rows | None = field(init=False, default=None, repr=False)
    _summary: RunSummary = field(init=False, default_factory=lambda: RunSummary({}), repr=False)
    _alert_log: AlertLog = field(init=False, default_factory=AlertLog, repr=False)
    _num_exports: int = field(init=False, default=0, repr=False)
    _retry_at: float = field(init=False, default=float("-inf"), repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        if self.mode not in _MODES:
            raise ConfigError(f"mode={self.mode!r}: expected one of {', '.join(mode for mode in _MODES if mode)}")
        if not self.init_timeout_seconds > 0:
            raise ConfigError(f"init_timeout_seconds={self.init_timeout_seconds!r}: expected seconds above 0")
        if self.heatmap_every < 0:
            raise ConfigError(f"heatmap_every={self.heatmap_every!r}: expected a whole number, 0 (never) or more")

    def export(self, snapshot: Snapshot) -> None:
        """Log one row, bring the summary up to date, and alert where the replay is newly misaligned."""
        rows = self._attached(snapshot)
        if rows is None:
            return
        row = {STEP_KEY: snapshot.step, **dict(scalars(snapshot))}
        if self.heatmap_every and self._num_exports % self.heatmap_every == 0:
            row.update(_pictures(snapshot))
        self._num_exports += 1
        rows.write(row)
        self._run.summary.update(self._summary.of(snapshot))
        for notice in self._alert_log.notices(snapshot) if self.alerts else ():
            self._run.alert(title=notice.title, text=notice.text, level=notice.level)

    def close(self) -> None:
        """Log what is held back, and finish the run if it was started here."""
        known, rows, is_own, run = self._run, self._rows, self._is_own, self._current
        self._run, self._rows, self._is_own, self._is_listed, self._num_exports = None, None, False, True, 0
        if run is None or run is not known:
            return  # somebody else has finished it, and with it all that was logged
        if rows is not None:
            rows.flush()
        if is_own:
            run.finish()

    @property
    def _current(self) -> Any:  # noqa: ANN401  # a wandb.Run, or None
        """The run there is; `wandb.run` knows none that a program has made with `reinit="create_new"`."""
        if self._is_listed:
            return wandb.run
        # W&B has no public word for it, and would let us wait half a minute for a run that is finished
        return None if getattr(self._run, "_is_finished", False) else self._run

    def _attached(self, snapshot: Snapshot) -> Rows | None:
        """Return the rows of the run to log to; None of a run that is disabled."""
        run = self._current
        if run is None and self._run is not None:
            raise ExporterError(self._lost(1 + self._num_waiting()))
        if run is None:
            run = self._start_run(snapshot)
            # W&B has not started one where it knows of another, which is then the program's
            self._is_own = self._is_listed = wandb.run is run
        if run is not self._run:
            self._attach(run, snapshot)
        return self._rows

    def _num_waiting(self) -> int:
        """Return how many rows wait for a run that is finished, and let go of them."""
        return 0 if self._rows is None else self._rows.forget()

    def _lost(self, num_lost: int) -> str:
        return (
            f"the W&B run {self._run.id!r} is finished, and snapshots for it are lost, {num_lost} in number: "
            "close the monitor before wandb.finish()"
        )

    def _start_run(self, snapshot: Snapshot) -> Any:  # noqa: ANN401  # a wandb.Run
        if (seconds := self._retry_at - time.monotonic()) > 0:
            raise ExporterError(f"no W&B run could be started, see the error before; trying again in {seconds:.0f} s")
        try:
            return start_run(
                self.name or (None if "WANDB_NAME" in os.environ else snapshot.run),
                project=self.project,
                entity=self.entity,
                mode=self.mode,
                folder=self.dir,
                timeout_seconds=self.init_timeout_seconds,
            )
        except BaseException:
            # every attempt takes its time, in which snapshots pile up
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            raise

    def _attach(self, run: Any, snapshot: Snapshot) -> None:  # noqa: ANN401  # a wandb.Run
        if (num_lost := self._num_waiting()) > 0:
            _logger.warning("moe_telemetry: %s", self._lost(num_lost))
        self._run, self._rows = run, None
        if run.disabled:
            return
        run.define_metric(STEP_KEY, hidden=True)
        run.define_metric("moe/*", step_metric=STEP_KEY)
        about = {"version": __version__, "run": snapshot.run, "world_size": snapshot.world_size}
        run.config.update({_CONFIG_KEY: {**about, "labels": dict(snapshot.labels)}}, allow_val_change=True)
        self._summary = RunSummary({key: run.summary.get(key) for key in WORST} if run.resumed else {})
        self._alert_log = AlertLog()
        self._rows = Rows(run, is_own=self._is_own)


def _pictures(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    for picture in heatmaps(snapshot):
        image = wandb.Image(Image.open(io.BytesIO(picture.png)), file_type="png")
        yield tag("moe_expert_relative_load", stage=picture.stage), image
