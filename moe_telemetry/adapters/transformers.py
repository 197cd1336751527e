"""Find the routers of transformers models, and of models built like them, without importing transformers.

Three marks: a class known to be special, a block whose `experts` take the chosen ids beside its
router, and the class that a model records as its `router_logits`.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from moe_telemetry.adapters.transformers_reads import (
    read_dense_scores,
    read_experts_input,
    read_kept_weights,
    read_one_hot,
    read_router_output,
    read_skip_expert,
    read_sorted_choices,
)
from moe_telemetry.adapters.transformers_replay import replay_traits
from moe_telemetry.adapters.transformers_scores import score_traits
from moe_telemetry.naming import router_keys, unwrap
from moe_telemetry.routers import ReadCall, RouterSite, find_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_routers"]

_log = logging.getLogger(__name__)

# routers whose output is not (logits, weights, ids) in some order
_SPECIAL: dict[str, ReadCall] = {
    "GraniteMoeHybridTopKGating": read_sorted_choices,
    "GraniteMoeSharedTopKGating": read_sorted_choices,
    "GraniteMoeTopKGating": read_sorted_choices,
    "JetMoeTopKGating": read_sorted_choices,
    "Llama4Router": read_dense_scores,
    "NllbMoeTop2Router": read_kept_weights,
    "SwitchTransformersTop1Router": read_one_hot,
    "ZayaRouter": read_skip_expert,
}
_DROPPING: tuple[ReadCall, ...] = (read_kept_weights, read_one_hot)
# blocks that route inside their own forward, and the child that is called with the chosen ids
_INLINE = {"DogeCDMoE": "down_embed"}
_CHOICE_PARAMETER = re.compile(r"ind(ex|ices)|selected_experts|expert_ids")
# in this order: the first two count skip and identity experts too, where there are any
_EXPERT_NUMBERS = (
    "num_router_classes",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
)
_TOP_KS = ("top_k", "top_k_experts", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


@dataclass(frozen=True, kw_only=True)
class _Found:
    name: str
    module: nn.Module
    router: nn.Module
    block: nn.Module | None = None
    read: ReadCall | None = read_router_output
    """None where the choice cannot be seen from outside."""
    hook: Literal["output", "input"] = "output"


def find_routers(model: nn.Module) -> list[RouterSite]:
    """Return the routers of `model` in the order of their keys.

    Routers whose choice cannot be seen from outside are left out, with one warning that names them.
    """
    found: dict[int, _Found] = {}
    for one in (*_special_routers(model), *_dispatching_blocks(model), *_recorded_routers(model)):
        if id(one.router) not in found and not _holds_another(one, found):
            found[id(one.router)] = one
    readable = [one for one in found.values() if one.read is not None and _num_experts(one) > 0]
    _warn_unreadable([one for one in found.values() if one not in readable])
    keys = router_keys(model, [one.name for one in readable])
    sites = [
        RouterSite(
            key=key,
            name=one.name,
            module=one.module,
            num_experts=_num_experts(one),
            top_k=_top_k(one),
            read=one.read or read_router_output,
            hook=one.hook,
            negative_ids_are_dropped=one.read in _DROPPING,
            read_weight=partial(find_weight, one.router, _num_experts(one)),
            **score_traits(one.router, one.block)._asdict(),
            **replay_traits(one.router)._asdict(),
        )
        for key, one in zip(keys, readable, strict=True)
    ]
    return sorted(sites, key=lambda site: site.key.order)


def _special_routers(model: nn.Module) -> Iterator[_Found]:
    for name, module in model.named_modules():
        # subclasses count: FSDP makes one of every class that it shards
        classes = {base.__name__ for base in type(module).__mro__}
        for special in classes & _SPECIAL.keys():
            yield _Found(name=name, module=module, router=module, read=_SPECIAL[special])
        for inline in classes & _INLINE.keys():
            yield _before(name, module, _INLINE[inline], router=module)


def _dispatching_blocks(model: nn.Module) -> Iterator[_Found]:
    """Yield the router of every block whose `experts` are called as (hidden_states, ids, weights)."""
    for name, block in model.named_modules():
        children = dict(block.named_children())
        key = next((key for key in ("gate", "router") if key in children), None)
        if key is None or "experts" not in children:
            continue
        _, experts = unwrap("", children["experts"])
        if not _takes_choices(type(experts)):
            continue
        place, router = unwrap(_join(name, key), children[key])
        # The router's output is read where it can be, for the scores in it. A router that leaves the
        # choice to its block (transformers before 5.18, dbrx) returns logits alone; the experts'
        # input holds the dispatched ids then, without scores.
        bare = isinstance(router, nn.Linear) and not _int_of(router, _TOP_KS)
        if bare or hasattr(block, "route_tokens_to_experts"):
            yield _before(name, block, "experts", router=router)
        else:
            yield _Found(name=place, module=router, router=router, block=block)


def _before(name: str, block: nn.Module, child: str, *, router: nn.Module) -> _Found:
    """Return the router whose choice is the input of a child of its block."""
    place, module = unwrap(_join(name, child), block.get_submodule(child))
    return _Found(name=place, module=module, router=router, block=block, read=read_experts_input, hook="input")


def _recorded_routers(model: nn.Module) -> Iterator[_Found]:
    """Yield the modules that `OutputRecorder`s of `model` and its sub-models name as routers."""
    for prefix, part in model.named_modules():
        for target, place in _recorders(type(part)):
            for name, module in part.named_modules(prefix=prefix):
                if isinstance(module, target) and (not place or f".{place}." in f".{name}."):
                    # a module that does not know K returns logits, and the choice is made elsewhere
                    read = read_router_output if _int_of(module, _TOP_KS) else None
                    yield _Found(name=name, module=module, router=module, read=read)


def _recorders(model: type[nn.Module]) -> Iterator[tuple[type[nn.Module], str]]:
    """Yield (router class, a part of its path or an empty text) of what a model class records."""
    recorded = getattr(model, "_can_record_outputs", None)
    spec = recorded.get("router_logits") if isinstance(recorded, dict) else None
    for one in spec if isinstance(spec, (list, tuple)) else [spec]:
        target = one if isinstance(one, type) else getattr(one, "target_class", None)
        if isinstance(target, type):
            yield target, (getattr(one, "layer_name", None) or "").strip(".")


def _holds_another(one: _Found, found: dict[int, _Found]) -> bool:
    """Return whether `one` is a whole block, recorded in place of the router in it."""
    return any(id(module) in found for module in one.router.modules() if module is not one.router)


def _takes_choices(experts: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(experts.forward).parameters)
    return len(parameters) > 3 and _CHOICE_PARAMETER.search(parameters[2]) is not None


def _num_experts(one: _Found) -> int:
    """Return E of the router, never of the experts: under expert parallelism those count their own."""
    stated = _int_of(one.router, ("num_router_classes", "n_routed_experts", "num_experts"))
    weight = next((weight for weight in one.router.parameters() if weight.ndim == 2), None)
    width = 0 if weight is None else weight.shape[0]
    config = getattr(one.router, "config", None)
    return stated or width or _int_of(config, _EXPERT_NUMBERS) or _int_of(one.block, _EXPERT_NUMBERS)


def _top_k(one: _Found) -> int | None:
    if one.read is read_kept_weights:
        return 2
    if one.read is read_one_hot:
        return 1
    config = getattr(one.router, "config", None)
    return _int_of(one.router, _TOP_KS) or _int_of(one.block, _TOP_KS) or _int_of(config, _TOP_KS) or None


def _int_of(owner: Any, names: tuple[str, ...]) -> int:  # noqa: ANN401  # a module or a configuration
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _warn_unreadable(left_out: list[_Found]) -> None:
    if not left_out:
        return
    classes = ", ".join(sorted({type(one.module).__name__ for one in left_out}))
    _log.warning(
        "not watched: %d routers (%s, first at %r): the experts they choose cannot be seen from outside; "
        "pass watch(model, routers={name: RouterSpec(num_experts=..., read=...)}) or call Monitor.observe",
        len(left_out),
        classes,
        left_out[0].name,
    )
