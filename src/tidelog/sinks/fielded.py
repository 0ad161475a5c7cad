"""A sink before which events get their key, id, type and time from fields of their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidelog.codec.fields import FieldPaths, FieldTaker
from tidelog.model.limits import EVENT_BYTES_CEILING
from tidelog.model.pipeline import Manifest
from tidelog.sinks.base import RangeWriter, TargetSink, Written
from tidelog.sinks.segments import COPIES, Limit, check_records

__all__ = ["FieldedSink"]


@dataclass(frozen=True)
class FieldedSink:
    """Another sink, whose writers take fields first. Pickles where that one does."""

    sink: TargetSink
    paths: FieldPaths
    event_bytes_max: int = EVENT_BYTES_CEILING  # that fields may exceed by the room for additions
    limit: Limit = COPIES  # of events before they get their fields

    @property
    def url(self) -> str:
        return self.sink.url

    @property
    def incarnation(self) -> str:
        return self.sink.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        FieldTaker(self.paths)  # refuses paths that name nothing
        self.sink.check(partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        taker = FieldTaker(self.paths, self.event_bytes_max)
        return _FieldedWriter(self.sink.writer(partition, staging), taker, self.limit)

    def publish(self, manifest: Manifest) -> int | None:
        return self.sink.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self.sink.discard(manifest)


@dataclass(frozen=True)
class _FieldedWriter:
    writer: RangeWriter
    taker: FieldTaker
    limit: Limit

    def write(self, batch: pa.RecordBatch) -> None:
        check_records(batch, batch, self.limit)
        self.writer.write(self.taker.take(batch))

    def close(self) -> Written:
        return self.writer.close()


_: type[TargetSink] = FieldedSink
