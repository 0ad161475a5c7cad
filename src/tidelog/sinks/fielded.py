"""A sink before which events get their key, id, type and time from fields of their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidelog.codec.fields import FieldPaths, FieldTaker
from tidelog.model.pipeline import Manifest
from tidelog.sinks.base import RangeWriter, TargetSink, Written

__all__ = ["FieldedSink"]


@dataclass(frozen=True)
class FieldedSink:
    """Another sink, whose writers take fields first. Pickles where that one does."""

    sink: TargetSink
    paths: FieldPaths

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
        return _FieldedWriter(self.sink.writer(partition, staging), FieldTaker(self.paths))

    def publish(self, manifest: Manifest) -> int | None:
        return self.sink.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self.sink.discard(manifest)


@dataclass(frozen=True)
class _FieldedWriter:
    writer: RangeWriter
    taker: FieldTaker

    def write(self, batch: pa.RecordBatch) -> None:
        self.writer.write(self.taker.take(batch))

    def close(self) -> Written:
        return self.writer.close()


_: type[TargetSink] = FieldedSink
