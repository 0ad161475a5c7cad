"""Plays events into a topic of the same home, each of them once.

A lot is one segment and one commit per partition. A named playback appends as the producer
``:playback:<name>``, with numbered events: in each partition, those of a lot count from the lot's
own number, and the next lot begins after them. So a partition whose producer row has reached the
number of a lot has its complete part of that lot, and does not get it again.

Events that were erased from the target are skipped and counted (``log.copying``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.codec.event_batch import STORED_SCHEMA, check_events
from tidelog.codec.segment import Piece, encode_segment
from tidelog.connectors.playback_sinks import Lot, PlaybackSink, SinkContext, remade
from tidelog.connectors.topic.segments import keeps_partition, same_places
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, InternalError, InvalidError
from tidelog.log.ledger import Copier, ErasedIds, LedgerMovedError
from tidelog.log.partitioner import partitions_for, split
from tidelog.log.producer.append import StoredSegment
from tidelog.log.topics import find_target
from tidelog.model.address import Address
from tidelog.model.limits import BATCH_EVENTS_MAX, EVENT_BYTES_CEILING
from tidelog.model.producer_names import playback_producer, unnamed_producer
from tidelog.model.topic import Topic
from tidelog.pool import Pool

__all__ = ["TopicPlaybackSink", "open_topic", "places_in", "target_of"]


def target_of(context: Context, address: Address) -> Topic:
    """Returns the topic at ``topic:NAME?partition=key|same``. Raises ``NotFoundError``."""
    address.take_options(("partition",))
    keeps_partition(address)
    if address.host:
        raise InvalidError(f"sink `{address.text}`: give topic:NAME, without slashes")
    return find_target(context, address.path)


def open_topic(address: Address, setting: SinkContext) -> TopicPlaybackSink:
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
        for error in [error for error in each(commit, segment.pieces) if error is not None]:
            raise error

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


_: type[PlaybackSink] = TopicPlaybackSink
