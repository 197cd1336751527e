"""Frames: figures as polars or pandas frames and as CSV, and a trace's calls as a frame that is read when used."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_telemetry.analysis.opening import nothing_left, open_source
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.trace.reader import Trace

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

__all__ = ["Columns", "FrameSource", "read_trace"]


class Columns(NamedTuple):
    """A long table: one observation a row."""

    names: tuple[str, ...]
    rows: list[tuple[object, ...]]

    def to_polars(self) -> pl.DataFrame:
        """Return a polars frame; None is null."""
        import polars as pl  # noqa: PLC0415  # as pandas: only where asked for

        return pl.DataFrame(self.rows, schema=list(self.names), orient="row", infer_schema_length=None)

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas frame; None is NaN in columns of numbers."""
        import pandas as pd  # noqa: PLC0415

        return pd.DataFrame(self.rows, columns=list(self.names))

    def to_csv(self) -> str:
        """Return the table as CSV with a header; None is an empty field."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.names)
        writer.writerows(self.rows)
        return text.getvalue()


class FrameSource:
    """A result with a long table of its figures."""

    def columns(self) -> Columns:
        """Return the table."""
        raise NotImplementedError

    def to_polars(self) -> pl.DataFrame:
        """Return the figures as a long polars frame."""
        return self.columns().to_polars()

    def to_pandas(self) -> pd.DataFrame:
        """Return the figures as a long pandas frame."""
        return self.columns().to_pandas()


def read_trace(trace: str | os.PathLike[str] | Trace, *, num_experts: int | None = None) -> pl.LazyFrame:
    """Return a frame with a row a router call, read from the files when it is collected.

    Columns are those of the trace (`moe_telemetry.trace.format`); only those that are used are read. Ranks that
    hold the same tokens appear once. For pandas: `read_trace(path).collect().to_pandas()`.

    Raises:
        TraceError: the trace cannot be read.
    """
    import polars as pl  # noqa: PLC0415  # only where asked for
    from polars.io.plugins import register_io_source  # noqa: PLC0415

    source = open_source(trace, num_experts=num_experts)
    first = next((batch for chunk in source.chunks() for batch in source.batches(chunk)), None)
    if first is None:
        raise nothing_left(source, Selection())
    schema: Any = pl.from_arrow(first.slice(0, 0)).schema

    def batches(
        columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, _size: int | None
    ) -> Iterator[pl.DataFrame]:
        left = num_rows
        for chunk in source.chunks():
            for batch in source.batches(chunk, columns or schema.names()):
                frame: Any = pl.from_arrow(batch)
                frame = frame.head(left) if left is not None else frame
                left = None if left is None else left - len(frame)
                yield frame if predicate is None else frame.filter(predicate)
                if left == 0:
                    return

    return register_io_source(batches, schema=schema)
