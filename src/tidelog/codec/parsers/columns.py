"""Parsers of what an event is known by, whatever its value: its own time, and its offset.

A tombstone has these too, so it is no dead letter here.
"""

from __future__ import annotations

import pyarrow as pa

from tidelog.codec.parsers.base import Found, Layout, Parser, Spec, TimeParser
from tidelog.codec.parsers.names import paths_of

__all__ = ["OffsetParser", "TimestampTimes", "open_offset", "open_timestamp"]

_BUCKET_MAX = 1 << 62


class TimestampTimes:
    """The event's own time."""

    def times(self, batch: pa.RecordBatch) -> Found:
        times = batch.column("timestamp").cast(pa.int64())
        found = Found(times, pa.nulls(len(times), pa.string()))
        return found.reject(times.is_null(), "event has no time")


class OffsetParser:
    """Folders of a fixed number of offsets: ``offset=30000`` holds those from 30000 on."""

    def __init__(self, bucket: int) -> None:
        self._bucket = bucket

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        offsets = batch.column("offset").to_numpy()
        encoded = pa.array(offsets // self._bucket, pa.int64()).dictionary_encode()
        names = [f"offset={each * self._bucket}" for each in encoded.dictionary.to_pylist()]
        rows = batch.num_rows
        paths = paths_of(encoded.indices, names)
        return Layout(paths, pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64()))


def open_timestamp(spec: Spec) -> TimeParser:
    """``timestamp``, which takes no argument."""
    if spec.argument:
        raise spec.refused("it takes no argument: give timestamp alone")
    return TimestampTimes()


def open_offset(spec: Spec) -> Parser:
    """``offset:10000``: ten thousand offsets to a folder."""
    problem = "no number of offsets: give one such as offset:10000"
    return OffsetParser(spec.number(spec.argument, _BUCKET_MAX, problem))


_: type[TimeParser] = TimestampTimes
__: type[Parser] = OffsetParser
