"""Read the fields of a dataclass from environment variables."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from moe_telemetry.errors import ConfigError

__all__ = ["fields_from_env", "misspelt_variables", "variables_of"]

_SECRETS = ("HEADERS", "PASSWORD", "TOKEN")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def fields_from_env(cls: type, prefix: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fields of the dataclass `cls` that the environment sets.

    The field `port` is read from `<prefix>PORT`. Fields of type str, int, float and bool (and of
    these or None) can be set, and `Mapping[str, str]` as `key=value,key=value`.

    A class that is no dataclass has no fields to set.

    Raises:
        ConfigError: a variable's text is no value of its field's type, or no text can be one.
    """
    if not is_dataclass(cls):
        return {}
    variables = os.environ if environ is None else environ  # no default value: help() would print it
    hints = get_type_hints(cls)
    values = {}
    for item in fields(cls):
        variable = prefix + item.name.upper()
        if (text := variables.get(variable)) is not None and item.init:
            values[item.name] = _parse(text, hints[item.name], variable)
    return values


def variables_of(cls: type, prefix: str) -> set[str]:
    """Return the variables that `fields_from_env` reads for `cls`."""
    return {prefix + item.name.upper() for item in fields(cls) if item.init} if is_dataclass(cls) else set()


def misspelt_variables(
    prefix: str, known: Collection[str], environ: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Return the variables that begin with `prefix` and that nobody reads, each with the known one it resembles."""
    endings = [name.removeprefix(prefix) for name in known]
    similar = {
        name: get_close_matches(name.removeprefix(prefix), endings, n=1)
        for name in sorted(os.environ if environ is None else environ)
        if name.startswith(prefix) and name not in known
    }
    return {name: prefix + found[0] if found else None for name, found in similar.items()}


def _parse(text: str, hint: object, variable: str) -> object:
    kinds = {hint, *getattr(hint, "__args__", ())}
    try:
        if bool in kinds:
            return _WORDS[text.strip().lower()]
        if int in kinds:
            return int(text)
        if float in kinds:
            return float(text)
        if getattr(hint, "__origin__", None) is not None and str(hint).startswith("collections.abc.Mapping"):
            return dict(_pair(item) for item in text.split(",") if item)
    except (KeyError, ValueError):
        # the cause is not told: it quotes the text, which may be a secret
        raise ConfigError(f"{variable}={_shown(variable, text)}: expected {_form(kinds)}") from None
    if str not in kinds:
        raise ConfigError(f"{variable}={text!r}: this setting takes an object, so only a program can give it")
    return text


def _shown(variable: str, text: str) -> str:
    return "(not shown)" if variable.endswith(_SECRETS) else repr(text)


def _pair(item: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator:
        raise ValueError(item)
    return key.strip(), value.strip()


def _form(kinds: set[object]) -> str:
    if bool in kinds:
        return "true or false"
    if int in kinds:
        return "a whole number"
    return "a number" if float in kinds else "key=value,key=value"
