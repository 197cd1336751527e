"""Routes in a safetensors file: the ids as a tensor, everything else as JSON in the header."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_telemetry.errors import ConfigError, RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay.lazy import MAX_IDS

if TYPE_CHECKING:
    from moe_telemetry.replay.routes import Routes

__all__ = ["load_fields", "save_routes"]

_TENSOR = "ids"
_HEADER = "moe_telemetry_routes"
_SCHEMA = 1
_DTYPES = ("I16", "I32")


def save_routes(routes: Routes, path: Path) -> None:
    """Write a file that `load_fields` reads.

    Raises:
        RoutesError: the file cannot be written.
    """
    header = {
        "schema": _SCHEMA,
        "keys": [str(key) for key in routes.keys],
        "sequence_lengths": list(routes.sequence_lengths),
        "num_experts": routes.num_experts,
        "suspicions": list(routes.suspicions),
        "chunks": routes.chunks,
    }
    ids = routes.ids.cpu()
    narrow = ids.to(torch.int16)
    ids = narrow if torch.equal(narrow.to(torch.int32), ids) else ids
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file({_TENSOR: ids}, path, metadata={_HEADER: json.dumps(header)})
        path.chmod(mode)  # as the process makes files; safetensors makes them for the owner alone
    except (OSError, SafetensorError) as error:
        raise RoutesError(f"routes cannot be written to {path}: {error}") from error


def load_fields(path: Path) -> dict[str, Any]:
    """Return the fields of `Routes` from a file; its size is checked before anything is read.

    Raises:
        RoutesError: see `Routes.load`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            if header is None or _TENSOR not in file.keys():  # noqa: SIM118  # the handle is no mapping
                raise RoutesError(f"{path} is a safetensors file, but holds no routes")
            described = file.get_slice(_TENSOR)
            _check_tensor(described.get_dtype(), described.get_shape(), path)
            return {"ids": file.get_tensor(_TENSOR), **_parse_header(header, path)}
    except (OSError, SafetensorError) as error:
        raise RoutesError(f"{path} is no routes file: {error}") from error


def _check_tensor(dtype: str, shape: list[int], path: Path) -> None:
    if dtype not in _DTYPES or len(shape) != 3 or math.prod(shape) > MAX_IDS:
        raise RoutesError(f"{path}: ids are {dtype} {shape}; expected I16 or I32 [T, L, K], at most {MAX_IDS} ids")


def _parse_header(text: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
        schema = header["schema"]
        num_experts, lengths, suspicions = header["num_experts"], header["sequence_lengths"], header["suspicions"]
        fields = {
            "sequence_lengths": tuple(lengths),
            "keys": tuple(RouterKey.parse(key) for key in header["keys"]),
            "num_experts": num_experts,
            "suspicions": tuple(map(str, suspicions)),
            "chunks": header["chunks"],
        }
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        raise RoutesError(f"{path}: the header cannot be read: {type(error).__name__}: {error}") from error
    numbers = [*lengths, fields["chunks"], 1 if num_experts is None else num_experts]
    if schema != _SCHEMA or not all(type(number) is int for number in numbers) or fields["chunks"] not in {1, 2}:
        raise RoutesError(f"{path}: schema {schema!r} or its numbers are unknown; expected schema {_SCHEMA}")
    return fields
