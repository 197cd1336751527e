"""Settings from environment variables: by the type of the field, or an error that shows the form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from moe_telemetry import ConfigError
from moe_telemetry.environment import fields_from_env


@dataclass
class Settings:
    kind: ClassVar[str] = "any"
    name: str = ""
    port: int = 1
    limit: int | None = None
    seconds: float = 1.0
    on: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    group: Any = None
    state: int = field(init=False, default=0)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("NAME", "a b", "a b"),
        ("NAME", "", ""),
        ("PORT", " 9464 ", 9464),
        ("LIMIT", "7", 7),
        ("SECONDS", "2.5", 2.5),
        ("SECONDS", "2", 2.0),
        ("ON", "True", True),
        ("ON", "off", False),
        ("LABELS", "a=b,c=d", {"a": "b", "c": "d"}),
        ("LABELS", "", {}),
    ],
)
def test_text_becomes_a_value_of_the_fields_type(variable: str, text: str, value: object) -> None:
    found = fields_from_env(Settings, "P_", {f"P_{variable}": text})
    assert found == {variable.lower(): value}
    assert type(found[variable.lower()]) is type(value)


@pytest.mark.parametrize(
    ("variable", "text", "form"),
    [
        ("PORT", "high", "a whole number"),
        ("LIMIT", "7.5", "a whole number"),
        ("SECONDS", "soon", "a number"),
        ("ON", "perhaps", "true or false"),
        ("LABELS", "a:b", "key=value,key=value"),
    ],
)
def test_a_wrong_text_is_an_error_that_names_the_variable_and_the_form(variable: str, text: str, form: str) -> None:
    with pytest.raises(ConfigError, match=f"P_{variable}='{text}': expected {form}"):
        fields_from_env(Settings, "P_", {f"P_{variable}": text})


def test_a_setting_that_takes_an_object_cannot_be_given_as_text() -> None:
    with pytest.raises(ConfigError, match="P_GROUP='world': this setting takes an object"):
        fields_from_env(Settings, "P_", {"P_GROUP": "world"})


def test_state_class_attributes_and_other_variables_are_left_alone() -> None:
    assert fields_from_env(Settings, "P_", {"P_STATE": "3", "P_KIND": "x", "P_OTHER": "y", "NAME": "z"}) == {}


def test_a_class_without_fields_has_nothing_to_set() -> None:
    class Plain:
        def __init__(self) -> None:
            self.name = ""

    assert fields_from_env(Plain, "P_", {"P_NAME": "a"}) == {}
