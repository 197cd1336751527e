"""TelemetryConfig: every setting of a monitor, checked once, when it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from moe_telemetry.environment import fields_from_env
from moe_telemetry.errors import ConfigError
from moe_telemetry.expert_parallel import ExpertPlacement

__all__ = ["TelemetryConfig", "run_id_of_launcher"]

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = frozenset(
    {"run", "stage", "block", "layer", "expert", "exporter", "outcome", "version", "cause", "offset", "le", "experts"}
)
_RUN_VARIABLES = ("WANDB_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Settings of a monitor.

    Every field can also be set by an environment variable, `MOE_TELEMETRY_<FIELD>`, which
    `from_env` reads. Raises `ConfigError` naming the field, the value and what is allowed.
    """

    every_n_steps: int = 10
    """Calls of `step()` between two reductions."""

    run: str | None = None
    """Id of the run. None takes the launcher's (W&B, torchrun, Slurm) or makes one, the same on all ranks."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Constant labels of every exported series."""

    per_expert: bool = False
    """Export one series an expert, `moe_expert_assignments_total`."""

    max_series: int = 50_000
    """Series of one export beyond which per-expert series are cut and counted; the others always go out."""

    scores: bool = True
    """Keep statistics of the routers' scores (entropy, margin, z, ...) and the load of single microbatches.
    They are taken in steps whose end reduces, one in `every_n_steps`, and there in every microbatch."""

    per_sequence: bool = False
    """Keep a summary of each sequence of the last microbatch, for `Monitor.router_diagnostics()`."""

    expert_parallel_ranks: int | None = None
    """Ranks that the experts of a layer are spread over; None exports no load of expert-parallel ranks."""

    expert_placement: tuple[int, ...] | None = None
    """The expert in each slot, slots numbered rank by rank in equal blocks (a physical-to-logical map), of
    every layer; None places experts in order, a block a rank."""

    process_group: Any = None
    """The `torch.distributed` group to reduce over; None is the world."""

    token_replicas: Any = None
    """The ranks that see the same tokens as this one (a process group, or global rank numbers, this
    rank among them), as under tensor parallelism with replicated routers: they are counted once."""

    replay_warn_zero_overlap: float = 0.01
    """Share of replayed tokens without a common expert above which a replay is reported as misaligned."""

    replay_warn_agreement: float = 0.9
    """Agreement of replayed tokens with the router's own choice below which a replay is reported as misaligned."""

    replay_min_checked: int = 100
    """Checked tokens of a layer and window below which its replay is not judged."""

    rank_timeout_seconds: float = 60.0
    """How long a reduction waits for the last rank before it is given up."""

    def __post_init__(self) -> None:
        """Check every field."""
        _check_at_least("every_n_steps", self.every_n_steps, 1)
        _check_at_least("max_series", self.max_series, 0)
        if not isinstance(self.rank_timeout_seconds, (int, float)) or not self.rank_timeout_seconds > 0:
            raise ConfigError(f"rank_timeout_seconds={self.rank_timeout_seconds!r}: expected seconds above 0")
        for name in ("replay_warn_zero_overlap", "replay_warn_agreement"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r}: expected a ratio, 0 to 1")
        _check_at_least("replay_min_checked", self.replay_min_checked, 1)
        if self.run is not None and (not isinstance(self.run, str) or not self.run):
            raise ConfigError(f"run={self.run!r}: expected a non-empty string, or None to choose one")
        for name in ("per_expert", "scores", "per_sequence"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False")
        self._check_placement()
        _check_labels(self.labels)
        if isinstance(self.token_replicas, Sequence) and not self.token_replicas:
            raise ConfigError("token_replicas=[]: expected at least this rank's own number, or None")

    def _check_placement(self) -> None:
        if self.expert_parallel_ranks is not None:
            _check_at_least("expert_parallel_ranks", self.expert_parallel_ranks, 1)
        if self.expert_placement is not None:
            if self.expert_parallel_ranks is None:
                raise ConfigError("expert_placement needs expert_parallel_ranks: set the number of ranks too")
            if not isinstance(self.expert_placement, tuple):
                raise ConfigError(f"expert_placement={self.expert_placement!r}: expected a tuple of expert numbers")
            ExpertPlacement.of_slots(self.expert_placement, self.expert_parallel_ranks)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TelemetryConfig:
        """Return the settings that `MOE_TELEMETRY_*` variables make, defaults elsewhere."""
        return cls(**fields_from_env(cls, "MOE_TELEMETRY_", environ))

    def with_overrides(self, overrides: Mapping[str, Any]) -> TelemetryConfig:
        """Return a copy with some fields replaced.

        Raises:
            ConfigError: a name is no field, or a value is not allowed.
        """
        known = [item.name for item in fields(self)]
        if unknown := sorted(set(overrides) - set(known)):
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known settings: {', '.join(known)}")
        return replace(self, **overrides)


def run_id_of_launcher(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the id under which W&B, torchrun or Slurm knows this run, if one of them started it."""
    variables = os.environ if environ is None else environ
    for variable in _RUN_VARIABLES:
        # torchrun without a rendezvous id writes the word "none"
        if (value := variables.get(variable)) and value != "none":
            return value
    return None


def _check_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: expected a whole number, {least} or more")


def _check_labels(labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name.startswith("__"):
            raise ConfigError(f"labels: {name!r} is no label name; letters, digits and _ are allowed")
        if name in _RESERVED_LABELS:
            raise ConfigError(f"labels: {name!r} is a label of moe-telemetry itself; choose another name")
        if not isinstance(value, str):
            raise ConfigError(f"labels: the value of {name!r} is {value!r}; expected a string")
