"""Expert ids that were renamed: a consistent map between two numberings, and ids cut to eight bits.

Letters: K experts a token, E experts, P replayed ids (physical experts, P >= E), n rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_telemetry.replay.classes import RowClass
from moe_telemetry.replay.evidence import Evidence, Score, Trial, expected_agreement, shared_fraction

__all__ = ["dtype_wraps", "expert_remaps", "fit_expert_map"]

_MAX_PHYSICAL = 4
"""More replayed ids than this many times E are no replicas of experts."""
_LEAST_FIT = 0.6
"""Agreement that a map must reach, also when corrected for what a fit finds by chance."""
_BYTE = 256


def expert_remaps(evidence: Evidence) -> Iterator[Trial]:
    """One renaming of experts per layer, fitted where ids occur together.

    A fit finds agreement in unrelated rows too, so it is corrected by a fit of the same rows in
    another order.
    """
    fits = []
    for layer in evidence.layers[::2]:
        replayed_nK, own_nK = _comparable(evidence, layer)
        if len(replayed_nK) < 2:
            continue
        agreement = _fitted_agreement(replayed_nK, own_nK, evidence.num_experts)
        if agreement < _LEAST_FIT:
            return
        shuffled_n = torch.randperm(len(own_nK), generator=torch.Generator().manual_seed(1))
        chance = _fitted_agreement(replayed_nK, own_nK[shuffled_n], evidence.num_experts)
        fits.append((agreement, chance, len(own_nK)))
    if not fits:
        return
    agreement, chance, rows = (sum(column) / len(fits) for column in zip(*fits, strict=True))
    if agreement - chance >= _LEAST_FIT * (1 - chance):
        yield Trial("expert_remap", 0, Score(agreement, round(rows), torch.inf))


def _comparable(evidence: Evidence, layer: int) -> tuple[Tensor, Tensor]:
    # physical ids may be E or more, and rows with them are in no sample of checked rows
    classes_T = evidence.classes_TL[:, layer]
    usable_T = (classes_T == RowClass.CHECKED) | (classes_T == RowClass.OUT_OF_RANGE)
    usable_T &= (evidence.replayed_TLK[:, layer] >= 0).all(1)
    usable_T &= (evidence.replayed_TLK[:, layer] < _MAX_PHYSICAL * evidence.num_experts).all(1)
    rows_n = usable_T.nonzero()[:, 0]
    rows_n = rows_n[torch.linspace(0, len(rows_n) - 1, min(len(rows_n), 4096)).long()]
    return evidence.replayed_TLK[rows_n, layer], evidence.own_TLK[rows_n, layer]


def _fitted_agreement(replayed_nK: Tensor, own_nK: Tensor, num_experts: int) -> float:
    logical_P = fit_expert_map(replayed_nK, own_nK, num_experts)
    return float(shared_fraction(logical_P[replayed_nK], own_nK).mean())


def fit_expert_map(replayed_nK: Tensor, own_nK: Tensor, num_experts: int) -> Tensor:
    """Return int64 `[P]`: the own id that each replayed id stands for, -2 where nothing speaks for any.

    One to one where all replayed ids are below E; otherwise several replayed ids may be replicas of
    one expert. The measure is how many rows have both over how many have either, so that an expert
    that is in every row is not everybody's match.
    """
    num_replayed = max(int(replayed_nK.max()) + 1, num_experts)
    has_nP = torch.zeros(len(replayed_nK), num_replayed).scatter_(1, replayed_nK, 1.0)
    # own ids outside the range go to a column that is cut off
    own_nK = torch.where((own_nK >= 0) & (own_nK < num_experts), own_nK, num_experts)
    has_nE = torch.zeros(len(own_nK), num_experts + 1).scatter_(1, own_nK, 1.0)[:, :num_experts]
    both_PE = has_nP.t() @ has_nE
    either_PE = has_nP.sum(0)[:, None] + has_nE.sum(0)[None, :] - both_PE
    measure_PE = both_PE / either_PE.clamp(min=1)
    if num_replayed > num_experts:
        best = (both_PE / has_nP.sum(0).clamp(min=1)[:, None] + measure_PE).max(1)
        return best.indices.masked_fill(best.values == 0, -2)
    return _one_to_one(measure_PE)


def _one_to_one(measure_PE: Tensor) -> Tensor:
    """Match the pair with the largest measure, take both out, and so on."""
    num_replayed, num_experts = measure_PE.shape
    logical, taken = [-2] * num_replayed, [False] * num_experts
    left = min(num_replayed, num_experts)
    values, order = measure_PE.flatten().sort(descending=True, stable=True)
    for pair in order[: int((values > 0).sum())].tolist():
        replayed_id, own_id = divmod(pair, num_experts)
        if logical[replayed_id] < 0 and not taken[own_id]:
            logical[replayed_id], taken[own_id] = own_id, True
            left -= 1
            if not left:
                break
    return torch.tensor(logical)


def dtype_wraps(evidence: Evidence) -> Iterator[Trial]:
    """Ids stored in eight bits: equal to the own ids modulo 256, or negative from 128 on."""
    layers = torch.tensor(evidence.layers)
    own_TLK, replayed_TLK = evidence.own_TLK[:, layers], evidence.replayed_TLK[:, layers]
    unsigned = evidence.num_experts > _BYTE and int(replayed_TLK.max()) < _BYTE
    signed = evidence.num_experts > _BYTE // 2 and int(replayed_TLK.min()) < -1
    if not unsigned and not signed:
        return
    # wrapped ids may repeat or be negative, so rows of any class but missing and padding take part
    rows_n = (evidence.classes_TL[:, layers] > RowClass.MISSING).any(1).nonzero()[:, 0]
    replayed_nLK, own_nLK = replayed_TLK[rows_n], own_TLK[rows_n]
    given_n = shared_fraction(replayed_nLK, own_nLK).mean(1)
    replayed_nLK, own_nLK = replayed_nLK % _BYTE, own_nLK % _BYTE
    score = evidence.score_fractions(shared_fraction(replayed_nLK, own_nLK).mean(1), given_n)
    yield Trial("dtype_wrap", 0, score, expected_agreement(replayed_nLK, own_nLK, _BYTE), float(given_n.mean()))
