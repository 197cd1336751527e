"""Names in a module tree: which router a module path is, and which modules look like routers.

`model.layers.3.mlp.gate` is `decoder.3`, `encoder.block.1.layer.1.mlp.router` is `encoder.1`,
`mtp.layers.0.mlp.gate` is `mtp0.0`. The path alone decides, so that every rank of a job finds the
same key; only routers that would share a key are told apart by the rest of their paths.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moe_telemetry.identity import RouterKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

__all__ = ["looks_like_router", "router_key", "router_keys", "unwrap"]

# what compile, activation checkpointing, FSDP and DDP put around a module
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
_STACKS = {"layers", "layer", "h", "blocks", "block", "encoder_layers", "decoder_layers"}
_MTP = re.compile(r"(?:mtp|nextn|multi_token)\D*(\d*)", re.IGNORECASE)
# sub-models that are never the text decoder, however few routers they are found with
_SUBMODEL = re.compile(r"vision|visual|image|audio|speech|talker|attention|attn", re.IGNORECASE)
# parts that tell nothing about a router
_COMMON = {
    *("model", "transformer", "language_model", "text_model", "llm", "base_model", "backbone"),
    *("encoder", "decoder", "thinker", "mlp", "ffn", "feed_forward", "moe", "block_sparse_moe", "mixer"),
    *("experts", "gate", "router"),
}
_ROUTER_CLASS = re.compile(r"Router|Gat(?:e(?!d)|ing)|Top_?[Kk]")


def router_key(model: nn.Module, name: str) -> RouterKey:
    """Return the identity of the router at the module path `name` of `model`.

    The layer is the path's number, or the layer module's own `layer_idx` where it has one: a pipeline
    stage may have renumbered its layers. A path without a number is layer 0.
    """
    parts = _parts(name)
    for place, part in enumerate(parts):
        mtp = _MTP.match(part)
        if mtp:
            return _mtp_key(mtp[1], parts[place + 1 :])
    spot = _layer_spot(parts)
    layer = 0 if spot is None else _own_index(model, name, spot, int(parts[spot]))
    return RouterKey(_block(parts[:-1]), layer)


def router_keys(model: nn.Module, names: Sequence[str]) -> list[RouterKey]:
    """Return the identity of each of `names`, told apart by their paths where two would be the same.

    `a.layers.0.gate` and `b.layers.0.gate` are blocks `a` and `b`; each alone is `decoder`.
    """
    keys = [router_key(model, name) for name in names]
    shared = {key.block for key in keys if keys.count(key) > 1}
    return [
        key._replace(block=_path_block(name) or key.block) if key.block in shared else key
        for name, key in zip(names, keys, strict=True)
    ]


def looks_like_router(name: str, module: nn.Module) -> bool:
    """Return whether the module at path `name` is named like a router and has a weight [E, H] with E < H."""
    named = name.rpartition(".")[2] in {"gate", "router"} or _ROUTER_CLASS.search(type(module).__name__)
    own = [module, *module.children()]
    weights = (weight for part in own for weight in part.parameters(recurse=False) if weight.ndim == 2)
    return bool(named) and any(1 < weight.shape[0] < weight.shape[1] for weight in weights)


def unwrap(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return (path, module) of what the wrappers around `module` wrap; the same without wrappers."""
    for child_name, child in module.named_children():
        if child_name in _WRAPPERS:
            return unwrap(f"{name}.{child_name}".lstrip("."), child)
    return name, module


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _layer_spot(parts: Sequence[str]) -> int | None:
    """Return where the layer's number is: the first after a stack's usual name, or the first at all."""
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    usual = [place for place in numbers if place and parts[place - 1] in _STACKS]
    return next(iter(usual or numbers), None)


def _mtp_key(depth: str, rest: Sequence[str]) -> RouterKey:
    """Return the key in a multi-token-prediction head: its first number is the depth, the next the layer."""
    numbers = [int(part) for part in rest if part.isdigit()]
    depth_number = int(depth) if depth else next(iter(numbers), 0)
    inner = numbers if depth else numbers[1:]
    return RouterKey(f"mtp{depth_number}", next(iter(inner), 0))


def _block(parts: Sequence[str]) -> str:
    submodel = next((part for part in parts if _SUBMODEL.search(part)), None)
    return submodel or ("encoder" if "encoder" in parts else "decoder")


def _path_block(name: str) -> str:
    """Return the parts of a path that tell its router from others: `stages.1.blocks.0.gate` is `stages1`."""
    parts = _parts(name)[:-1]
    spot = _layer_spot(parts)
    told = "_".join(
        part
        for place, part in enumerate(parts)
        if place != spot and part not in _COMMON and not (place + 1 == spot and part in _STACKS)
    )
    return re.sub(r"_(?=\d+(?:_|$))", "", told)


def _own_index(model: nn.Module, name: str, spot: int, number: int) -> int:
    """Return the `layer_idx` that the layer or, with one voice, its children state; else `number`."""
    for layer in _layer_modules(model, name, spot):
        indices = {
            index
            for module in [layer, *layer.children()]
            if isinstance(index := getattr(module, "layer_idx", None), int) and not isinstance(index, bool)
        }
        own = getattr(layer, "layer_idx", None)
        if isinstance(own, int):
            return own
        if len(indices) == 1:
            return indices.pop()
    return number


def _layer_modules(model: nn.Module, name: str, spot: int) -> Iterator[nn.Module]:
    """Yield the layer's module, and what its wrappers wrap."""
    module, place = model, -1
    for part in name.split("."):
        module = module.get_submodule(part)
        place += part not in _WRAPPERS
        if place > spot:
            return
        if place == spot:
            yield module
