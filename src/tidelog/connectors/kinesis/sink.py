"""Writes events to a Kinesis stream, at least once.

A writer stages segments in the home's store, and publishing puts their events (``writer``). Kinesis
stores no progress, so a second publish, after a crash or by another driver, puts a range again from
its beginning. Then the events of at most one range per source partition are there twice. Readers of
the stream must detect that by content or tolerate it. Order is kept for each partition key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.connectors.archive.staging import discard_files, staged_events
from tidelog.connectors.kinesis.client import Kinesis, KinesisPlace, parse_place
from tidelog.connectors.kinesis.writer import KinesisWriter, check_record_sizes
from tidelog.connectors.sink import RangeWriter, TargetSink
from tidelog.connectors.topic.segments import SegmentTarget, SegmentWriter
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model.address import Address, parse_address
from tidelog.model.pipeline import Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store

__all__ = ["KinesisSettings", "KinesisSink", "open_kinesis"]


@dataclass(frozen=True, slots=True)
class KinesisSettings:
    """How events get into Kinesis; plain values."""

    store: str  # URL of the home's store, which stages the segments
    incarnation: str  # of the stream
    record_bytes_max: int


def open_kinesis(address: Address, *, environ: Mapping[str, str], store: str) -> KinesisSink:
    """Opens the sink at ``kinesis://STREAM?region=…&endpoint_url=…``. Raises ``NotFoundError``."""
    place = parse_place(address, environ, "sink")
    info, _ = Kinesis(place).describe()
    return KinesisSink(place, KinesisSettings(store, info.incarnation, info.record_bytes_max))


class KinesisSink:
    """A Kinesis stream. Pickles without secrets; writers need none."""

    def __init__(
        self,
        place: KinesisPlace,
        settings: KinesisSettings,
        open_store: Callable[[str], Store] = open_store_here,
        kinesis: Kinesis | None = None,
    ) -> None:
        self._place = place
        self._settings = settings
        self._open_store = open_store
        self._kinesis = kinesis

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def incarnation(self) -> str:
        return self._settings.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        """Accepts any source partition: keys decide where events go."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        store = self._open_store(self._settings.store)
        return SegmentWriter(store, staging, SegmentTarget(self.url), self._places)

    def publish(self, manifest: Manifest) -> None:
        """Implements ``Sink.publish``, except that a second call stores the events twice.

        Raises ``NotFoundError`` if the stream was deleted, or deleted and created again.
        """
        if not manifest.written:
            return
        kinesis = self._kinesis or Kinesis(self._place)
        info, _ = kinesis.describe()
        if info.incarnation != self.incarnation:
            raise NotFoundError(
                f"{self._place.what}: was deleted and made again since this pipeline began: "
                "start a new pipeline into it"
            )
        writer = KinesisWriter(kinesis, self._place.stream, info.record_bytes_max)
        for batch in self._staged(manifest):
            writer.put(batch)

    def discard(self, manifest: Manifest) -> None:
        discard_files(self._open_store(self._settings.store), manifest.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.url, self._settings))

    def __repr__(self) -> str:
        return f"KinesisSink({self.url!r})"

    def _places(self, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """Places all events in one piece of a segment, in order.

        Raises for one that is too large.
        """
        check_record_sizes(batch, self._settings.record_bytes_max, self._place.stream)
        return np.zeros(batch.num_rows, np.int32)

    def _staged(self, manifest: Manifest) -> Iterator[pa.RecordBatch]:
        try:
            for batch, _ in staged_events(self._open_store(self._settings.store), manifest):
                yield batch
        except NotFoundError as exc:
            raise CorruptError(
                f"{self._place.what}: a part of source partition `{manifest.partition}`, "
                f"{manifest.start} to {manifest.end}, is gone before it was put ({exc}): another "
                "driver has put it there and goes on, or somebody deleted it"
            ) from exc


def _reopen(url: str, settings: KinesisSettings) -> KinesisSink:
    """Opens the sink in another process, with the credentials of that process."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return KinesisSink(parse_place(parse_address(url), environ, "sink"), settings)


_: type[TargetSink] = KinesisSink
