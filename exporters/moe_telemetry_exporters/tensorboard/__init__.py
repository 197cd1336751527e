"""TensorBoard: one event a snapshot, a layout, and a picture of all experts."""

from moe_telemetry_exporters.tensorboard.exporter import TensorBoardExporter

__all__ = ["TensorBoardExporter"]
