"""A sink of a restore: events that no topic accepts stay in their archive, and are counted.

An archive has such events among its dead letters (``acceptance``), and a restore reads these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from tidelog.model.pipeline import Manifest
from tidelog.sinks.acceptance import accepted
from tidelog.sinks.base import RangeWriter, TargetSink, Written

__all__ = ["RestorableSink"]


@dataclass(frozen=True)
class RestorableSink:
    """Another sink, whose writers get only what can be restored. Pickles where that one does."""

    sink: TargetSink

    @property
    def url(self) -> str:
        return self.sink.url

    @property
    def incarnation(self) -> str:
        return self.sink.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        self.sink.check(partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return _Writer(self.sink.writer(partition, staging))

    def publish(self, manifest: Manifest) -> int | None:
        return self.sink.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self.sink.discard(manifest)


@dataclass
class _Writer:
    writer: RangeWriter
    dead: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        batch, refused = accepted(batch)
        self.dead += 0 if refused is None else refused.num_rows
        if batch.num_rows:
            self.writer.write(batch)

    def close(self) -> Written:
        return replace(self.writer.close(), dead=self.dead)


_: type[TargetSink] = RestorableSink
