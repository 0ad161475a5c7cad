"""Writes events to a topic of a home, each of them once.

A writer stages segments in the home's store. Publishing copies each segment to the topic's folder,
in its current generation, and commits runs that name the copy, partition by partition, as the
producer ``:pipeline:<pipeline>:<source partition>``. In each partition, the events of a range are
numbered from the range's ordinal, and a range has at most as many events as were read. So numbers
rise from range to range and follow from the manifest alone. What the producer's row shows is
already there: a second publish, after a crash or by another driver, resumes after it. The row is a
named producer's, which no sweep deletes.

After the commits, each segment gets a witness, which shows a catalog that lost them
(``log.producer.staged``). A second publish adds it if a driver crashed before that.

Events erased from the topic are skipped and counted (``log.ledger``): by writers, with the
ledger that the driver knew, and before the commit if the ledger has grown since.

``FieldedSink`` wraps a sink, and sets key, id, type and time of events from their JSON first.

**Playbacks.** A lot is one segment and one commit per partition. A named playback appends as the
producer ``:playback:<name>``, with numbered events: in each partition, those of a lot count from
the lot's own number, and the next lot begins after them. So a partition whose producer row has
reached the number of a lot has its complete part of that lot, and does not get it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA, check_events
from tidelog.codec.fields import FieldPaths, FieldTaker
from tidelog.codec.partitioner import partitions_for, split
from tidelog.codec.segment import encode_segment
from tidelog.concurrency import Pool
from tidelog.connectors.archive.staging import discard_files
from tidelog.connectors.sink import (
    Lot,
    PlaybackSink,
    RangeWriter,
    SinkContext,
    TargetSink,
    WriterResult,
    remade,
)
from tidelog.connectors.topic.segments import (
    COPIES,
    EventLimit,
    SegmentTarget,
    SegmentWriter,
    check_numbers,
    check_records,
    keeps_partition,
    keyless_partition,
    same_places,
)
from tidelog.context import Context, OpenContext
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    raise_first,
)
from tidelog.log.ledger import NOTHING_ERASED, ErasedIds, read_erased
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.producer.copier import Copier, LedgerMovedError, append_staged, is_appended
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import find_target
from tidelog.model import layout
from tidelog.model.address import Address
from tidelog.model.limits import BATCH_EVENTS_MAX, EVENT_BYTES_CEILING
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import (
    Piece,
    Topic,
    pipeline_producer,
    playback_producer,
    unnamed_producer,
    writer_name,
)
from tidelog.store import open_store_here
from tidelog.store.base import Store

__all__ = [
    "ErasingWriter",
    "FieldedSink",
    "TopicPlaybackSink",
    "TopicSettings",
    "TopicSink",
    "open_topic",
    "open_topic_playback",
    "places_in",
    "target_of",
]


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """How events get into a topic; plain values."""

    topic: Topic
    store: str  # URL of the home's store
    keep_partition: bool  # otherwise by key, or by source partition without a key
    limit: EventLimit


def open_topic(address: Address, open_context: OpenContext) -> TopicSink:
    """Opens the sink at ``topic:NAME?partition=key|same``. Raises ``NotFoundError``."""
    address.take_options(("partition",))
    keep_partition = keeps_partition(address)
    if address.host:
        raise InvalidError(f"sink `{address.text}`: give topic:NAME, without slashes")
    with open_context() as context:
        topic = find_target(context, address.path)
        limit = EventLimit(context.log_settings.event_bytes_max)
        settings = TopicSettings(topic, context.store.url, keep_partition, limit)
    return TopicSink(open_context, settings)


class TopicSink:
    """One incarnation of a topic. Pickles if ``open_context`` does; writers need no catalog."""

    def __init__(
        self,
        open_context: OpenContext,
        settings: TopicSettings,
        open_store: Callable[[str], Store] = open_store_here,
    ) -> None:
        self._open_context = open_context
        self._settings = settings
        self._open_store = open_store
        self._erased = NOTHING_ERASED

    @property
    def url(self) -> str:
        same = "?partition=same" if self._settings.keep_partition else ""
        return f"topic:{self._settings.topic.name}{same}"

    @property
    def incarnation(self) -> str:
        return self._settings.topic.incarnation

    @property
    def limit(self) -> EventLimit:
        """Returns how large events may be."""
        return self._settings.limit

    def with_limit(self, limit: EventLimit) -> TopicSink:
        """Returns the sink with another limit for events."""
        settings = replace(self._settings, limit=limit)
        return TopicSink(self._open_context, settings, self._open_store)

    def check(self, partitions: Sequence[str]) -> None:
        if self._settings.keep_partition:
            check_numbers(self._what, self._settings.topic.partitions, partitions)
        with self._open_context() as context:
            self._erased = read_erased(context, self._settings.topic, self._erased)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        erased = self._erased
        producer = pipeline_producer(layout.staging_pipeline(staging), partition)
        limit = self._settings.limit
        target = SegmentTarget(self.url, limit, erased.mark, writer_name(producer))
        keyless = keyless_partition(partition, self._settings.topic.partitions)

        def place(batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
            partitions = self._settings.topic.partitions
            if self._settings.keep_partition:
                return same_places(batch, partitions, self._what)
            return partitions_for(batch.column("key"), partitions, keyless)

        writer = SegmentWriter(self._open_store(self._settings.store), staging, target, place)
        return ErasingWriter(writer, erased) if len(erased) else writer

    def publish(self, manifest: Manifest) -> int:
        """Implements ``Sink.publish``. Raises ``NotFoundError`` if the topic was deleted."""
        if manifest.written > manifest.read:
            raise InternalError(
                f"{self._what}: source partition `{manifest.partition}`: {manifest.written} "
                f"events came of {manifest.read}: their numbers would run into the next range's"
            )
        with self._open_context() as context, _side_by_side(context) as pool:
            producer = self._producer(context, manifest)
            producer.erased = self._erased
            segments = [_staged_segment(file) for file in manifest.files]
            try:
                return append_staged(producer, segments, manifest.ordinal, pool)
            except NotFoundError as exc:
                again = self._producer(context, manifest)  # raises if the topic itself was deleted
                if not is_appended(again, segments, manifest.ordinal):
                    raise CorruptError(
                        f"{self._what}: a part of source partition `{manifest.partition}`, "
                        f"{manifest.start} to {manifest.end}, is neither staged nor stored "
                        f"({exc}): find out who deleted it, and restore it from a copy"
                    ) from exc
                return 0
            finally:
                self._erased = producer.erased

    def discard(self, manifest: Manifest) -> None:
        discard_files(self._open_store(self._settings.store), manifest.files)

    def _producer(self, context: Context, manifest: Manifest) -> Copier:
        topic = find_target(context, self._settings.topic.name)
        if topic.incarnation != self.incarnation:
            raise NotFoundError(
                f"{self._what}: was deleted and made again since this pipeline began: "
                "start a new pipeline into it"
            )
        return Copier(context, topic, pipeline_producer(manifest.pipeline, manifest.partition))

    @property
    def _what(self) -> str:
        return f"topic `{self._settings.topic.name}`"


def _staged_segment(file: FileEntry) -> StagedSegment:
    """Returns a segment as its writer staged it. Its name contains the ledger's version."""
    return StagedSegment(file.staged, file.pieces, ledger=file.staged.split("/")[-2])


