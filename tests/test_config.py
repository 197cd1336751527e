"""TelemetryConfig: a wrong setting fails when it is made, and says what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError

import pytest

from moe_telemetry import ConfigError, TelemetryConfig
from moe_telemetry.config import run_id_of_launcher


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0: expected a whole number, 1 or more"),
        ({"every_n_steps": 2.5}, r"every_n_steps=2\.5"),
        ({"every_n_steps": True}, r"every_n_steps=True"),
        ({"max_series": -1}, r"max_series=-1: expected a whole number, 0 or more"),
        ({"rank_timeout_seconds": 0}, r"rank_timeout_seconds=0: expected seconds above 0"),
        ({"rank_timeout_seconds": float("nan")}, r"rank_timeout_seconds=nan"),
        ({"run": ""}, r"run='': expected a non-empty string"),
        ({"run": 3}, r"run=3"),
        ({"per_expert": "yes"}, r"per_expert='yes': expected True or False"),
        ({"labels": {"1a": "b"}}, r"labels: '1a' is no label name"),
        ({"labels": {"__name": "b"}}, r"labels: '__name' is no label name"),
        ({"labels": {"layer": "b"}}, r"labels: 'layer' is a label of moe-telemetry itself"),
        ({"labels": {"a": 1}}, r"labels: the value of 'a' is 1; expected a string"),
        ({"token_replicas": []}, r"token_replicas=\[\]"),
    ],
)
def test_a_wrong_setting_names_the_field_the_value_and_what_is_allowed(
    settings: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TelemetryConfig(**settings)  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TelemetryConfig().run = "other"  # type: ignore[misc]


def test_an_override_replaces_one_field_and_is_checked() -> None:
    config = TelemetryConfig(run="a").with_overrides({"every_n_steps": 3})
    assert (config.run, config.every_n_steps) == ("a", 3)
    with pytest.raises(ConfigError, match="every_n_steps=-3"):
        config.with_overrides({"every_n_steps": -3})


def test_an_unknown_override_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown setting every_n_step; known settings: every_n_steps, run"):
        TelemetryConfig().with_overrides({"every_n_step": 3})


def test_the_environment_sets_fields_and_is_checked() -> None:
    environ = {
        "MOE_TELEMETRY_EVERY_N_STEPS": "5",
        "MOE_TELEMETRY_RUN": "r",
        "MOE_TELEMETRY_LABELS": "team=a, host = b=c",
        "MOE_TELEMETRY_PER_EXPERT": "yes",
    }
    assert TelemetryConfig.from_env(environ) == TelemetryConfig(
        every_n_steps=5, run="r", labels={"team": "a", "host": "b=c"}, per_expert=True
    )
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        TelemetryConfig.from_env({"MOE_TELEMETRY_EVERY_N_STEPS": "0"})


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7"),
        ({"WANDB_RUN_ID": "w", "TORCHELASTIC_RUN_ID": "t", "SLURM_JOB_ID": "7"}, "w"),
    ],
)
def test_a_run_has_the_id_that_its_launcher_gave_it(environ: Mapping[str, str], run: str | None) -> None:
    assert run_id_of_launcher(environ) == run
