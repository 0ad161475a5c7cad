"""A batch laid out: its rows in the order of their folders, so that each folder's are one slice.

Rows are moved once for all folders; what a folder gets costs no copy, but keeps the whole portion
in memory. So a portion counts until the last of its shares has been written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers import Layout

__all__ = ["Portion", "Share", "portion_of", "shares_of"]

_SHARE_BYTES = 400  # about what a share costs by itself, in Python's objects


class Portion:
    """Rows of one batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.offsets = batch.column("offset").to_numpy()
        self.times = batch.column("timestamp").cast(pa.int64()).to_numpy()
        self.bytes = int(batch.nbytes)
        self.left = 0  # shares that are not written yet


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a portion that belong into one folder, in the order of their offsets."""

    portion: Portion
    start: int
    end: int
    path_ms: int  # the parser's time of the last one; -1: its path was made of none

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def bytes(self) -> int:
        """About how many, as if all rows were equal."""
        return self.portion.bytes * self.rows // len(self.portion.offsets)

    @property
    def batch(self) -> pa.RecordBatch:
        return self.portion.batch.slice(self.start, self.rows)


def portion_of(batch: pa.RecordBatch) -> Share:
    """A whole batch, for one folder."""
    portion = Portion(batch)
    portion.left = 1
    return Share(portion, 0, batch.num_rows, -1)


def shares_of(batch: pa.RecordBatch, layout: Layout) -> Iterator[tuple[str, Share]]:
    """The rows of a batch that have a path, folder by folder."""
    paths, times = layout.paths, layout.times
    if layout.errors.null_count < batch.num_rows:
        good = pc.is_null(layout.errors)
        batch, paths, times = batch.filter(good), paths.filter(good), times.filter(good)
    if batch.num_rows == 0:
        return
    names = paths.dictionary.to_pylist()
    codes = paths.indices.to_numpy()
    if len(names) < np.iinfo(np.int16).max:
        codes = codes.astype(np.int16)  # which numpy sorts in one pass
    path_ms = times.fill_null(-1).to_numpy()
    if (np.diff(codes) < 0).any():
        order = np.argsort(codes, kind="stable")
        batch, codes, path_ms = batch.take(pa.array(order)), codes[order], path_ms[order]
    cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    portion = Portion(batch)
    portion.left = len(cuts) - 1
    portion.bytes += _SHARE_BYTES * portion.left
    for start, end in pairwise(cuts):
        yield names[codes[start]], Share(portion, start, end, int(path_ms[end - 1]))
