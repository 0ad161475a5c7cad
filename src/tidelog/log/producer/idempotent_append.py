"""Stores a request's events once, however often and in whichever process it is retried.

A client that retries a request sends the same key. The key gives the name of a producer,
``~once-<hash>``, which all processes share: it has no epoch, and its sequences start at a number
that depends on the events. A sweep deletes its rows after a week, like those of unnamed producers.

    1. read the producer's row in the key's own partition and
       in each partition of the events                           → nothing
    2. claim the key: create the row in its own partition,
       unless events go there, whose commit creates it first     → the key is for these events
    3. upload one segment for the partitions without a row       → a stray, swept later
    4. one commit for each of these partitions, which also       → its events, and the row by
       creates the row                                             which a retry finds them

The key's own partition depends on the key alone. Its row shows which events the key is for, so a
request with other events is refused wherever they go: it finds the row in step 1, or if two
processes do this at once in step 2 or 4, before it has stored anything. If both have the same
events, the second one finds rows in step 4 and returns their offsets. A retry after a crash commits
what is missing. All keyless events go to the key's own partition, so that every retry places each
event in the same partition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tidelog.catalog.base import Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.codec.event_batch import check_events, table_of
from tidelog.codec.partitioner import partitions_for, split
from tidelog.codec.segment import encode_segment
from tidelog.context import Context
from tidelog.coordination.outcome import append_error
from tidelog.errors import (
    AlreadyExistsError,
    InvalidError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.producer.append import Appender
from tidelog.log.producer.flush import FlushPart
from tidelog.log.topics import open_head, read_head
from tidelog.model import layout, limits
from tidelog.model.event import Event, Positions, check_utf8
from tidelog.model.topic import Head, ProducerState, Topic, decode_row, encode_row, once_producer

__all__ = ["append_once"]

_EVENTS_BITS = 20  # of a sequence; the bits above depend on the events
_DIGEST_BYTES = 5
_ADVICE = "repeat it with the same key, which stores only what is missing"
_ADVICE_OTHER = "append the remainder with another key"


def append_once(
    context: Context, topic: Topic, key: str, events: Sequence[Event], *, own: bool = False
) -> Positions:
    """Returns the positions of the events, stored now or by an earlier call with the same key.

    ``own`` is for events to which Tidelog itself has added headers: these have extra room.

    Raises ``AlreadyExistsError`` if the key was used for other events of the topic; then this call
    stored nothing. Raises ``PartialAppendError`` if an error leaves only some of the events stored.
    A retry with the same key completes them; if a sweep forgot the key in the meantime and it was
    used for other events, append with another key.
    """
    check_utf8("idempotency key", key)
    if not key:  # of requests that have none, which would all count as the same
        raise InvalidError("append with a key: the key is empty: give each request one of its own")
    if not 1 <= len(events) <= limits.SEGMENT_EVENTS_MAX:
        raise InvalidError(
            f"append with a key: {len(events)} events: give 1 to {limits.SEGMENT_EVENTS_MAX}"
        )
    table = table_of(events, context.clock.now_ms())
    check_events(table, context.log_settings.event_bytes_max, own=own)
    request = _Request(context, topic, key, _first_sequence(events))
    partitions = partitions_for(table.column("key"), topic.partitions, request.own)
    parts = [
        FlushPart(partition, part, rows, (request.first + rows).tolist())
        for partition, part, rows in split(table, partitions)
    ]
    offsets = np.full(len(events), -1, np.int64)
    missing = []
    request.check_key()
    for part in sorted(parts, key=lambda part: part.partition != request.own):
        base = request.stored(part)
        if base is None:
            missing.append(part)
        else:
            offsets[part.rows] = np.arange(base, base + len(part.rows))
    positions = Positions(topic.name, partitions, offsets)
    done = 0
    try:
        for part, base in request.store(missing):
            offsets[part.rows] = np.arange(base, base + len(part.rows))
            done += 1
    except TidelogError as exc:
        unknown = missing[done].rows.tolist() if isinstance(exc, UnknownOutcomeError) else []
        advice = _ADVICE_OTHER if isinstance(exc, AlreadyExistsError) else _ADVICE
        raise append_error(positions, unknown, exc, advice)  # noqa: B904 - it has its cause
    return positions


class _Request:
    """One attempt at a request: its producer, and what that has stored."""

    def __init__(self, context: Context, topic: Topic, key: str, first: int) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self.first = first  # the sequence of the first event
        self.own = int.from_bytes(digest, "big") % topic.partitions  # the key's own partition
        self._context = context
        self._topic = topic
        self._producer = once_producer(digest.hex())
        self._is_known = False  # whether the key was claimed before
        self._appender = Appender(context, topic, self._producer, once=True)

    def check_key(self) -> None:
        """Step 1 for the key's own partition. ``AlreadyExistsError`` if it is for other events."""
        where = layout.topic_partition(self._topic.incarnation, self.own)
        row = self._context.catalog.get(where, layout.producer_row(self._producer))
        self._is_known = self._is_claimed(row)

    def stored(self, part: FlushPart) -> int | None:
        """Returns the first offset of a part that is stored; None if it is not."""
        where = layout.topic_partition(self._topic.incarnation, part.partition)
        row = self._context.catalog.get(where, layout.producer_row(self._producer))
        if row is None:
            return None
        state = decode_row(row.value, ProducerState, f"row `{row.row}`")
        base = None if part.sequences is None else state.offset_of(part.sequences[0])
        if base is None:
            raise self._other_events()
        return base

    def store(self, parts: Sequence[FlushPart]) -> Iterator[tuple[FlushPart, int]]:
        """Steps 2 to 4: yields each part with its first offset, as soon as it is stored."""
        if not parts:
            return
        if not self._is_known and parts[0].partition != self.own:
            self._claim()
        known = self._appender.known([part.partition for part in parts])
        segment = encode_segment([(part.partition, part.table) for part in parts], known)
        stored = self._appender.upload(segment)
        for part, piece in zip(parts, segment.pieces, strict=True):
            try:
                base, stored = self._appender.commit(stored, piece, part.sequences)
            except AlreadyExistsError:  # another request with this key came first
                self._appender.abandon(part.partition, stored)
                base = self._stored_meanwhile(part)
            yield part, base
        self._appender.list_abandoned()

    def _claim(self) -> None:
        """Step 2. The new row also expects the head, since ``ABSENT`` could become true again."""
        where = layout.topic_partition(self._topic.incarnation, self.own)
        row = layout.producer_row(self._producer)

        def decide(rows: Rows) -> Decision[None]:
            open_head(self._context, self._topic, self.own, rows["head"])
            if self._is_claimed(rows[row]):
                return Decision(None)
            mine = ProducerState(0, self.first, (), self._context.clock.now_ms())
            return Decision(None, (rows.put(row, encode_row(mine)), rows.check("head")))

        what = f"append to `{self._topic.name}` with a key"
        try:
            update(self._context, where, ["head", row], decide, what)
        except UnknownOutcomeError as exc:
            raise UnavailableError(f"{what}: nothing was stored, {_ADVICE}: {exc}") from exc

    def _is_claimed(self, row: Row | None) -> bool:
        """Returns whether the row of the key's own partition is there, and for these events."""
        if row is None:
            return False
        state = decode_row(row.value, ProducerState, f"row `{row.row}`")
        if state.last >> _EVENTS_BITS != self.first >> _EVENTS_BITS:
            raise self._other_events()
        return True

    def _other_events(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"append to `{self._topic.name}`: its idempotency key was used for other events: "
            "give each request a key of its own"
        )

    def _stored_meanwhile(self, part: FlushPart) -> int:
        try:
            found = self.stored(part)
        except UnavailableError as exc:
            raise UnknownOutcomeError(
                f"append to `{self._topic.name}` with a key: another request has stored events "
                f"under it, and where cannot be read ({exc}): repeat it with the same key"
            ) from exc
        if found is None:  # its row was deleted with the topic, or after a week
            self._appender.check_head(part.partition, self._head(part.partition))
            raise UnknownOutcomeError(
                f"append to `{self._topic.name}` with a key: another request has stored events "
                "under it, and the key has expired since: read the topic before you repeat it"
            )
        return found

    def _head(self, partition: int) -> Head:
        return read_head(self._context, self._topic, partition)[0]


def _first_sequence(events: Sequence[Event]) -> int:
    digest = hashlib.sha256(msgspec.msgpack.encode(events)).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "big") << _EVENTS_BITS
