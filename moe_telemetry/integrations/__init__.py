"""Telemetry in other people's training loops: one import, one line.

from moe_telemetry.integrations.transformers import TelemetryCallback

trainer = Trainer(model, args, callbacks=[TelemetryCallback("prometheus", every_n_steps=10)])
"""

__all__: list[str] = []
