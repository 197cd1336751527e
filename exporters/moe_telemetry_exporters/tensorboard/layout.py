"""The layout of TensorBoard's page of custom scalars: the first look, as charts of many lines."""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from moe_telemetry.charts import FIRST_LOOK

__all__ = ["layout_summary"]


def layout_summary() -> Summary:
    """Return what an event has to hold, once a run, for the page to show `FIRST_LOOK`."""
    categories = [
        layout_pb2.Category(
            title=section.title,
            chart=[
                layout_pb2.Chart(title=chart.title, multiline=layout_pb2.MultilineChartContent(tag=[chart.pattern]))
                for chart in section.charts
            ],
        )
        for section in FIRST_LOOK
    ]
    # the plugin has a function for this, which needs TensorFlow
    layout = TensorProto(dtype=DT_STRING, string_val=[layout_pb2.Layout(category=categories).SerializeToString()])
    value = Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=layout)
    return Summary(value=[value])
