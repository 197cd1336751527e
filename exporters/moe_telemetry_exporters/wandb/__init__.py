"""Weights & Biases: one row a snapshot in the run that is there, or in one of its own."""

from moe_telemetry_exporters.wandb.exporter import WandbExporter

__all__ = ["WandbExporter"]
