"""`moe-telemetry replay check ROLLOUT TRAINER`: do the routes of two files belong to the same tokens?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_telemetry.errors import ConfigError, RoutesError
from moe_telemetry.identity import RouterKey

if TYPE_CHECKING:
    from torch import Tensor

    from moe_telemetry.replay import Misalignment, ReplayTotals, Routes

__all__ = ["add_parser", "run"]

_LEAST_AGREEMENT = 0.5
"""Agreement corrected for chance below which a layer is misaligned."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="compare the routes of a rollout with the trainer's own, and say how they are misaligned",
        description="Exits with 0 where the routes are aligned, 1 where they are not, 2 where they cannot be compared.",
        epilog="Example: moe-telemetry replay check rollout.safetensors trainer.safetensors",
    )
    parser.add_argument("rollout", type=Path, help="routes that the rollout engine chose, written by Routes.save")
    parser.add_argument("trainer", type=Path, help="routes that the trainer chooses for the same tokens")
    parser.add_argument("--num-experts", type=int, help="E, where the files do not say")
    parser.add_argument("--skip", action="append", default=[], metavar="ROUTER", help="leave out a router: decoder.0")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


class _Pair(NamedTuple):
    """int32 `[T, L, K]` of rollout and trainer, the same tokens and routers."""

    replayed: Tensor
    own: Tensor

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.replayed[:, index], self.own[:, index]

    def valid(self, index: int | None = None) -> Tensor:
        """Return bool `[T]`: tokens for which the trainer's router, or every one of them, has a choice."""
        known_TL = (self.own >= 0).any(-1)
        return known_TL.all(1) if index is None else known_TL[:, index]


@dataclass(frozen=True)
class _Finding:
    layers: dict[RouterKey, ReplayTotals]
    flagged: list[RouterKey]
    located: Misalignment
    notes: list[str]

    @property
    def aligned(self) -> bool:
        return self.located.aligned and not self.flagged


def run(arguments: argparse.Namespace) -> int:
    """Print the table, the verdict and the cause."""
    try:
        finding = _check(arguments)
    except (RoutesError, ConfigError) as error:
        print(f"moe-telemetry: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_as_json(finding), indent=2) if arguments.json else _as_text(finding))
    return 0 if finding.aligned else 1


def _check(arguments: argparse.Namespace) -> _Finding:
    from moe_telemetry.replay import Routes, compare_routes, locate_misalignment  # torch, when needed

    rollout, trainer = Routes.load(arguments.rollout), Routes.load(arguments.trainer)
    keys = _common_keys(rollout, trainer, {RouterKey.parse(name) for name in arguments.skip})
    num_experts, notes = _num_experts(rollout, trainer, arguments.num_experts)
    notes += [f"rollout: {text}" for text in rollout.suspicions] + [f"trainer: {text}" for text in trainer.suspicions]
    pair = _Pair(*(routes.ids[:, [routes.keys.index(key) for key in keys]] for routes in (rollout, trainer)))
    settings: dict[str, Any] = {"num_experts": num_experts, "sequence_starts": trainer.sequence_starts()}
    layers = {
        key: compare_routes(*pair.layer(i), valid=pair.valid(i), **settings).totals() for i, key in enumerate(keys)
    }
    flagged = [key for key, totals in layers.items() if _is_bad(totals)]
    located = locate_misalignment(*pair, valid=pair.valid(), **settings)
    if located.aligned and flagged:
        # one bad layer among many good ones: say what is wrong with the worst
        worst = keys.index(min(flagged, key=lambda key: layers[key].agreement or 0.0))
        located = locate_misalignment(*pair.layer(worst), valid=pair.valid(worst), **settings)
    return _Finding(layers, flagged, located, notes)


def _common_keys(rollout: Routes, trainer: Routes, skipped: set[RouterKey]) -> list[RouterKey]:
    keys = [key for key in trainer.keys if key in rollout.keys and key not in skipped]
    if not keys:
        raise RoutesError(
            f"the files have no router in common: rollout {', '.join(map(str, rollout.keys))}; "
            f"trainer {', '.join(map(str, trainer.keys))}"
        )
    if rollout.sequence_lengths != trainer.sequence_lengths:
        raise RoutesError(
            f"rollout has {len(rollout.sequence_lengths)} sequences with {len(rollout.ids)} tokens, trainer "
            f"{len(trainer.sequence_lengths)} with {len(trainer.ids)}; expected the same sequence lengths"
        )
    if rollout.ids.shape[2] != trainer.ids.shape[2]:
        raise RoutesError(f"rollout has K={rollout.ids.shape[2]}, trainer K={trainer.ids.shape[2]}; expected the same")
    return keys


def _num_experts(rollout: Routes, trainer: Routes, given: int | None) -> tuple[int, list[str]]:
    known = {number for number in (given, trainer.num_experts, rollout.num_experts) if number is not None}
    if len(known) > 1:
        raise RoutesError(f"the files and --num-experts disagree on the number of experts: {sorted(known)}")
    if known:
        return known.pop(), []
    largest = max(int(rollout.ids.max()), int(trainer.ids.max()), trainer.ids.shape[2] - 1)
    return largest + 1, [f"the files do not say how many experts there are: taken as {largest + 1}"]


def _is_bad(totals: ReplayTotals) -> bool:
    corrected = totals.chance_corrected_agreement
    low = corrected is not None and corrected < _LEAST_AGREEMENT
    return bool(totals.exceeds()) or low or (totals.replayed > 0 and totals.checked == 0)


def _as_json(finding: _Finding) -> dict[str, object]:
    return {
        "aligned": finding.aligned,
        "misaligned_layers": [str(key) for key in finding.flagged],
        "misalignment": asdict(finding.located),
        "notes": finding.notes,
        "layers": {
            str(key): {
                **totals.as_dict(),
                "agreement": totals.agreement,
                "zero_overlap_ratio": totals.zero_overlap_ratio,
                "coverage": totals.coverage,
                "chance_agreement": totals.chance_agreement,
                "chance_zero_overlap": totals.chance_zero_overlap,
                "blind": totals.blind,
            }
            for key, totals in finding.layers.items()
        },
    }


def _as_text(finding: _Finding) -> str:
    header = ("router", "replayed", "checked", "agreement", "zero overlap", "coverage", "equal run")
    rows = [header, *(_row(key, totals, key in finding.flagged) for key, totals in finding.layers.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    verdict = "aligned" if finding.aligned else f"NOT ALIGNED: {finding.located.cause}"
    blind = [str(key) for key, totals in finding.layers.items() if totals.blind]
    if blind:
        lines.append(f"zero overlap says nothing about {len(blind)} routers: K is large against E; go by agreement")
    return "\n".join([*lines, *finding.notes, verdict, finding.located.advice])


def _row(key: RouterKey, totals: ReplayTotals, is_bad: bool) -> tuple[str, ...]:  # noqa: FBT001  # one caller
    ratios = (totals.agreement, totals.zero_overlap_ratio, totals.coverage)
    agreement, zero_overlap, coverage = ("-" if ratio is None else f"{ratio:.4f}" for ratio in ratios)
    mark = f"! {key}" if is_bad else str(key)
    counts = (str(totals.replayed), str(totals.checked))
    return (mark, *counts, agreement, zero_overlap, coverage, str(totals.longest_equal_run))
