"""Frames: tidy figures in polars, pandas and CSV, and calls that are read when they are used."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import polars as pl
import pytest

from moe_telemetry.analysis import concentration, drift, predictability, read_trace
from moe_telemetry.testing import make_trace
from moe_telemetry.trace.reader import Trace, open_trace
from tests.analysis.trace_files import call, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return make_trace(tmp_path, num_experts=16, hidden_size=4, token_groups=(0, 1))


def test_concentration_has_a_row_an_expert(trace: str) -> None:
    result = concentration(trace)
    frame = result.to_polars()
    assert frame.columns == [
        "stage",
        "block",
        "layer",
        "expert",
        "assignments",
        "share",
        "place",
        "coverage",
        "uniform",
    ]
    assert len(frame) == 3 * 16
    layer = frame.filter(pl.col("layer") == 1).sort("place")
    assert layer["share"].sum() == pytest.approx(1)
    assert layer["coverage"].to_list() == pytest.approx(layer["share"].cum_sum().to_list())
    assert layer["coverage"].to_list() == list(result.layers[1].coverage_curve or ())
    assert layer.sort("expert")["assignments"].to_list() == list(result.layers[1].assignments)


def test_predictability_and_drift_have_a_row_a_router(trace: str) -> None:
    result = predictability(trace)
    assert result.to_polars()["recall"].to_list() == [pair.recall for pair in result.pairs]
    assert result.to_pandas()["previous_layer"].tolist() == [0, 1]
    one = concentration(trace)
    assert drift(one, one).to_pandas()["total_variation"].tolist() == [0.0, 0.0, 0.0]


def test_what_does_not_exist_is_null_in_frames_and_empty_in_csv(tmp_path: Path) -> None:
    result = concentration(
        write_trace(tmp_path, [call([[0]]), call([[1]], stage="eval", valid=[False])], num_experts=2)
    )
    evaluated = result.to_polars().filter(pl.col("stage") == "eval")
    assert evaluated["share"].null_count() == 2
    assert result.to_pandas()["share"].isna().sum() == 2
    rows = list(csv.DictReader(io.StringIO(result.columns().to_csv())))
    assert [(row["stage"], row["expert"], row["share"]) for row in rows] == [
        ("eval", "0", ""),
        ("eval", "1", ""),
        ("train", "0", "1.0"),
        ("train", "1", "0.0"),
    ]


def test_a_trace_is_a_frame_with_a_row_a_call(trace: str) -> None:
    frame = read_trace(trace)
    assert isinstance(frame, pl.LazyFrame)
    calls = frame.collect()
    assert len(calls) == 4 * 3 * 2
    first = calls.row(0, named=True)
    assert (first["step"], first["layer"], first["top_k"], len(first["expert_ids"])) == (0, 0, 2, 128)
    assert calls.to_pandas()["layer"].tolist() == calls["layer"].to_list()


def test_a_frame_reads_no_more_than_it_needs(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    batches = Trace.batches

    def listening(self: Trace, chunk: object, columns: tuple[str, ...]) -> object:
        asked.append(tuple(columns))
        return batches(self, chunk, columns)  # type: ignore[arg-type]

    frame = read_trace(trace)
    monkeypatch.setattr(Trace, "batches", listening)
    found = frame.filter(pl.col("layer") == 2).select("step").collect()
    assert found["step"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set().union(*asked) == {"step", "layer"}
    asked.clear()
    assert len(frame.head(2).collect()) == 2
    assert len(asked) == 1


def test_an_open_trace_is_taken_as_it_is(trace: str) -> None:
    opened = open_trace(trace)
    assert len(read_trace(opened).collect()) == 24
    assert concentration(opened) == concentration(trace)
