"""Settings of an exporter, checked against the types that its fields are declared with.

@dataclass
class LogExporter:
path: str | os.PathLike[str] = "log"

def __post_init__(self) -> None:
check_types(self)       # LogExporter(path=5): "path=5: expected a path"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints

from moe_telemetry.errors import ConfigError

__all__ = ["check_types"]

_FORMS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    os.PathLike: "a path",
    Mapping: "a mapping of texts to texts",
    TextIO: "a stream to write text to",
    NoneType: "None",
}


def check_types(exporter: Any) -> None:  # noqa: ANN401  # a dataclass of any kind
    """Check that every setting has a value of its type; a path is a text that is not empty, or a `Path`.

    The value of a field that has no place in `repr` is not told.

    Raises:
        ConfigError: a value is of another type.
    """
    hints = get_type_hints(type(exporter))
    for item in fields(exporter):
        if not item.init:
            continue
        value, kinds = getattr(exporter, item.name), _kinds(hints[item.name])
        if not any(_fits(value, kind) for kind in kinds):
            shown = repr(value) if item.repr else "(not shown)"
            expected = ", or ".join(_FORMS.get(kind) or f"a {kind.__name__}" for kind in kinds)
            raise ConfigError(f"{item.name}={shown}: expected {expected}")


def _kinds(hint: Any) -> list[Any]:  # noqa: ANN401  # of a type there is no better type
    """Return the classes that a value may be of; what is told of a path is one."""
    parts = get_args(hint) if get_origin(hint) in {Union, UnionType} else [hint]
    kinds = [get_origin(part) or part for part in parts]
    return [kind for kind in kinds if kind is not str or os.PathLike not in kinds]


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401  # as above
    if kind in {int, float}:
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if kind is os.PathLike:
        return isinstance(value, os.PathLike) or (isinstance(value, str) and bool(value))
    if kind is Mapping:
        return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return hasattr(value, "write") if kind is TextIO else isinstance(value, kind)
