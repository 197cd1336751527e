"""The figures of a trace as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_telemetry.analysis import Concentration, Drift, LayerConcentration, PairPredictability, Predictability
from moe_telemetry.analysis.inventory import Inventory
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["concentration_table", "drift_table", "inventory_table", "predictability_table"]

_NUM_HOT = 3
_OF_CONCENTRATION = (
    "even: what as many experts of a balanced router take, N / E. x: top over even. stay: of a step's hottest "
    "experts, the share that is among the hottest of the next captured step."
)
_OF_PREDICTABILITY = (
    "recall: choices that were predicted for their own token; chance: K / E. cosine, rank (Spearman), hot (the "
    "hottest experts in common): predicted against actual load. before: the same for the load of the step before."
)


def concentration_table(result: Concentration) -> RenderableType:
    """Return a table a stage that has a token, with a line a router."""
    stages = groupby(result.layers, lambda layer: layer.stage)
    tables = [(stage, list(layers)) for stage, layers in stages]
    shown = [_concentration(*each) for each in tables if any(layer.tokens for layer in each[1])]
    return Group(*shown, Text(_OF_CONCENTRATION, style="dim"))


def predictability_table(result: Predictability) -> RenderableType:
    """Return a table a stage that has a token, with a line a router that has one before it."""
    stages = groupby(result.pairs, lambda pair: pair.stage)
    tables = [(stage, list(pairs)) for stage, pairs in stages]
    shown = [_predictability(*each) for each in tables if any(pair.tokens for pair in each[1])]
    return Group(*shown, Text(_OF_PREDICTABILITY, style="dim"))


def drift_table(result: Drift) -> RenderableType:
    """Return a table with a line a router."""
    table = _table(("layer", "stage", "total variation", "JS divergence (bits)", "hot in both"))
    for layer in result.layers:
        distances = (layer.total_variation, layer.jensen_shannon, layer.hot_overlap)
        _add(table, (str(layer.router), layer.stage, *map(_ratio, distances)))
    return table


def inventory_table(found: Inventory) -> RenderableType:
    """Return what a trace holds, a line each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _inventory_lines(found):
        _add(table, (name, value))
    return table


def _concentration(stage: str, layers: Sequence[LayerConcentration]) -> Group:
    tops = _one_or_many(layer.top for layer in layers)
    title = f"stage {stage}: what the {tops} hottest experts take, and how many stay hot from step to step"
    table = _table(("layer", "tokens", "in use", f"top {tops}", "even", "x", "stay"))
    table.add_column("hottest")  # the only column that wraps: no number is cut off
    for layer in layers:
        _add(
            table,
            (
                str(layer.router),
                f"{layer.tokens:,}",
                f"{layer.unique_experts}/{layer.num_experts}",
                _percent(layer.coverage()),
                _percent(layer.uniform()),
                "-" if layer.coverage_over_uniform is None else f"{layer.coverage_over_uniform:.1f}",
                _percent(layer.persistence),
                " ".join(map(str, layer.hottest(_NUM_HOT))),
            ),
        )
    lost = [(sum(layer.unmade for layer in layers), "not made"), (sum(layer.invalid for layer in layers), "invalid")]
    if words := [f"{count:,} {what}" for count, what in lost if count]:
        table.caption = f"choices left out: {', '.join(words)}"
    return Group(Text(title), table)


def _predictability(stage: str, pairs: Sequence[PairPredictability]) -> Group:
    names = ("layer", "recall", "chance", "cosine", "before", "rank", "before", "hot", "before")
    tokens = max(pair.tokens for pair in pairs)
    title = f"stage {stage}, {tokens:,} tokens: predicted from one layer earlier, and by the step before"
    table = _table(names)
    for pair in pairs:
        alike = [
            _ratio(value)
            for name in ("cosine", "spearman", "hot_overlap")
            for value in (getattr(pair.prediction, name), getattr(pair.last_step, name))
        ]
        _add(table, (str(pair.router), _percent(pair.recall), _percent(pair.chance_recall), *alike))
    return Group(Text(title), table)


def _inventory_lines(found: Inventory) -> Iterable[tuple[str, str]]:
    yield "run", f"{found.run}, model {found.model}"
    yield "routers", f"{len(found.routers)}: {_routers(found.routers)}"
    yield "steps", f"{found.num_steps:,}: {found.first_step} to {found.last_step}; stages {', '.join(found.stages)}"
    copies = f", {len(found.copies)} with the tokens of others (not counted)" if found.copies else ""
    parts = "1 part" if found.num_parts == 1 else f"{found.num_parts} parts"
    yield "ranks", f"{len(found.ranks)} of {found.world_size}{copies}; {parts}"
    yield "calls", f"{found.num_calls:,}, {found.token_layers:,} tokens x layers, {found.choices:,} choices"
    rate = "-" if found.bytes_per_token_layer is None else f"{found.bytes_per_token_layer:.2f}"
    yield "routes", f"{found.route_bytes:,} bytes, {rate} a token and layer"
    yield "tensors", f"{', '.join(found.tensors)}: {found.tensor_bytes:,} bytes" if found.tensors else "none"
    limits = {"max_steps": found.max_steps, "max_tokens_per_step": found.max_tokens_per_step}
    options = [f"every_n_steps={found.every_n_steps}", *(f"{k}={v}" for k, v in limits.items() if v is not None)]
    yield "options", ", ".join(options)
    yield "complete", "yes" if found.is_complete else "no"
    yield "left out", str(found.left_out)
    if found.silent_routers:
        yield "silent", f"{', '.join(found.silent_routers)}: no call was seen"


def _routers(routers: Sequence[TracedRouter]) -> str:
    """Return stretches of routers that are alike: decoder.1 to decoder.47 (E=128, K=8)."""
    words = []
    for (_, num_experts, top_k), several in groupby(routers, lambda x: (x.key.block, x.num_experts, x.top_k)):
        keys = [router.key for router in several]
        stretch = str(keys[0]) if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        words.append(f"{stretch} (E={num_experts}, K={top_k or 'not said'})")
    return "; ".join(words)


def _table(names: Sequence[str]) -> Table:
    table = Table(caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, cells: Iterable[str]) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # a name may hold what rich would take for markup


def _one_or_many(tops: Iterable[int]) -> str:
    different = sorted(set(tops))
    return str(different[0]) if len(different) == 1 else "N"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
