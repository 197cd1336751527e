"""The replay check once more, slowly, in plain Python: what the fast one must equal."""

from __future__ import annotations

from collections.abc import Sequence

from moe_telemetry.replay import ReplayTotals


def reference_totals(
    replayed: Sequence[Sequence[int]],
    own: Sequence[Sequence[int]],
    *,
    num_experts: int,
    valid: Sequence[bool] | None = None,
    starts: Sequence[int] = (),
    row_stride: int = 1,
    scores: Sequence[Sequence[float]] | None = None,
) -> ReplayTotals:
    top_k = len(replayed[0])
    counts = dict.fromkeys(
        ("replayed", "missing", "malformed", "out_of_range", "repeated", "placeholder", "checked", "zero_overlap"), 0
    )
    shared = tie_shared = routed_padding = longest = 0
    runs: dict[int, int] = {}
    for row, ids in enumerate(replayed):
        if valid is not None and not valid[row]:
            routed_padding += any(expert >= 0 for expert in ids)
            continue
        counts["replayed"] += 1
        previous = row - row_stride
        follows = previous >= 0 and row not in starts and (valid is None or valid[previous])
        kind = _kind(ids, num_experts, replayed[previous] if follows else None)
        counts[kind] += 1
        if kind in {"placeholder", "checked"}:
            runs[row] = runs.get(previous, 0) + 1 if kind == "placeholder" else 1
            longest = max(longest, runs[row])
        if kind == "checked":
            both = len(set(ids) & set(own[row]))
            shared += both
            counts["zero_overlap"] += both == 0
            if scores is not None:
                boundary = min(scores[row][expert] for expert in own[row])
                tie_shared += sum(scores[row][expert] >= boundary for expert in ids)
    return ReplayTotals(
        num_experts=num_experts,
        top_k=top_k,
        **counts,
        shared_experts=shared,
        tie_checked=counts["checked"] if scores is not None else 0,
        tie_shared_experts=tie_shared,
        routed_padding=routed_padding,
        longest_equal_run=longest,
    )


def _kind(ids: Sequence[int], num_experts: int, previous: Sequence[int] | None) -> str:
    if all(expert < 0 for expert in ids):
        return "missing"
    if any(expert < 0 for expert in ids):
        return "malformed"
    if any(expert >= num_experts for expert in ids):
        return "out_of_range"
    if len(set(ids)) < len(ids):
        return "repeated"
    if previous is not None and list(previous) == list(ids):
        return "placeholder"
    return "checked"
