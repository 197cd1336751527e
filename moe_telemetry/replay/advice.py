"""The sentence that goes with a located cause: what is wrong, both figures, and where to look."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["advise", "advise_aligned", "advise_nothing_checked", "advise_stale", "advise_unexplained"]

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _count(number: int, noun: str) -> str:
    return f"{_NUMBERS[number] if number < len(_NUMBERS) else number} {noun}{'' if number == 1 else 's'}"


def _token_shift(offset: int) -> tuple[str, str, str]:
    verb = "lag" if offset > 0 else "lead"
    return (
        f"routes {verb} their tokens by {_count(abs(offset), 'row')} within sequences",
        f"when moved by {-offset:+d}",
        "look for a next-token label shift, or for a row dropped or doubled where turns are joined",
    )


def _layer_shift(offset: int) -> tuple[str, str, str]:
    side = "earlier" if offset > 0 else "later"
    return (
        f"every router layer replays the routes of the layer {_count(abs(offset), 'place')} {side}",
        f"when moved by {-offset:+d}",
        "look for dense layers that the payload counts and the model's routers do not, or for a pipeline offset",
    )


_TEXTS: Mapping[str, Callable[[int], tuple[str, str, str]]] = {
    "token_shift": _token_shift,
    "layer_shift": _layer_shift,
    "batch_sequence_swap": lambda _: (
        "routes were flattened with batch and sequence the other way round",
        "when transposed",
        "transpose [B, S] to the router's order before flattening",
    ),
    "context_parallel_order": lambda _: (
        "routes and tokens are cut differently for context parallelism, contiguous against zig-zag",
        "over the rows that the other cut would pair",
        "slice the routes with the same function as the tokens",
    ),
    "sequence_swap": lambda _: (
        "sequences hold the routes of other sequences",
        "when each gets the routes that fit it best",
        "look for samples that were shuffled or packed after the routes were attached",
    ),
    "expert_remap": lambda _: (
        "routes number the experts differently, by one consistent map",
        "when renamed",
        "look for physical (load-balanced) ids recorded where logical ids belong, or for a map applied twice",
    ),
    "dtype_wrap": lambda _: (
        "expert ids were cut to eight bits",
        "when compared modulo 256",
        "record ids in uint16 or wider",
    ),
}


def advise(cause: str, offset: int, agreement: float | None, restored: float) -> str:
    """Return the sentence of a cause that restores agreement."""
    what, how, where = _TEXTS[cause](offset)
    given = "no row comparable as given" if agreement is None else f"agreement {agreement:.2f} as given"
    return f"{what}: {given}, {restored:.2f} {how}; {where}"


def advise_stale(rows: int, usable: int, longest_run: int, agreement: float, elsewhere: float | None) -> str:
    """Return the sentence of rows left over from an earlier forward."""
    outside = "no row outside such runs" if elsewhere is None else f"{elsewhere:.2f} outside such runs"
    return (
        f"{rows} of {usable} rows repeat the row before where the router's own choice does not "
        f"(longest run {longest_run}): agreement {agreement:.2f} as given, {outside}; "
        "look for a capture buffer that is not cleared between chunks of a prefill"
    )


def advise_aligned(agreement: float, chance: float) -> str:
    """Return the sentence of a healthy replay."""
    return f"routes belong to their tokens: agreement {agreement:.2f}, {chance:.2f} by chance"


def advise_unexplained(agreement: float, chance: float) -> str:
    """Return the sentence of rows that no known cause explains."""
    if agreement - chance < 0.1 * (1 - chance):
        return (
            f"routes are unrelated to the router's own choice: agreement {agreement:.2f}, {chance:.2f} by chance, "
            "and no known cause restores it; look for routes of another model, checkpoint or batch"
        )
    return (
        f"routes agree in part: {agreement:.2f}, {chance:.2f} by chance, and no single known cause explains the "
        "rest; look for weights that differ between rollout and training, or for several causes at once"
    )


def advise_nothing_checked(classes: Mapping[str, int]) -> str:
    """Return the sentence of routes without one row to compare; `classes` counts rows by class."""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in classes.items() if count) or "no valid token"
    return f"no row can be compared ({counts}); look at how the engine captures routes: is it on, and does it write?"
