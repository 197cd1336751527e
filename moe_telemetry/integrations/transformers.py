"""TelemetryCallback: watch the model that a `transformers.Trainer` trains."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe_telemetry.monitor import Monitor, watch
from moe_telemetry.plugins import Exporter
from moe_telemetry.snapshot import Snapshot

__all__ = ["TelemetryCallback"]


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy
    """Watches the trainer's model from the beginning of training to its end, one `step()` an optimizer step.

    Takes the exporters and settings of `moe_telemetry.watch`; steps are the trainer's `global_step`, also
    after a resume. `monitor` is the monitor while training runs, `last_snapshot` the newest snapshot.
    """

    def __init__(self, *exporters: str | Exporter, **settings: Any) -> None:  # noqa: ANN401  # those of watch()
        self._exporters = exporters
        self._settings = settings
        self.monitor: Monitor | None = None
        self.last_snapshot: Snapshot | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002  # the signature is the trainer's
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        *,
        model: nn.Module,
        **_more: object,
    ) -> None:
        """Watch the model; a training that was interrupted has left its monitor open."""
        self._close()
        self.monitor = watch(model, *self._exporters, **self._settings)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_more: object,
    ) -> None:
        """Mark the end of an optimizer step."""
        if self.monitor is not None and (snapshot := self.monitor.step(state.global_step)) is not None:
            self.last_snapshot = snapshot

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **_more: object,
    ) -> None:
        """Reduce and export a last time, and let go of the model."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
