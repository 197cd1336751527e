"""The scalars of a snapshot under their tags, for W&B and TensorBoard: few, whatever the number of experts.

Single layers have tags for what one looks at first (`BY_LAYER`); every gauge has its spread over the layers,
counters `mean` and `max` of it only, and experts have none, so that a snapshot of many layers stays below 10
tags a layer. A stage that saw no token in the window is left out, and so is what is no finite number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moe_telemetry.catalog import METRICS, Sample
from moe_telemetry.charts import BY_LAYER, tag
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import spread_over_layers, tokens_by_stage

__all__ = ["scalars"]

_ONE_LABEL = ("exporter", "stage")
# the step and its time are what scalars are plotted over, and the rest says nothing where no series are scraped
_LEFT_OUT = frozenset(
    {
        "moe_telemetry_build_info",
        "moe_telemetry_last_step_timestamp_seconds",
        "moe_telemetry_run_finished",
        "moe_telemetry_series_dropped_total",
        "moe_telemetry_step",
    }
)


def scalars(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of every scalar of a snapshot."""
    samples = _of_stages_in_window(snapshot)
    for found in (_of_layers(samples), _over_layers(samples), _of_job(samples)):
        yield from ((name, float(value)) for name, value in found if math.isfinite(value))


def _of_stages_in_window(snapshot: Snapshot) -> list[Sample]:
    stages = tokens_by_stage(snapshot, "window")
    return [
        sample
        for sample in snapshot.samples()
        if ("stage" not in sample.labels and "layer" not in sample.labels) or _stage(sample) in stages
    ]


def _of_layers(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    for sample in samples:
        if sample.name in BY_LAYER:
            layer = f"{sample.labels['block']}.{sample.labels['layer']}"
            yield tag(sample.name, layer, stage=_stage(sample)), sample.value


def _over_layers(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    finite = [sample for sample in samples if math.isfinite(sample.value)]
    for (name, stage), spread in spread_over_layers(finite).items():
        for what, value in spread._asdict().items():
            if METRICS[name].kind == "gauge" or what in {"mean", "max"}:
                yield tag(name, what, stage=stage), value


def _of_job(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    """Yield what is about the job as a whole, or about one exporter of it."""
    for sample in samples:
        if sample.labels.keys() <= set(_ONE_LABEL) and sample.name not in _LEFT_OUT:
            yield tag(sample.name, sample.labels.get("exporter", ""), stage=_stage(sample)), sample.value


def _stage(sample: Sample) -> str:
    return sample.labels.get("stage", "train")
