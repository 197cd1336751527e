"""TelemetryCallback: watch the model that a Lightning `Trainer` trains."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from moe_telemetry.monitor import Monitor, watch
from moe_telemetry.plugins import Exporter
from moe_telemetry.snapshot import Snapshot

__all__ = ["TelemetryCallback"]


class TelemetryCallback(Callback):  # type: ignore[misc]  # lightning is not needed to type-check the rest
    """Watches the trainer's module from the start of fitting to its end, one `step()` an optimizer step.

    Takes the exporters and settings of `moe_telemetry.watch`; steps are the trainer's `global_step`, also
    after a resume. `monitor` is the monitor while fitting runs, `last_snapshot` the newest snapshot.
    """

    def __init__(self, *exporters: str | Exporter, **settings: Any) -> None:  # noqa: ANN401  # those of watch()
        self._exporters = exporters
        self._settings = settings
        self._last_step = 0
        self.monitor: Monitor | None = None
        self.last_snapshot: Snapshot | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the module; a fit that was interrupted has left its monitor open."""
        self._close()
        self._last_step = trainer.global_step
        self.monitor = watch(pl_module, *self._exporters, **self._settings)

    def on_train_batch_end(self, trainer: Trainer, *_batch: object) -> None:
        """Mark the end of an optimizer step; a batch whose gradients only accumulate ends none."""
        if self.monitor is None or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if (snapshot := self.monitor.step(trainer.global_step)) is not None:
            self.last_snapshot = snapshot

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002  # Lightning's signature
        """Reduce and export a last time, and let go of the module."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Export what there is without waiting long for ranks that may know nothing of the failure."""
        if self.monitor is not None:
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)
            self.monitor = None

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
