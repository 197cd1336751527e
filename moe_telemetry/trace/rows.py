"""TraceRow: one router call as a trace keeps it, shared by the writer, the reader and the JSONL form.

Letters: N rows that were kept of a call's tokens, K experts chosen per token (top-k).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.identity import RouterKey

__all__ = ["TraceRow"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceRow:
    """One call of one router on one rank."""

    step: int
    """The caller's own number of the optimizer step."""
    microbatch: int
    """Which call of this router within the step, from 0."""
    stage: str
    key: RouterKey
    rank: int
    num_tokens: int
    """Tokens of the call; more than N where the capture was limited."""
    top_k: int
    is_sorted: bool
    """Whether ids ascend within a row, because they come from a routing map; else the router's own order."""
    expert_ids: NDArray[np.signedinteger]
    """Signed integers `[N, K]`; -1 for a choice that was not made, or that is no expert."""
    valid: NDArray[np.bool_] | None
    """`[N]`, True for real tokens; None where all are."""
    sequence_starts: NDArray[np.int32]
    """The kept rows that begin a sequence, ascending; the first is 0, and there is none where N is 0."""
