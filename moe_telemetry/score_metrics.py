"""The part of the table that is about the shape of the load, and about the routers' scores."""

from __future__ import annotations

from moe_telemetry.metric import Metric

__all__ = ["LOAD_SHAPE_METRICS", "SCORE_METRICS"]

_ROUTER = ("stage", "block", "layer")
_LAYER = ("block", "layer")
_SAMPLED = "Of sampled steps: those whose end reduces, one in every_n_steps."

LOAD_SHAPE_METRICS = (
    Metric(
        name="moe_load_microbatch_max_violation_ratio",
        kind="gauge",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="Mean of MaxVio over the router's calls on each rank: what one microbatch's experts see.",
        healthy="Near the window's MaxVio; far above it, imbalances cancel out but cost time in each call.",
        formula=f"Mean over calls of E * max(n) / sum(n) - 1 with the call's own assignments n. {_SAMPLED}",
    ),
    Metric(
        name="moe_load_hottest_share_ratio",
        kind="gauge",
        labels=(*_ROUTER, "experts"),
        unit="1",
        source="job",
        help="Share of the window's assignments that the 1, 4 and 16 most loaded experts have; absent for all E.",
        healthy="Near experts / E; a rise of the first alone is one runaway expert.",
        formula="Sum of the largest `experts` entries of n over sum(n).",
    ),
    Metric(
        name="moe_expert_relative_load",
        kind="histogram",
        labels=_ROUTER,
        unit="1",
        source="job",
        help="Load over mean load of every expert, one observation an expert and window.",
        healthy="Most experts between 0.5 and 1.5; a full bucket at 0 is dead experts, a tail above 2 hot ones.",
        formula="E * n / sum(n); buckets 0 .1 .25 .5 .75 1 1.25 1.5 2 4 8 +Inf.",
    ),
    Metric(
        name="moe_ep_balancedness_ratio",
        kind="gauge",
        labels=("stage",),
        unit="1",
        source="job",
        help="How evenly the window's load lies on expert-parallel ranks; needs expert_parallel_ranks.",
        healthy="Above 0.8; 1 / ranks means that one rank does all the work: move or replicate hot experts.",
        formula="Mean over layers of mean / max over ranks of their load; replicas share an expert's load evenly.",
    ),
    Metric(
        name="moe_ep_straggler_ratio",
        kind="gauge",
        labels=("stage",),
        unit="1",
        source="job",
        help="How many times longer experts are predicted to take than with balanced expert-parallel ranks.",
        healthy="Below 1.25; it is the gain that a better placement could bring at most.",
        formula="Sum over layers of the largest load on a rank over the sum of the mean loads.",
    ),
)

SCORE_METRICS = (
    Metric(
        name="moe_score_nonfinite_tokens_total",
        kind="counter",
        labels=_ROUTER,
        unit="{token}",
        source="job",
        help="Valid tokens of sampled steps with a NaN or an infinity among their scores, for the whole job.",
        healthy="0; anything else is an overflow or a broken weight upstream of this router.",
        formula=f"Tokens with a NaN, an infinity, a score beyond 1e19 or a probability below 0. {_SAMPLED}",
    ),
    Metric(
        name="moe_score_entropy_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean entropy of a token's probabilities over experts, over log E: 1 is undecided, 0 certain.",
        healthy="Falls slowly in training; near 0 early on is a collapsed router, at 1 one that learns nothing.",
        formula=f"Mean over tokens of -sum(p * log p) / log E. {_SAMPLED}",
    ),
    Metric(
        name="moe_topk_boundary_margin_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean gap between a token's lowest chosen and highest unchosen probability, over the former.",
        healthy="Above 0.05; near 0 choices are decided by rounding, and replicas or engines disagree.",
        formula=f"Mean of max(0, min chosen - max unchosen) / min chosen, by score alone. {_SAMPLED}",
    ),
    Metric(
        name="moe_selected_mass_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean probability that a token's K chosen experts have together.",
        healthy="Between K / E (undecided) and 1; a fall means that the choice ignores much of the scores.",
        formula=f"Mean over tokens of the sum of p over chosen experts. {_SAMPLED}",
    ),
    Metric(
        name="moe_logit_max",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Largest router logit of any token, in any stage.",
        healthy="Below 50; steady growth ends in overflow: add or raise the z-loss.",
        formula=f"Maximum over tokens and experts. {_SAMPLED}",
    ),
    Metric(
        name="moe_router_z",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean squared log-sum-exp of a token's logits: the z-loss without its coefficient.",
        healthy="Flat; growth means that logits drift up.",
        formula=f"Mean over tokens of log(sum(exp(logit)))^2 (arXiv:2202.08906). {_SAMPLED}",
    ),
    Metric(
        name="moe_balance_loss_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Load-balancing loss in its scale-free form: 1 is balanced for any K, E / K the worst.",
        healthy="Below 1.2; frameworks that do not divide by K show K times as much.",
        formula=(
            "E * sum(f * p): f an expert's share of the window's assignments, p its mean probability "
            f"(arXiv:2101.03961). p: {_SAMPLED[0].lower()}{_SAMPLED[1:]}"
        ),
    ),
    Metric(
        name="moe_bias_overlap_ratio",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Mean share of a token's chosen experts that its scores alone would have chosen.",
        healthy="Above 0.7; a fall means that the bias or the group limit, not the scores, decides.",
        formula=f"Mean over tokens of |chosen and top-k of scores| / K; routers with a bias or groups only. {_SAMPLED}",
    ),
    Metric(
        name="moe_expert_bias_max",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Largest entry of the expert bias, for routers that have one.",
        healthy="Settles; one that keeps growing lifts an expert that the scores never choose.",
        formula="Maximum over experts when the window ends.",
    ),
    Metric(
        name="moe_expert_bias_min",
        kind="gauge",
        labels=_LAYER,
        unit="1",
        source="job",
        help="Smallest entry of the expert bias, for routers that have one.",
        healthy="Settles; one that keeps falling holds back an expert that the scores always choose.",
        formula="Minimum over experts when the window ends.",
    ),
)
