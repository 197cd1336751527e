"""Which routers of transformers a replay can reach, as tried on every family."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

__all__ = ["ReplayTraits", "replay_traits"]

_NO_TOP_K = "it makes its choice by no top-k"
_OBSTACLES = {
    "NllbMoeTop2Router": _NO_TOP_K,
    "PhimoeTopKRouter": _NO_TOP_K,
    "SwitchTransformersTop1Router": _NO_TOP_K,
    "ZayaRouter": "its skip expert is told by the weight, which a replayed choice does not have",
}
_HASH_ROUTERS = {"DeepseekV4HashRouter"}


class ReplayTraits(NamedTuple):
    """Fields of a `RouterSite`."""

    chooses_by_score: bool
    replay_obstacle: str | None


def replay_traits(router: nn.Module) -> ReplayTraits:
    """Return whether experts come from scores, and what is in the way of a replay."""
    classes = {base.__name__ for base in type(router).__mro__}
    obstacle = next((_OBSTACLES[name] for name in classes & _OBSTACLES.keys()), None)
    if "DeepseekV2TopkRouter" in classes and getattr(router, "topk_method", "") == "group_limited_greedy":
        obstacle = "the weights of experts outside its own groups are zero"
    return ReplayTraits(chooses_by_score=not classes & _HASH_ROUTERS, replay_obstacle=obstacle)
