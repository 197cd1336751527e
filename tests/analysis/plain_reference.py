"""A reference of predictability that knows nothing of batches: lists, sorting, one token at a time."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from moe_telemetry.trace.reader import open_trace


def _rank_list(values: list[int]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def _correlation(one: list[float], other: list[float]) -> float:
    means = [sum(values) / len(values) for values in (one, other)]
    products = sum((a - means[0]) * (b - means[1]) for a, b in zip(one, other, strict=True))
    return products / math.sqrt(sum((a - means[0]) ** 2 for a in one) * sum((b - means[1]) ** 2 for b in other))


def _cosine(one: list[int], other: list[int]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(
        sum(a * a for a in one) * sum(b * b for b in other)
    )


def _hottest(load: list[int], top: int) -> set[int]:
    return {
        expert for expert in sorted(range(len(load)), key=lambda expert: (-load[expert], expert))[:top] if load[expert]
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain_figures(folder: Path, num_experts: int, top_k: int, num_real: int) -> list[tuple[float, ...]]:
    """Return the figures of layers 1 and 2 of a trace of three steps with two microbatches."""
    trace = open_trace(folder)
    tensors = {name: value for path in folder.glob("tensors-*") for name, value in load_file(path).items()}
    rows = {
        (row.step, row.microbatch, row.key.layer): row.expert_ids.tolist()
        for chunk in trace.chunks()
        for row in trace.rows(chunk)
    }
    router = trace.routers[0]
    top = max(1, num_experts // 8)
    return [_reference_pair(tensors, rows, layer, num_experts, top_k, num_real, top, router) for layer in (1, 2)]


def _reference_pair(
    tensors: dict[str, Any],
    rows: dict[tuple[int, int, int], list[list[int]]],
    layer: int,
    num_experts: int,
    top_k: int,
    num_real: int,
    top: int,
    router: Any,
) -> tuple[float, ...]:
    hits = choices = 0
    loads: list[tuple[list[int], list[int]]] = []
    for step in range(3):
        predicted, actual = [0] * num_experts, [0] * num_experts
        weight = tensors[f"router_weights/{step}/0/decoder.{layer}"].astype(np.float64)
        for microbatch in range(2):
            states = tensors[f"hidden_states/{step}/{microbatch}/decoder.{layer - 1}"].astype(np.float64)
            for state, ids in list(zip(states, rows[step, microbatch, layer], strict=True))[:num_real]:
                scores = [float(state @ weight[expert]) for expert in range(num_experts)]
                if router.is_biased:
                    bias = tensors[f"expert_bias/{step}/0/decoder.{layer}"]
                    scores = [s + float(b) for s, b in zip(_score(router.score_function, scores), bias, strict=True)]
                guess = sorted(range(num_experts), key=lambda expert: -scores[expert])[:top_k]
                hits += len(set(guess) & set(ids))
                choices += top_k
                for expert in guess:
                    predicted[expert] += 1
                for expert in ids:
                    actual[expert] += 1
        loads.append((predicted, actual))
    alike = [(predicted, actual) for predicted, actual in loads]
    before = [(one[1], other[1]) for one, other in itertools.pairwise(loads)]
    figures = [hits / choices]
    for pairs in (alike, before):
        hot = [(_hottest(one, top), _hottest(other, top)) for one, other in pairs]
        figures += [
            _mean([_cosine(*pair) for pair in pairs]),
            _mean([_correlation(*map(_rank_list, pair)) for pair in pairs]),
            sum(len(a & b) for a, b in hot) / sum(max(len(a), len(b)) for a, b in hot),
        ]
    return tuple(figures)


def _score(function: str, logits: list[float]) -> list[float]:
    if function == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    if function == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]
