"""Find the routers of a model: by the installed adapters, and by what the user points at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from moe_telemetry.errors import ConfigError, NoRouterFoundError, RouterKeyError
from moe_telemetry.identity import RouterKey
from moe_telemetry.naming import looks_like_router, router_key
from moe_telemetry.plugins import load_adapters
from moe_telemetry.routers import RouterOutput, RouterSite, RouterSpec, read_output

__all__ = ["find_sites", "no_router_error"]

Routers = Mapping[str, RouterSpec | int]


def find_sites(models: Sequence[nn.Module], routers: Routers | None = None) -> list[RouterSite]:
    """Return the routers of all models in the order of their keys.

    Args:
        models: the model, or the chunks of a virtual pipeline.
        routers: module names or patterns (`*` as in file names) and how to read what they match; these
            win over adapters. A text like `decoder.3` that names no module declares a router that is
            fed by `Monitor.observe` alone.

    Raises:
        ConfigError: a pattern matches nothing.
        RouterKeyError: two routers have one key.
    """
    stated = [site for pattern, spec in (routers or {}).items() for site in _stated(models, pattern, _spec(spec))]
    taken = {id(site.module) for site in stated}
    found = [
        site for find in load_adapters() for model in models for site in find(model) if id(site.module) not in taken
    ]
    sites = sorted(stated + found, key=lambda site: site.key.order)
    for one, other in pairwise(sites):
        if one.key == other.key:
            raise RouterKeyError(
                f"routers {one.name!r} and {other.name!r} both are {one.key}; tell them apart by "
                f"routers={{{other.name!r}: RouterSpec(num_experts={other.num_experts}, key=RouterKey(...))}}"
            )
    return sites


def no_router_error(models: Sequence[nn.Module]) -> NoRouterFoundError:
    """Return the error of a model without routers, naming what looks like one."""
    similar = {
        re.sub(r"\b\d+\b", "*", name): type(module).__name__
        for model in models
        for name, module in model.named_modules()
        if looks_like_router(name, module)
    }
    found = "; ".join(f"{cls} at {pattern!r}" for pattern, cls in list(similar.items())[:5])
    return NoRouterFoundError(
        f"no router found in {', '.join(type(model).__name__ for model in models)}; "
        f"{f'these look like routers: {found}' if found else 'no module looks like a router'}. "
        f"Point at them: "
        f"watch(model, routers={{{next(iter(similar), 'layers.*.gate')!r}: RouterSpec(num_experts=...)}})"
    )


def _spec(spec: RouterSpec | int) -> RouterSpec:
    return RouterSpec(num_experts=spec) if isinstance(spec, int) else spec


def _stated(models: Sequence[nn.Module], pattern: str, spec: RouterSpec) -> list[RouterSite]:
    read = spec.read or partial(_read_by_shape, num_experts=spec.num_experts, top_k=spec.top_k)
    # chunks of a virtual pipeline may have equal names: the chunk's number, as in "1.layers.0.gate", tells them apart
    named = [
        (f"{chunk}.{name}" if len(models) > 1 else name, name, module, model)
        for chunk, model in enumerate(models)
        for name, module in model.named_modules()
    ]
    matches: list[tuple[str, nn.Module | None, RouterKey]] = [
        (full_name, module, router_key(model, name))
        for full_name, name, module, model in named
        if any(text == pattern or fnmatchcase(text, pattern) for text in (full_name, name))
    ]
    if not matches:
        matches = [(pattern, None, _key_of_text(pattern))]
    if spec.key is not None and len(matches) > 1:
        raise ConfigError(f"routers: {pattern!r} matches {len(matches)} modules, so its key cannot be {spec.key}")
    return [
        RouterSite(
            key=spec.key or key,
            name=name,
            module=module,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            read=read,
            hook=spec.hook,
            score_kind=spec.score_kind,
            score_function=spec.score_function,
            is_biased=spec.is_biased,
            read_bias=None if spec.read_bias is None or module is None else partial(spec.read_bias, module),
        )
        for name, module, key in matches
    ]


def _key_of_text(pattern: str) -> RouterKey:
    try:
        return RouterKey.parse(pattern)
    except ConfigError as error:
        raise ConfigError(
            f"routers: {pattern!r} matches no module of the model, and is no key such as 'decoder.3'"
        ) from error


def _read_by_shape(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object, *, num_experts: int, top_k: int | None
) -> RouterOutput:
    """Pick the chosen experts out of a call by shape and dtype."""
    seen = output if output is not None else (*args, *kwargs.values())
    return read_output(seen, num_experts, top_k)
