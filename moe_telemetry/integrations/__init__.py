"""Telemetry in other people's training loops: one import, one line.

from moe_telemetry.integrations.transformers import TelemetryCallback

trainer = Trainer(model, args, callbacks=[TelemetryCallback("prometheus", every_n_steps=10)])

`moe_telemetry.integrations.lightning` has the same for Lightning's `Trainer`.
"""

__all__: list[str] = []
