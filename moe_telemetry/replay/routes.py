"""Expert routes of whole sequences: who chose which experts for which token.

    routes = Routes.concat([Routes.from_vllm(output, keys=keys, num_tokens=n) for output, n in samples])
    routes.save("rollout.safetensors")

Letters: T tokens of all sequences, L router layers, K experts a token, E experts, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import layouts, lazy, turns
from moe_telemetry.replay.lazy import MAX_IDS
from moe_telemetry.replay.order import Layout

if TYPE_CHECKING:
    from moe_telemetry.replay.engines import ExpertMap
    from moe_telemetry.replay.payloads import IdArray, Payload

__all__ = ["Routes"]

_MAX_ID = 2**16 - 1


@dataclass(frozen=True, eq=False)
class Routes:
    """Expert ids by token and router, sequence after sequence; a value: nothing changes it.

    Raises:
        RoutesError: shapes, lengths, keys or ids do not fit one another; the message gives both.
    """

    ids: Tensor
    """int32 `[T, L, K]`: expert ids, 65,535 at most; -1 where there is no route. Not to be written to."""
    sequence_lengths: tuple[int, ...]
    """Tokens of each sequence; they add up to T."""
    keys: tuple[RouterKey, ...]
    """The router of each layer."""
    num_experts: int | None = None
    """E, where it is known."""
    suspicions: tuple[str, ...] = ()
    """What looks wrong with the payload and yet may be right, a sentence each."""
    chunks: int = 1
    """Contiguous pieces of each sequence: 2 in a zig-zag slice, where the second does not follow the first."""

    def __post_init__(self) -> None:
        """Check the fields, and keep a copy of the ids."""
        ids = self.ids
        if ids.ndim != 3 or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise RoutesError(f"ids have shape {tuple(ids.shape)}, {ids.dtype}; expected integers [T, L, K]")
        object.__setattr__(self, "sequence_lengths", tuple(self.sequence_lengths))
        object.__setattr__(self, "keys", tuple(self.keys))
        self._check_sizes()
        # uint16 has no minimum or maximum in torch, and wider unsigned ids are checked as int64
        wide = ids.detach().to(torch.int64 if ids.dtype in {torch.uint32, torch.uint64, torch.int64} else torch.int32)
        least, most = (int(wide.min()), int(wide.max())) if wide.numel() else (0, 0)
        if most > _MAX_ID or least < -_MAX_ID - 1:
            raise RoutesError(f"id {most if most > _MAX_ID else least} is no expert: ids go from -1 to {_MAX_ID}")
        object.__setattr__(self, "ids", wide.to(torch.int32, copy=True).contiguous())

    def _check_sizes(self) -> None:
        num_tokens, num_layers, top_k = self.ids.shape
        if self.ids.numel() > MAX_IDS or num_layers < 1 or top_k < 1:
            raise RoutesError(f"ids have shape {tuple(self.ids.shape)}; expected 1 to {MAX_IDS} ids [T, L, K]")
        if any(length < 1 for length in self.sequence_lengths) or sum(self.sequence_lengths) != num_tokens:
            raise RoutesError(
                f"sequence_lengths add up to {sum(self.sequence_lengths)}, the ids have {num_tokens} tokens; "
                "expected lengths of 1 or more that add up to it"
            )
        if len(self.keys) != num_layers or len(set(self.keys)) != num_layers:
            raise RoutesError(f"{len(set(self.keys))} router keys for {num_layers} layers; expected one each")
        if self.num_experts is not None and not top_k <= self.num_experts <= _MAX_ID + 1:
            raise RoutesError(f"num_experts={self.num_experts}; expected K={top_k} to {_MAX_ID + 1}")

    @classmethod
    def from_numpy(
        cls,
        ids: IdArray,
        *,
        sequence_lengths: Sequence[int] | None = None,
        keys: Sequence[RouterKey] | None = None,
        num_layers: int | None = None,
        num_experts: int | None = None,
    ) -> Routes:
        """Take ids `[T, A, K]` of any integer dtype, sequence after sequence.

        `keys` are the routers of the model. A is all layers of the model, dense ones included (then
        each router takes the layer of its key), or the routers alone (then in the keys' order).
        `num_layers` is how many layers the model has; without it, the last router is in the last layer.

        Raises:
            RoutesError: see the class; or A is neither all layers nor the routers.
        """
        found = lazy.engines().read_array(ids, keys=keys, num_layers=num_layers, num_experts=num_experts)
        lengths = (len(found.ids),) if sequence_lengths is None else tuple(sequence_lengths)
        return cls(found.ids, lengths, found.keys, num_experts, found.suspicions)

    @classmethod
    def from_vllm(
        cls,
        payload: Payload,
        *,
        prompt: Payload | None = None,
        start: int = 0,
        num_tokens: int | None = None,
        keys: Sequence[RouterKey] | None = None,
        num_layers: int | None = None,
        num_experts: int | None = None,
        physical_to_logical: ExpertMap | None = None,
    ) -> Routes:
        """Read what vLLM returns as `routed_experts` of one sequence.

        `payload` is the array of the offline API, or the base64 `.npy` of the server; `prompt` the same
        of the prompt, where the engine sends it apart. `start` is the first token that has a row
        (`routed_experts_prompt_start`, or where a delta starts): tokens before it are missing. With
        `num_tokens`, prompt and completion together, the row count is checked, and the last token,
        which no engine forwards, becomes a missing row where the payload leaves it out.
        `physical_to_logical` translates ids of a load-balanced engine, `[P]` or `[A, P]`. The layer
        axis is read as in `from_numpy`.

        Raises:
            RoutesError: the payload cannot be decoded, or does not fit the numbers given.
        """
        engines = lazy.engines()
        arrays = [engines.decode(part) for part in (prompt, payload) if part is not None]
        found = engines.read_arrays(
            arrays,
            keys=keys,
            num_layers=num_layers,
            num_experts=num_experts,
            physical_to_logical=physical_to_logical,
        )
        ids = engines.place_rows(found.ids, start=start, num_tokens=num_tokens)
        return cls(ids, (len(ids),), found.keys, num_experts, found.suspicions)

    @classmethod
    def from_sglang(
        cls,
        payload: Payload,
        *,
        top_k: int,
        keys: Sequence[RouterKey],
        dtype: str = "int32",
        start: int = 0,
        num_tokens: int | None = None,
        num_layers: int | None = None,
        num_experts: int | None = None,
        physical_to_logical: ExpertMap | None = None,
    ) -> Routes:
        """Read what SGLang returns as `routed_experts` of one sequence.

        `payload` is base64 (or bytes) of integers without a shape, a response's `meta_info` that
        holds it, or an array. Its layers are all of the model or the routers alone, whichever fits
        its length (with `num_tokens`, exactly). `start` is `routed_experts_start_len`. The rest is
        as in `from_vllm`.

        Raises:
            RoutesError: the payload cannot be decoded, or does not fit the numbers given.
        """
        engines = lazy.engines()
        array = engines.decode_shapeless(
            payload, dtype=dtype, top_k=top_k, keys=keys, num_layers=num_layers, start=start, num_tokens=num_tokens
        )
        found = engines.read_array(
            array,
            keys=keys,
            num_layers=num_layers,
            num_experts=num_experts,
            physical_to_logical=physical_to_logical,
        )
        ids = engines.place_rows(found.ids, start=start, num_tokens=num_tokens)
        return cls(ids, (len(ids),), found.keys, num_experts, found.suspicions)

    @classmethod
    def join(cls, turns_of_one: Sequence[Routes | None], *, starts: Sequence[int] | None = None) -> Routes:
        """Join the turns of one sequence; `starts` says at which token each turn begins.

        Where turns overlap, the later one holds; tokens of no turn are missing. Without `starts` the
        turns follow one another up to the first one that is None (aborted, without routes): what
        comes after it has no known place.

        Raises:
            RoutesError: turns differ in routers or K, or none is left.
        """
        ids, first = turns.join_turns(turns_of_one, starts)
        suspicions = tuple(dict.fromkeys(text for turn in turns_of_one if turn for text in turn.suspicions))
        return cls(ids, (len(ids),), first.keys, first.num_experts, suspicions)

    @classmethod
    def concat(cls, samples: Sequence[Routes]) -> Routes:
        """Put the sequences of several routes one after another.

        Raises:
            RoutesError: they differ in routers, K or E.
        """
        first = turns.check_alike(samples)
        lengths = [length for sample in samples for length in sample.sequence_lengths]
        suspicions = tuple(dict.fromkeys(text for sample in samples for text in sample.suspicions))
        ids = torch.cat([sample.ids for sample in samples])
        return cls(ids, tuple(lengths), first.keys, first.num_experts, suspicions, first.chunks)

    def save(self, path: str | Path) -> None:
        """Write the routes to a safetensors file.

        Raises:
            RoutesError: the file cannot be written, or safetensors is not installed.
        """
        lazy.storage().save_routes(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Routes:
        """Read routes that `save` wrote.

        Raises:
            RoutesError: the file is missing, no routes file, damaged, or beyond the bounds.
        """
        return cls(**lazy.storage().load_fields(Path(path)))

    def to_layout(
        self,
        layout: Layout,
        *,
        length: int | None = None,
        multiple_of: int = 1,
        num_rows: int | None = None,
        padding_side: Literal["left", "right"] = "right",
    ) -> Tensor:
        """Return int32 ids in the order of a router's rows, padding as -1.

        `bsh` is `[B, S, L, K]`, `sbh` is `[S, B, L, K]`: each sequence padded to `length` (default: the
        longest) rounded up to `multiple_of`. `packed` is `[T, L, K]`, padded at the end likewise.
        `num_rows` is how many rows the router has in all; a difference is an error.

        Raises:
            RoutesError: the layout is unknown, a sequence is longer than `length`, or `num_rows` differs.
        """
        return layouts.lay_out(
            self.ids,
            self.sequence_lengths,
            layout,
            length=length,
            multiple_of=multiple_of,
            num_rows=num_rows,
            padding_side=padding_side,
        )

    def for_rank(self, rank: int, size: int, *, order: Literal["contiguous", "zigzag"] = "contiguous") -> Routes:
        """Return what context-parallel rank `rank` of `size` holds of each sequence.

        Sequences are padded with missing rows to a multiple of `size` (zig-zag: 2 * `size`, of which
        a rank holds piece `rank` and piece 2 * `size` - 1 - `rank`).

        Raises:
            RoutesError: the rank, the size or the order is none.
        """
        ids, lengths = layouts.slice_for_rank(self.ids, self.sequence_lengths, rank, size, order)
        return replace(self, ids=ids, sequence_lengths=lengths, chunks=2 if order == "zigzag" else 1)

    def sequence_starts(self) -> Tensor:
        """Return int64: the rows in packed order that follow no row of their sequence."""
        pieces = [length // self.chunks for length in self.sequence_lengths for _ in range(self.chunks)]
        return torch.tensor([0, *pieces[:-1]]).cumsum(0)

    def layer(self, key: RouterKey) -> Tensor:
        """Return int32 `[T, K]`, the routes of one router.

        Raises:
            RoutesError: these routes have no such router.
        """
        if key not in self.keys:
            raise RoutesError(f"no routes of router {key}; there are {', '.join(map(str, self.keys))}")
        return self.ids[:, self.keys.index(key)]
