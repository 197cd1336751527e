"""The JSONL form of a trace, for scripts that read it: one JSON object a step, router and rank.

    {"step": 10, "stage": "train", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 2, "topk": 2, "top_indices": [[5, 1], [0]]}

Such scripts add up what they find, and know no padding and no microbatches: the microbatches of a step
follow one another in one object, padding is left out, and a token with a choice that was not made has a
shorter list. `num_tokens` is the number of lists.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.rows import TraceRow

__all__ = ["MAX_LINE_CHARACTERS", "read_jsonl", "write_jsonl"]

MAX_LINE_CHARACTERS = 2**28
"""Length of a line beyond which a file is refused: 8 choices of 8 million tokens."""

_LARGEST = 2**31 - 1
_LARGEST_TOP_K = 2**10


class _Place(NamedTuple):
    step: int
    stage: str
    key: RouterKey
    rank: int


def write_jsonl(rows: Iterable[TraceRow], stream: TextIO) -> int:
    """Write rows as JSON lines and return the number of lines.

    Rows of one step and rank that come one after another, as a trace has them, are put together.
    """
    num_lines = 0
    for _, together in groupby(rows, key=lambda row: (row.step, row.rank)):
        places: dict[_Place, list[TraceRow]] = {}
        for row in together:
            places.setdefault(_Place(row.step, row.stage, row.key, row.rank), []).append(row)
        stream.writelines(_line(place, calls) for place, calls in places.items())
        num_lines += len(places)
    return num_lines


def read_jsonl(stream: TextIO) -> Iterator[TraceRow]:
    """Yield the rows of a file of JSON lines, written by `write_jsonl` or by others.

    Each object is one call (`is_sorted` where all its ids ascend); further ones of the same step, stage,
    router and rank are further microbatches. `stage`, `block` and `rank` may be missing (`train`,
    `decoder`, 0), other keys are ignored, and lists of different lengths are filled up with -1.

    Raises:
        TraceError: a line is no such object; the message names the file and the line.
    """
    name = getattr(stream, "name", "the stream")
    calls: Counter[_Place] = Counter()
    step: int | None = None
    for number, line in enumerate(_lines(stream, str(name)), 1):
        if not line.strip():
            continue
        try:
            place, top_k, ids_NK = _parse(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
        if place.step != step:
            # numbers of calls are those within a step
            calls.clear()
            step = place.step
        yield _row(place, calls[place], top_k, ids_NK)
        calls[place] += 1


def _line(place: _Place, rows: Sequence[TraceRow]) -> str:
    lists = [ids for row in rows for ids in _lists(row)]
    values = {
        "step": place.step,
        "stage": place.stage,
        "block": place.key.block,
        "layer": place.key.layer,
        "rank": place.rank,
        "num_tokens": len(lists),
        "topk": rows[0].top_k,
        "top_indices": lists,
    }
    return json.dumps(values, separators=(",", ":")) + "\n"


def _lists(row: TraceRow) -> list[list[int]]:
    ids_NK = row.expert_ids if row.valid is None else row.expert_ids[row.valid]
    lists: list[list[int]] = ids_NK.tolist()
    if not (ids_NK < 0).any():
        return lists
    return [[expert for expert in ids if expert >= 0] for ids in lists]


def _lines(stream: TextIO, name: str) -> Iterator[str]:
    for number in count(1):
        try:
            line = stream.readline(MAX_LINE_CHARACTERS + 1)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{name}, line {number} or soon after: no text: {error}") from error
        if len(line) > MAX_LINE_CHARACTERS:
            raise TraceError(f"{name}, line {number}: longer than {MAX_LINE_CHARACTERS} characters")
        if not line:
            return
        yield line


def _parse(line: str) -> tuple[_Place, int, NDArray[np.int32]]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, found {line.strip()[:60]!r}")  # noqa: TRY004  # a value of the file's
    step = _number(values, "step", least=-(2**63))
    layer = _number(values, "layer", most=_LARGEST)
    rank = _number(values, "rank", most=_LARGEST, default=0)
    stage, block = _text(values, "stage", "train"), _text(values, "block", "decoder")
    ids_NK = _ids(values.get("top_indices"), values.get("topk"))
    return _Place(step, stage, RouterKey(block, layer), rank), ids_NK.shape[1], ids_NK


def _number(
    values: Mapping[str, Any], name: str, *, least: int = 0, most: int = 2**63 - 1, default: int | None = None
) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name!r} is {value!r}; expected a whole number, {least} to {most}")
    return value


def _text(values: Mapping[str, Any], name: str, default: str) -> str:
    value = values.get(name, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name!r} is {value!r}; expected a text")
    value.encode()  # raises on half a surrogate pair, which JSON can hold and nothing else can
    return value


def _ids(lists: object, top_k: object) -> NDArray[np.int32]:
    """Return `top_indices` as `[N, K]`, with -1 where a list is shorter than K."""
    if not isinstance(lists, list) or not all(isinstance(ids, list) for ids in lists):
        raise ValueError("'top_indices' is missing, or no list of lists of expert ids")
    width = max((len(ids) for ids in lists), default=0)
    if top_k is not None:
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not width <= top_k <= _LARGEST_TOP_K:
            raise ValueError(f"'topk' is {top_k!r}; expected a whole number, {width} to {_LARGEST_TOP_K}")
        width = top_k
    elif width > _LARGEST_TOP_K:
        raise ValueError(f"a list of 'top_indices' has {width} ids; {_LARGEST_TOP_K} are allowed")
    return _as_array(_filled(lists, width), width)


def _filled(lists: list[list[Any]], width: int) -> Sequence[list[Any]]:
    if all(len(ids) == width for ids in lists):
        return lists
    return [ids + [-1] * (width - len(ids)) for ids in lists]


def _as_array(lists: Sequence[list[Any]], width: int) -> NDArray[np.int32]:
    try:
        ids_NK = np.array(lists) if lists else np.empty((0, width), np.int64)
    except ValueError:
        ids_NK = np.empty(0)
    if ids_NK.shape != (len(lists), width) or (ids_NK.size and ids_NK.dtype.kind != "i"):
        raise ValueError("'top_indices' holds something else than whole numbers")
    if ids_NK.size and (ids_NK.min() < -1 or ids_NK.max() > _LARGEST):
        raise ValueError(f"expert ids {ids_NK.min()} to {ids_NK.max()}; expected -1 to {_LARGEST}")
    return ids_NK.astype(np.int32)


def _row(place: _Place, microbatch: int, top_k: int, ids_NK: NDArray[np.int32]) -> TraceRow:
    # what is filled up stands last
    late_NK = np.where(ids_NK < 0, _LARGEST, ids_NK)
    is_sorted = bool(ids_NK.size and top_k > 1 and (late_NK[:, 1:] >= late_NK[:, :-1]).all())
    return TraceRow(
        step=place.step,
        microbatch=microbatch,
        stage=place.stage,
        key=place.key,
        rank=place.rank,
        num_tokens=len(ids_NK),
        top_k=top_k,
        is_sorted=is_sorted,
        expert_ids=ids_NK,
        valid=None,
        sequence_starts=np.zeros(min(1, len(ids_NK)), dtype=np.int32),
    )
