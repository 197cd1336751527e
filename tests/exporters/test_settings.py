"""Settings of exporters: a value of a wrong type is refused when the exporter is made, and no secret is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from moe_telemetry import ConfigError
from moe_telemetry_exporters.settings import check_types

EXPORTERS = [entry.load() for entry in sorted(entry_points(group="moe_telemetry.exporters"))]
SECRET = b"hunter2"  # of a type that no setting has


@pytest.mark.parametrize(
    ("exporter", "name"),
    [(exporter, item.name) for exporter in EXPORTERS for item in fields(exporter) if item.init],
)
def test_a_value_of_a_wrong_type_is_refused_by_every_setting(exporter: type, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*: expected ") as refusal:
        exporter(**{name: SECRET})
    is_secret = name in {"password", "headers", "endpoint"}
    assert (SECRET.decode() in str(refusal.value)) != is_secret


@dataclass(kw_only=True)
class Sink:
    number: int = 0
    seconds: float = 0.0
    flag: bool = False
    text: str | None = None
    path: str | os.PathLike[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@pytest.mark.parametrize(
    "setting",
    [
        {"number": 2**70},
        {"seconds": 3},
        {"seconds": 0.5},
        {"flag": True},
        {"text": ""},
        {"path": "file"},
        {"path": Path("file")},
        {"headers": {"key": "value"}},
    ],
)
def test_values_of_the_right_type_are_taken(setting: dict[str, Any]) -> None:
    check_types(Sink(**setting))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"number": True}, "number=True: expected a whole number"),
        ({"number": 1.0}, "number=1.0: expected a whole number"),
        ({"seconds": "1"}, "seconds='1': expected a number"),
        ({"flag": 1}, "flag=1: expected True or False"),
        ({"text": 1}, "text=1: expected a text, or None"),
        ({"path": 1}, "path=1: expected a path, or None"),
        ({"path": ""}, "path='': expected a path, or None"),
        ({"headers": {"key": 1}}, "headers=(not shown): expected a mapping of texts to texts"),
    ],
)
def test_other_values_are_refused_with_what_is_expected(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_types(Sink(**setting))
    assert str(refusal.value) == message
