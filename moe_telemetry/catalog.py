"""The one table of metrics: exporters, docs, dashboards, rules and tests read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = ["METRICS", "Columns", "Metric", "Sample"]

Kind = Literal["counter", "gauge"]
Source = Literal["node", "job", "process"]

_ROUTER = ("stage", "block", "layer")
_LAYER = ("block", "layer")


class Sample(NamedTuple):
    """One number to export: a metric's name as Prometheus shows it, its labels, its value."""

    name: str
    labels: Mapping[str, str]
    value: float


class Columns(NamedTuple):
    """All samples of one metric, its labels and values side by side: for sinks that take many at once."""

    name: str
    labels: tuple[Mapping[str, str], ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """The Prometheus name, `_total` included."""
    kind: Kind
    labels: tuple[str, ...] = ()
    unit: str
    """UCUM unit, annotations in braces: `{token}`, `1` for ratios, `s`."""
    help: str
    source: Source
    """Which endpoint exports it: `node`, every node its own ranks' share, so that `sum` is the job's
    total; `job`, the first node alone, for the whole job; `process`, every endpoint about itself."""
    healthy: str = ""
    """The range of a healthy run, and what to look at when the metric leaves it."""

    @property
    def otel_name(self) -> str:
        """The OpenTelemetry name: the same words with dots, without `_total`."""
        return self.name.removesuffix("_total").replace("_", ".")


def _table(*metrics: Metric) -> Mapping[str, Metric]:
    return MappingProxyType({metric.name: metric for metric in metrics})


METRICS: Mapping[str, Metric] = _table(
    Metric(
        name="moe_router_tokens_total",
        kind="counter",
        labels=_ROUTER,
        unit="{token}",
        source="node",
        help="Valid tokens that the router placed.",
        healthy="Grows by the batch's tokens each step, equally in every layer.",
    ),
    Metric(
        name="moe_router_padding_tokens_total",
        kind="counter",
        labels=_ROUTER,
        unit="{token}",
        source="node",
        help="Tokens that the mask calls padding; they are in no other count.",
        healthy="A large share means that batches are mostly padding: pack or bucket them.",
    ),
    Metric(
        name="moe_router_assignments_total",
        kind="counter",
        labels=_ROUTER,
        unit="{assignment}",
        source="node",
        help="Expert choices of valid tokens, all K of each token.",
        healthy="K times the tokens where nothing is dropped or invalid.",
    ),
    Metric(
        name="moe_router_dropped_assignments_total",
        kind="counter",
        labels=_ROUTER,
        unit="{assignment}",
        source="node",
        help="Expert choices that were not dispatched because the expert's capacity was full.",
        healthy="0 for dropless models; a rising share means that the load outgrows the capacity factor.",
    ),
    Metric(
        name="moe_router_invalid_assignments_total",
        kind="counter",
        labels=_ROUTER,
        unit="{assignment}",
        source="node",
        help="Expert ids outside 0..E-1; they are in no expert's count.",
        healthy="0; anything else is a fault of the router or of its adapter.",
    ),
    Metric(
        name="moe_expert_assignments_total",
        kind="counter",
        labels=(*_ROUTER, "expert"),
        unit="{assignment}",
        source="job",
        help="Assignments of each expert, for the whole job; opt-in by per_expert=True.",
        healthy="Every expert grows; compare experts of one layer with rate().",
    ),
    Metric(
        name="moe_load_max_violation_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="MaxVio of the window: largest expert load over the mean, minus 1.",
        healthy="Below 1 in balanced training; it bounds how much longer the hottest expert takes.",
    ),
    Metric(
        name="moe_load_min_violation_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="MinVio of the window: smallest expert load over the mean, minus 1.",
        healthy="Above -1; exactly -1 means that an expert received nothing.",
    ),
    Metric(
        name="moe_load_cv_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="Coefficient of variation (population) of the expert loads of the window.",
        healthy="Below 0.5 in balanced training; watch for a trend.",
    ),
    Metric(
        name="moe_load_entropy_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="Entropy of the expert loads of the window over log E.",
        healthy="Above 0.9; a fall towards 0 is a collapse onto few experts.",
    ),
    Metric(
        name="moe_load_gini_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="Gini coefficient of the expert loads of the window.",
        healthy="Below 0.3 in balanced training; (E - 1) / E means that one expert takes all.",
    ),
    Metric(
        name="moe_load_dead_experts",
        kind="gauge",
        labels=_ROUTER,
        unit="{expert}",
        source="job",
        help="Experts that received no assignment in the window.",
        healthy="0 once the window holds many more tokens than experts.",
    ),
    Metric(
        name="moe_replay_tokens_total",
        kind="counter",
        labels=("block", "layer", "outcome"),
        unit="{token}",
        source="node",
        help="Replayed tokens by the kind of their route: checked, placeholder, missing, malformed, out_of_range, ...",
        healthy="Nearly all checked, one placeholder a sequence; all else falls back to the router's own choice.",
    ),
    Metric(
        name="moe_replay_zero_overlap_tokens_total",
        kind="counter",
        labels=_LAYER,
        unit="{token}",
        source="node",
        help="Checked tokens whose replayed experts share none with the router's own choice.",
        healthy="At most 1 % of the checked tokens; more means that routes belong to other tokens.",
    ),
    Metric(
        name="moe_replay_shared_fraction_total",
        kind="counter",
        labels=_LAYER,
        unit="{token}",
        source="node",
        help="Sum over checked tokens of the share of replayed experts that the router chose itself.",
        healthy="Its rate over that of the checked tokens is the agreement.",
    ),
    Metric(
        name="moe_replay_agreement_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean share of replayed experts that the router chose itself, over checked tokens of the window.",
        healthy="Above 0.95; rounding and ties cost about 1 %, one row of shift far more.",
    ),
    Metric(
        name="moe_replay_tie_tolerant_agreement_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="The same agreement where an expert that ties with the k-th own score counts as shared.",
        healthy="Near 1; its gap to the agreement is rounding, not misalignment.",
    ),
    Metric(
        name="moe_replay_corrected_agreement_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Agreement corrected for chance, (a - K/E) / (1 - K/E): 1 is perfect, 0 is random.",
        healthy="Above 0.9, whatever K and E are.",
    ),
    Metric(
        name="moe_replay_zero_overlap_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Share of checked tokens of the window without a common expert, on the rank where it is largest.",
        healthy="At most 0.01.",
    ),
    Metric(
        name="moe_replay_coverage_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Share of replayed tokens of the window that could be checked.",
        healthy="Near 1; 0 means that nothing was checked: no route arrives.",
    ),
    Metric(
        name="moe_replay_longest_equal_run_tokens",
        kind="gauge",
        labels=_LAYER,
        unit="{token}",
        source="job",
        help="Longest run of equal routes within a sequence in the window.",
        healthy="A few tokens; long runs are rows left over from an earlier forward.",
    ),
    Metric(
        name="moe_replay_check_blind",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="1 where K is so large against E that random routes nearly always share an expert, else 0.",
        healthy="0; at 1 zero overlap shows nothing, and the corrected agreement has to be watched.",
    ),
    Metric(
        name="moe_replay_misalignment_info",
        kind="gauge",
        labels=("cause", "offset"),
        unit="1",
        source="job",
        help="Always 1; its labels say what was last found wrong with the replayed routes.",
        healthy="Absent, or cause=aligned; the log has a sentence of advice.",
    ),
    Metric(
        name="moe_telemetry_step",
        kind="gauge",
        unit="{step}",
        source="process",
        help="Training step of the last export.",
        healthy="Moves; a standstill means that training or telemetry stopped.",
    ),
    Metric(
        name="moe_telemetry_last_step_timestamp_seconds",
        kind="gauge",
        unit="s",
        source="process",
        help="Unix time of the last export.",
        healthy="Within a few export intervals of now while the run is not finished.",
    ),
    Metric(
        name="moe_telemetry_routers_expected",
        kind="gauge",
        unit="{router}",
        source="process",
        help="Routers that the job attached to, over all ranks.",
        healthy="The number of MoE layers of the model.",
    ),
    Metric(
        name="moe_telemetry_routers_observed",
        kind="gauge",
        unit="{router}",
        source="process",
        help="Routers that have counted at least one token.",
        healthy="Equal to routers expected; fewer means hooks that never fire (attach before compile).",
    ),
    Metric(
        name="moe_telemetry_run_finished",
        kind="gauge",
        unit="1",
        source="process",
        help="1 once the monitor is closed, 0 before.",
        healthy="0 while training; alerts are quiet at 1.",
    ),
    Metric(
        name="moe_telemetry_overhead_seconds_total",
        kind="counter",
        unit="s",
        source="process",
        help="Time that step() has spent in the training thread of the exporting rank, reduction included.",
        healthy="A small and constant share of the training time.",
    ),
    Metric(
        name="moe_telemetry_skipped_reductions_total",
        kind="counter",
        unit="{reduction}",
        source="process",
        help="Reductions given up because a rank did not arrive in time; their counts come with the next.",
        healthy="0; the log names the ranks that were missing.",
    ),
    Metric(
        name="moe_telemetry_export_errors_total",
        kind="counter",
        labels=("exporter",),
        unit="{error}",
        source="process",
        help="Snapshots that an exporter failed to take, or was too slow for.",
        healthy="0; the log has the exporter's last error.",
    ),
    Metric(
        name="moe_telemetry_series_dropped_total",
        kind="counter",
        unit="{series}",
        source="process",
        help="Per-expert series left out of this export by max_series.",
        healthy="0; else raise max_series or turn per_expert off.",
    ),
    Metric(
        name="moe_telemetry_build_info",
        kind="gauge",
        labels=("version",),
        unit="1",
        source="process",
        help="Always 1; its label is the version of moe-telemetry.",
    ),
)
