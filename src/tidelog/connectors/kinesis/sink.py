"""Events into a stream of Kinesis, as a sink of pipelines: each of them at least once.

A writer stages segments in the home's store, and publishing puts their events (``kinesis_writer``).
Kinesis keeps no note of how far a range came, so a range that is published again, after a crash or
by another driver, is put again from its beginning: events of at most one range for each source
partition are there twice then. What reads the stream can tell them by the event's content, or must
bear it. Order is kept for each partition key.
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

    store: str  # URL of the home's store, where segments are staged
    incarnation: str  # of the stream
    record_bytes_max: int


def open_kinesis(address: Address, *, environ: Mapping[str, str], store: str) -> KinesisSink:
    """The sink at ``kinesis://STREAM?region=…&endpoint_url=…``. ``NotFoundError``."""
    place = parse_place(address, environ, "sink")
    info, _ = Kinesis(place).describe()
    return KinesisSink(place, KinesisSettings(store, info.incarnation, info.record_bytes_max))


class KinesisSink:
    """One stream. It is pickled without secrets, and writers need none."""

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
        """Any source partition will do: events are placed by their keys."""

    def writer(self, partition: str, staging: str) -> RangeWriter:
        store = self._open_store(self._settings.store)
        return SegmentWriter(store, staging, SegmentTarget(self.url), self._places)

    def publish(self, manifest: Manifest) -> None:
        """As the interface says, but that what is published twice is there twice.

        ``NotFoundError`` when the stream is gone, or was made anew.
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
        return (_reopened, (self.url, self._settings))

    def __repr__(self) -> str:
        return f"KinesisSink({self.url!r})"

    def _places(self, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """All go into one piece of a segment, in order; what is too large is refused here."""
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


def _reopened(url: str, settings: KinesisSettings) -> KinesisSink:
    """A sink in another process, with that one's credentials."""
    environ = os.environ  # noqa: TID251 - a worker's world comes in here
    return KinesisSink(parse_place(parse_address(url), environ, "sink"), settings)


_: type[TargetSink] = KinesisSink