@contextlib.contextmanager
def _side_by_side(context: Context) -> Iterator[Executor | None]:
    """Yields threads if each commit is a round trip; None if they would only wait in turn."""
    if context.commits_at_once == 1:
        yield None
        return
    with Pool(context.commits_at_once, "tidelog-publish") as pool:
        yield pool


_: type[TargetSink] = TopicSink


@dataclass
class ErasingWriter:
    """Another writer, without the events that were erased."""

    writer: RangeWriter
    erased: ErasedIds
    left_out: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        keep = self.erased.kept(batch)
        left = batch if keep is None else batch.filter(pa.array(keep))
        self.left_out += batch.num_rows - left.num_rows
        if left.num_rows:
            self.writer.write(left)

    def close(self) -> WriterResult:
        return replace(self.writer.close(), left_out=self.left_out)


__: type[RangeWriter] = ErasingWriter


@dataclass(frozen=True)
class FieldedSink:
    """Another sink, whose writers first set fields. Pickles if that sink does."""

    sink: TargetSink
    paths: FieldPaths
    event_bytes_max: int = EVENT_BYTES_CEILING  # fields may exceed it by the room for additions
    limit: EventLimit = COPIES  # of events before they get their fields

    @property
    def url(self) -> str:
        return self.sink.url

    @property
    def incarnation(self) -> str:
        return self.sink.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        FieldTaker(self.paths)  # raises for invalid paths
        self.sink.check(partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        taker = FieldTaker(self.paths, self.event_bytes_max)
        return _FieldedWriter(self.sink.writer(partition, staging), taker, self.limit)

    def publish(self, manifest: Manifest) -> int:
        return self.sink.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self.sink.discard(manifest)


@dataclass(frozen=True)
class _FieldedWriter:
    writer: RangeWriter
    taker: FieldTaker
    limit: EventLimit

    def write(self, batch: pa.RecordBatch) -> None:
        check_records(batch, batch, self.limit)
        self.writer.write(self.taker.take(batch))

    def close(self) -> WriterResult:
        return self.writer.close()


___: type[TargetSink] = FieldedSink


def target_of(context: Context, address: Address) -> Topic:
    """Returns the topic at ``topic:NAME?partition=key|same``. Raises ``NotFoundError``."""
    address.take_options(("partition",))
    keeps_partition(address)
    if address.host:
        raise InvalidError(f"sink `{address.text}`: give topic:NAME, without slashes")
    return find_target(context, address.path)


def open_topic_playback(address: Address, setting: SinkContext) -> TopicPlaybackSink:
    """Opens the sink, and fences processes that opened it before.

    Raises ``InvalidError`` if the topic is not the one that the playback began to play into.
    """
    if setting.context is None:
        raise InternalError(f"sink `{address.text}`: needs a home that is open here")
    topic = target_of(setting.context, address)
    if setting.target not in ("", topic.incarnation):
        name, _, _ = (setting.name or "").partition("~")  # without its generation
        raise remade(name, "target")
    return TopicPlaybackSink(setting.context, topic, setting.name, keeps_partition(address))


class TopicPlaybackSink:
    """A topic. Without a name, nothing is fenced, and earlier lots are unknown."""

    lot_events = BATCH_EVENTS_MAX
    lot_bytes = None

    def __init__(
        self, context: Context, topic: Topic, name: str | None, keep_partition: bool
    ) -> None:
        self._context = context
        self._topic = topic
        self._named = name is not None
        self._keep_partition = keep_partition
        own = playback_producer(name) if name else unnamed_producer(context.ids.new())
        self._appender = Copier(context, topic, own)
        if self._named:
            self._appender.open_named()
        self._pool: Pool | None = None
        if context.commits_at_once > 1:
            self._pool = Pool(context.commits_at_once, "tidelog-playback-commit")

    def put(self, lot: Lot) -> int:
        table = pa.Table.from_batches([lot.batch.select(STORED_SCHEMA.names)], STORED_SCHEMA)
        check_events(table, EVENT_BYTES_CEILING, own=True)  # a topic accepted these before
        places = places_in(self._topic, self._keep_partition, lot.batch)
        done: set[int] = set()  # partitions that have their part of the lot

        def attempt(erased: ErasedIds) -> int:
            keep = erased.kept(table)
            if keep is None:
                self._put(lot, table, places, done)
                return 0
            self._put(lot, table.filter(pa.array(keep)), places[keep], done)
            return int(np.count_nonzero(~keep))

        return self._appender.copy(attempt)

    def _put(
        self, lot: Lot, table: pa.Table, places: npt.NDArray[np.int32], done: set[int]
    ) -> None:
        """Commits what is missing. Raises ``LedgerMovedError`` after all running commits ended.

        Adds each partition that has its part to ``done``.
        """
        parts = [
            (partition, part)
            for partition, part, _ in (split(table, places) if table.num_rows else ())
            if partition not in done and not self._has(partition, lot)
        ]
        if not parts:
            return
        known = self._appender.known([partition for partition, _ in parts])
        segment = encode_segment(parts, known)
        stored = self._appender.upload(segment)

        def commit(piece: Piece) -> LedgerMovedError | None:
            try:
                self._commit(lot, piece, stored)
            except LedgerMovedError as exc:
                self._appender.abandon(piece.partition, stored)
                return exc
            done.add(piece.partition)
            return None

        each: Callable[..., Iterable[Any]] = map if self._pool is None else self._pool.map
        raise_first([error for error in each(commit, segment.pieces) if error is not None])

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if not self._named:
            self._appender.close()

    def _commit(self, lot: Lot, piece: Piece, stored: StoredSegment) -> None:
        if not self._named:
            self._appender.commit(stored, piece)
            return
        sequences = range(lot.number, lot.number + piece.count)
        with contextlib.suppress(AlreadyExistsError):  # by this process, if a reply was lost
            self._appender.commit(stored, piece, sequences)

    def _has(self, partition: int, lot: Lot) -> bool:
        return self._named and self._appender.last_sequence(partition) >= lot.number


def places_in(topic: Topic, keep_partition: bool, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
    """Returns where events go: by key, or to their old partition; without a key also to that."""
    if keep_partition:
        return same_places(batch, topic.partitions, f"topic `{topic.name}`")
    places = partitions_for(batch.column("key"), topic.partitions, 0)
    keyless = batch.column("key").is_null().to_numpy(zero_copy_only=False)
    numbers = batch.column("partition").to_numpy() % topic.partitions
    return np.where(keyless, numbers, places).astype(np.int32)


_is_playback_sink: type[PlaybackSink] = TopicPlaybackSink
