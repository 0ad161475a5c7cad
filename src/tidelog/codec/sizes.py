"""Splits batches by the sizes of their rows, never by an average, since one row may be very large.

The same batch is always split at the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["fitting_rows", "row_sizes", "runs", "slices"]


def row_sizes(batch: pa.RecordBatch | pa.Table) -> Any:
    """Returns the approximate size of each row; never too low for bytes and text."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        start = 0
        for chunk in chunks:
            sizes[start : start + len(chunk)] += _sizes(chunk)
            start += len(chunk)
    return sizes


def runs(sizes: Any, bytes_max: int, rows_max: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields rows ``[start, end)`` of at most ``bytes_max`` together, at least one row."""
    ends = np.cumsum(sizes, dtype=np.int64)
    start, count = 0, len(ends)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + bytes_max, side="right")), start + 1)
        if rows_max is not None:
            end = min(end, start + rows_max)
        yield start, end
        start = end


def slices(
    batch: pa.RecordBatch, bytes_max: int, rows_max: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the batch in slices of at most ``bytes_max``, except single rows; without a copy."""
    if batch.nbytes <= bytes_max and (rows_max is None or batch.num_rows <= rows_max):
        if batch.num_rows:
            yield batch
        return
    for start, end in runs(row_sizes(batch), bytes_max, rows_max):
        yield batch.slice(start, end - start)


def fitting_rows(batch: pa.RecordBatch | pa.Table, bytes_max: int) -> int:
    """Returns how many of the first rows have at most ``bytes_max`` together, at least one."""
    if batch.nbytes <= bytes_max:
        return int(batch.num_rows)
    ends = np.cumsum(row_sizes(batch), dtype=np.int64)
    return max(1, int(np.searchsorted(ends, bytes_max, side="right")))


def _sizes(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
    if pa.types.is_struct(kind):
        return sum((_sizes(array.field(index)) for index in range(kind.num_fields)), np.int64(0))
    if len(array) == 0 or not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return np.full(len(array), 8, np.int64)
    offsets = array.offsets.to_numpy()
    inside = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    ends = np.concatenate([[0], np.cumsum(_sizes(inside), dtype=np.int64)])
    return np.diff(ends[offsets - offsets[0]])
