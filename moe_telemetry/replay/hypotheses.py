"""What may have gone wrong, each as a pairing of replayed rows with own rows.

Every function yields a trial for each pairing it knows. In all of them row i of the
replay holds the routes of row `partner[i]` of the router's own choice.

Letters: T rows (tokens), L layers, K experts a token, N sequences, n sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_telemetry.replay.classes import RowClass
from moe_telemetry.replay.evidence import Evidence, Trial, shared_fraction

__all__ = ["batch_sequence_swaps", "context_parallel_orders", "layer_shifts", "sequence_swaps", "token_shifts"]

_MAX_TOKEN_OFFSET = 8
_MAX_LAYER_OFFSET = 3
_MAX_DIVISORS = 48
_CP_SIZES = (2, 4, 8, 16)
_SWAP_SEQUENCES = 32
_SWAP_CANDIDATES = 1024
_SWAP_POSITIONS = 16


def _offsets(largest: int) -> list[int]:
    """Return 1, -1, 2, -2, ...: the smallest first, so that it wins among equals."""
    return [sign * size for size in range(1, largest + 1) for sign in (1, -1)]


def token_shifts(evidence: Evidence) -> Iterator[Trial]:
    """Routes late (positive) or early by up to 8 rows within their sequences."""
    geometry = evidence.geometry
    sequence_n, position_n = geometry.sequence_T[evidence.rows_n], geometry.position_T[evidence.rows_n]
    for offset in _offsets(_MAX_TOKEN_OFFSET):
        yield Trial("token_shift", offset, evidence.score(geometry.row_of(sequence_n, position_n - offset)))


def batch_sequence_swaps(evidence: Evidence, batch_size: int | None) -> Iterator[Trial]:
    """Rows flattened with batch and sequence the other way round; without a batch size all divisors are tried."""
    num_rows = len(evidence.own_TLK)
    for batch in _batch_sizes(evidence, batch_size):
        other = num_rows // batch
        for inner, outer in ((batch, other), (other, batch)):
            partner_n = (evidence.rows_n % inner) * outer + evidence.rows_n // inner
            yield Trial("batch_sequence_swap", 0, evidence.score(partner_n))


def _batch_sizes(evidence: Evidence, batch_size: int | None) -> list[int]:
    num_rows, geometry = len(evidence.own_TLK), evidence.geometry
    known = batch_size or (geometry.num_sequences if geometry.common_length else None)
    if known is not None and 1 < known < num_rows:
        return [known]
    if geometry.num_sequences > 1:
        return []
    return [size for size in range(2, num_rows // 2 + 1) if num_rows % size == 0][:_MAX_DIVISORS]


def layer_shifts(evidence: Evidence) -> Iterator[Trial]:
    """Every layer replayed from another layer, up to 3 away; positive where it gets an earlier layer's routes."""
    rows_n = evidence.rows_n[:512]
    replayed_nLK, own_nLK = evidence.replayed_TLK[rows_n], evidence.own_TLK[rows_n]
    known_nL = (evidence.classes_TL[rows_n] == RowClass.CHECKED) & evidence.valid_T[rows_n, None]
    for offset in _offsets(min(_MAX_LAYER_OFFSET, evidence.num_layers - 1)):
        to, source = (slice(offset, None), slice(None, -offset))
        if offset < 0:
            to, source = slice(None, offset), slice(-offset, None)
        weight_nL = known_nL[:, to].float()

        def mean(fraction_nL: Tensor, weight_nL: Tensor = weight_nL) -> Tensor:
            return (fraction_nL * weight_nL).sum(1) / weight_nL.sum(1)

        moved_n = mean(shared_fraction(replayed_nLK[:, to], own_nLK[:, source]))
        given_n = mean(shared_fraction(replayed_nLK[:, to], own_nLK[:, to]))
        score = evidence.score_fractions(moved_n, given_n)
        # the layers at the end have no partner: count rows as if these were rows without one
        paired_rows = len(evidence.rows_n) * (evidence.num_layers - abs(offset)) // evidence.num_layers
        yield Trial("layer_shift", offset, score._replace(rows=paired_rows))


def context_parallel_orders(evidence: Evidence, size: int | None, rank: int | None) -> Iterator[Trial]:
    """Sequences cut contiguously on one side and zig-zag on the other.

    Without a rank the rows are whole sequences, one rank's slice after another; with a rank they are
    what this rank holds of each sequence, and only the rows that both cuts give it can be paired.
    """
    geometry = evidence.geometry
    sequence_n, position_n = geometry.sequence_T[evidence.rows_n], geometry.position_T[evidence.rows_n]
    for cp_size in (size,) if size else _CP_SIZES:
        if cp_size < 2:
            continue
        zigzag = torch.tensor([chunk for r in range(cp_size) for chunk in (r, 2 * cp_size - 1 - r)])
        if rank is not None:
            zigzag = zigzag[2 * rank : 2 * rank + 2]
        contiguous = torch.arange(2 * cp_size) if rank is None else torch.tensor([2 * rank, 2 * rank + 1])
        chunk_n = geometry.length_N[sequence_n] // len(zigzag)
        fits_n = (chunk_n > 0) & (chunk_n * len(zigzag) == geometry.length_N[sequence_n])
        chunk_n = chunk_n.clamp(min=1)
        for replayed, own in ((contiguous, zigzag), (zigzag, contiguous)):
            slot_n = _find(own, replayed[(position_n // chunk_n).clamp(max=len(replayed) - 1)])
            row_n = geometry.row_of(sequence_n, slot_n * chunk_n + position_n % chunk_n)
            partner_n = row_n.masked_fill((slot_n < 0) | ~fits_n, -1)
            # a rank's slice holds few rows that can be paired: they are measured against all rows as given
            given_n = evidence.given_n if rank is None else evidence.given_n.mean().expand(len(partner_n))
            yield Trial("context_parallel_order", 0, Evidence.score_fractions(evidence.fractions(partner_n), given_n))


def _find(chunks: Tensor, wanted_n: Tensor) -> Tensor:
    """Return where each wanted chunk stands in `chunks`, or -1."""
    equal = chunks[None, :] == wanted_n[:, None]
    return torch.where(equal.any(1), equal.float().argmax(1), -1)


def sequence_swaps(evidence: Evidence) -> Iterator[Trial]:
    """Each sequence holds the routes of another one, at the same positions."""
    geometry = evidence.geometry
    if geometry.num_sequences < 2:
        return
    sequence_n, position_n = geometry.sequence_T[evidence.rows_n], geometry.position_T[evidence.rows_n]
    partner_n = torch.full_like(evidence.rows_n, -1)
    sequences = sequence_n.unique()
    step = max(len(sequences) // _SWAP_SEQUENCES, 1)
    for sequence in sequences[::step][:_SWAP_SEQUENCES]:
        members = (sequence_n == sequence).nonzero()[:, 0]
        source = _best_source(evidence, members, position_n[members])
        partner_n[members] = geometry.row_of(source.expand(len(members)), position_n[members])
    yield Trial("sequence_swap", 0, evidence.score(partner_n))


def _best_source(evidence: Evidence, members: Tensor, position_m: Tensor) -> Tensor:
    """Return the sequence whose own routes agree best with the replayed ones of `members`."""
    geometry, layer = evidence.geometry, evidence.layers[-1]
    step = max(len(members) // _SWAP_POSITIONS, 1)
    rows_m, position_m = evidence.rows_n[members[::step]], position_m[::step]
    candidates_N = torch.arange(min(geometry.num_sequences, _SWAP_CANDIDATES))
    row_mN = geometry.row_of(candidates_N.expand(len(rows_m), -1), position_m[:, None].expand(-1, len(candidates_N)))
    replayed_mNK = evidence.replayed_TLK[rows_m, layer][:, None, :].expand(-1, len(candidates_N), -1)
    agreement_mN = shared_fraction(replayed_mNK, evidence.own_TLK[row_mN.clamp(min=0), layer])
    return agreement_mN.masked_fill(row_mN < 0, 0.0).sum(0).argmax()
