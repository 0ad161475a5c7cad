"""Reads a range of a shard: turns Kinesis's records into batches in event columns.

A range ends when a record arrived after the time of its limit, when reading has caught up with the
shard, when there are enough events, or at the end of a closed shard. Requests respect the limits of
a shard: five per second, two megabytes per second, 10,000 records each. If other readers use the
shard, Kinesis refuses some requests and the client retries.

The Kinesis Producer Library (KPL) packs several records into one: four magic bytes, a protobuf
message and its MD5. The message has a table of partition keys, a table of explicit hash keys, and
the records that refer to them. A record that only looks like that, or is damaged, is not unpacked:
its bytes are one event.

**Positions** in a shard are not numbers, because Kinesis does not say where a shard ends. A *place*
is where reading resumes::

    oldest           at the oldest record that Kinesis still has
    at:<ms>          at the first record that arrived at this time or later
    after:<sequence> after a record
    end              after the last record of a closed shard

``@<ms>`` after a place means that all records which arrived before that time are read. With the
retention of the stream this shows whether records may be lost: Kinesis itself silently begins at
its oldest record if asked for a deleted one. A stream that is younger than its retention begins at
``oldest@<ms>``, the time of its creation. ``^<ms>`` after the first place of a shard, or where a
reader continues after a loss, means that records from before that time are deleted. Kinesis may
delete them later than that, so a reader continues after its last record, not at the oldest one.

A *limit* is ``until:<ms>``, the time up to which to read, or ``end``. ``,<n>`` after it ends a
range after about n events. The end of an open shard is the current time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from tidelog.catalog.update import rounds
from tidelog.clock import Clock
from tidelog.codec.event_batch import batch_of, with_position
from tidelog.connectors.kinesis.client import (
    HASH_KEY,
    SEQUENCE,
    SUB_SEQUENCE,
    Kinesis,
    KinesisShard,
    StreamInfo,
    arrived_ms,
    shard_id,
)
from tidelog.connectors.source import Chunk, SourceRange
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.model.event import Headers

__all__ = [
    "END",
    "MAGIC",
    "RangeLimit",
    "ShardPosition",
    "ShardRead",
    "ShardReadPlan",
    "UserRecord",
    "hash_of",
    "is_before",
    "user_records",
]

_PLACE = re.compile(r"(?:(oldest|end)|(at|after):(\d{1,129}))(?:@(\d{1,15})|\^(\d{1,15}))?", re.A)
_LIMIT = re.compile(r"(?:end|until:(\d{1,15}))(?:,(\d{1,15}))?", re.A)
_ORDER = ("oldest", "at", "after", "end")


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where reading resumes."""

    kind: Literal["oldest", "at", "after", "end"]
    value: int = 0  # a time or a sequence number
    seen_ms: int | None = None  # everything that arrived before this is read
    held_ms: int | None = None  # everything that arrived before this is deleted

    @property
    def text(self) -> str:
        name = f"{self.kind}:{self.value}" if self.kind in ("at", "after") else self.kind
        if self.held_ms is not None:
            return f"{name}^{self.held_ms}"
        return name if self.seen_ms is None else f"{name}@{self.seen_ms}"

    @property
    def order(self) -> tuple[int, int]:
        """Returns a key that rises along a shard. Times and sequence numbers do not compare."""
        return _ORDER.index(self.kind), self.value

    def seen(self, time_ms: int) -> ShardPosition:
        """Returns the same place, with everything that arrived before a time read."""
        return replace(self, seen_ms=max(0, time_ms), held_ms=None)

    def held(self, held_ms: int | None) -> ShardPosition:
        """Returns the same place, with everything that arrived before a time deleted."""
        return replace(self, seen_ms=None, held_ms=held_ms)

    @classmethod
    def parse(cls, text: str) -> ShardPosition:
        """Parses a place.

        A limit becomes the place of its time, where a reader of "newest" begins. It counts as read
        up to there, so that records which are deleted after that time are noticed.
        """
        match = _PLACE.fullmatch(text)
        if match is None:
            limit = RangeLimit.parse(text)
            until_ms = limit.until_ms
            return END if until_ms is None else cls("at", until_ms, seen_ms=until_ms)
        kind: Literal["oldest", "at", "after", "end"] = match[1] or match[2]  # type: ignore[assignment]
        seen, held = (None if part is None else int(part) for part in match.group(4, 5))
        return cls(kind, int(match[3] or 0), seen, held)


END = ShardPosition("end")


@dataclass(frozen=True, slots=True)
class RangeLimit:
    """Where a range ends at the latest."""

    until_ms: int | None  # None: at the end of a closed shard
    events: int | None = None

    @property
    def text(self) -> str:
        name = "end" if self.until_ms is None else f"until:{self.until_ms}"
        return name if self.events is None else f"{name},{self.events}"

    def cut(self, events: int) -> RangeLimit:
        """Returns the same limit, but after at most this many events."""
        return replace(self, events=events if self.events is None else min(events, self.events))

    @classmethod
    def parse(cls, text: str) -> RangeLimit:
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise InvalidError(
                f"position `{text}`: is none of Kinesis: give oldest, at:<ms>, after:<sequence>, "
                "until:<ms> or end"
            )
        until, events = (None if part is None else int(part) for part in match.groups())
        return cls(until, events)


def is_before(one: str, other: str) -> bool:
    """Returns whether a position is strictly before another of the same shard, if known.

    A place is before a time unless everything that arrived before that time is read. It is before
    the first place of its shard if records after it may be deleted.
    """
    if _is_time(one):
        return _is_time(other) and _until_ms(one) < _until_ms(other)
    here = ShardPosition.parse(one)
    if _is_time(other):
        if here.kind == "end":
            return False
        known_ms = here.value if here.kind == "at" else -1
        return max(known_ms, here.seen_ms or 0) < _until_ms(other)
    there = ShardPosition.parse(other)
    if there.held_ms is not None:
        return here.kind != "end" and _is_lost(here, there.held_ms)
    return here.order < there.order


def _is_lost(here: ShardPosition, held_ms: int) -> bool:
    """Returns whether records after a place may be among those that arrived before a time.

    From a place where nothing was read yet, the first read may be late for a while: retention
    moves on while it is retried.
    """
    if here.seen_ms is not None:
        return here.seen_ms < held_ms
    if here.kind != "at" and here.held_ms is None:
        return False
    known_ms = here.value if here.kind == "at" else 0
    return max(known_ms, here.held_ms or 0) + _LATE_MS < held_ms


def _is_time(text: str) -> bool:
    return text.startswith("until:")


def _until_ms(text: str) -> int:
    return RangeLimit.parse(text).until_ms or 0


_RECORDS_MAX = 10_000  # of one response
_READ_S = 0.2  # between two requests
_BYTES_S = 2_000_000.0  # per shard and second
_RENEWALS = 5  # of an iterator that expires at once
_EMPTY_MAX = 10  # responses in a row before a closed shard must report its end
_CHUNK_EVENTS = 20_000
_CHUNK_BYTES = 32 << 20
_LATE_MS = 3_600_000  # how late the first read of a shard may be
_REFRESH_MS = 3_600_000  # how old the time of a quiet shard may get before it is committed again


@dataclass(frozen=True, slots=True)
class ShardReadPlan:
    """Everything needed to read a range; plain values."""

    range: SourceRange
    info: StreamInfo
    shard: KinesisShard
    keep_outside: bool  # records whose hash key belongs to another shard


class ShardRead:
    """One pass over a range."""

    def __init__(self, kinesis: Kinesis, plan: ShardReadPlan, clock: Clock) -> None:
        self._kinesis = kinesis
        self._plan = plan
        self._start = self._place = ShardPosition.parse(plan.range.start)
        self._limit = RangeLimit.parse(plan.range.limit)
        self._columns = _Columns(plan)
        self._pace = _Pace(clock)
        self._checked = False
        self._empty = 0  # responses in a row without records
        self.has_moved = False  # whether a chunk had events, or a position other than the start

    def chunks(self) -> Iterator[Chunk]:
        """Yields the events. The position of the last chunk is the end that was reached."""
        iterator = None if self._start.kind == "end" else self._iterator()
        end = self._start
        while iterator is not None:
            answer = self._ask(iterator)
            time_ms = self._kinesis.time_ms(answer)
            self._check_held(time_ms)
            for record in answer["Records"]:
                if not self._take(record):
                    yield self._chunk(self._place)
                    return
                if self._columns.is_full:
                    yield self._chunk(self._place)
            behind_ms = answer.get("MillisBehindLatest") or 0
            end, iterator = self._after(time_ms - behind_ms), answer.get("NextShardIterator")
            self._empty = 0 if answer["Records"] else self._empty + 1
            if iterator is None or self._is_last():
                end, iterator = END, None
            elif self._has_caught_up(behind_ms) or self._is_over(time_ms - behind_ms):
                iterator = None
        yield self._chunk(end)

    def _take(self, record: Mapping[str, Any]) -> bool:
        """Adds a record. Returns False if it is after the range.

        A record that would exceed the number of events is also after the range, unless it is the
        first. So a range can end before a packed record.
        """
        time_ms = arrived_ms(record)
        if self._is_over(time_ms - 1):
            return False
        if self._place.kind != "at" or time_ms >= self._place.value:
            room = None if self._limit.events is None else self._limit.events - self._columns.total
            if not self._columns.add(record, time_ms, room):
                return False
            self._place = ShardPosition("after", int(record["SequenceNumber"])).seen(time_ms)
        return True

    def _is_over(self, time_ms: int) -> bool:
        """Returns whether the range is complete if everything up to this time is read."""
        enough = self._limit.events is not None and self._columns.total >= self._limit.events
        return enough or (self._limit.until_ms is not None and time_ms >= self._limit.until_ms)

    def _has_caught_up(self, behind_ms: int) -> bool:
        """Returns whether there is nothing more now. A closed shard must report its end first."""
        return not behind_ms and (not self._plan.shard.is_closed or self._empty >= _EMPTY_MAX)

    def _is_last(self) -> bool:
        last = self._plan.shard.last_sequence
        return last is not None and self._place.kind == "after" and self._place.value >= last

    def _after(self, seen_ms: int) -> ShardPosition:
        """Returns the position after reading everything up to a time.

        In a quiet shard this is the start, so that nothing needs a commit. Now and then the time is
        updated; otherwise it would get so old that records could be lost.
        """
        known_ms = self._start.seen_ms
        quiet = self._place == self._start and known_ms is not None
        if quiet and seen_ms - (known_ms or 0) < _REFRESH_MS:
            return self._start
        return self._place.seen(seen_ms)

    def _chunk(self, end: ShardPosition) -> Chunk:
        unmoved = end == self._start
        batch = self._columns.take()
        self.has_moved |= not unmoved or batch.num_rows > 0
        return Chunk(batch, self._plan.range.start if unmoved else end.text)

    def _check_held(self, time_ms: int) -> None:
        """Raises ``NotFoundError`` if records after the start may be deleted."""
        seen_ms = self._start.seen_ms
        held_ms = time_ms - self._plan.info.retention_ms
        if not self._checked and seen_ms is not None and seen_ms < held_ms:
            raise NotFoundError(
                f"kinesis shard `{self._plan.range.partition.text}`: was read up to {seen_ms} ms, "
                f"and holds nothing that came in before {held_ms} ms: continue from the oldest "
                "record if that loss is acceptable",
                lost_from=self._start.text,
                first=ShardPosition("oldest", held_ms=held_ms).text,
            )
        self._checked = True

    def _ask(self, iterator: str) -> dict[str, Any]:
        """Returns the next records. Replaces an expired iterator."""
        left = _RECORDS_MAX
        if self._limit.events is not None:
            left = min(left, max(1, self._limit.events - self._columns.total))
        expired = UnavailableError(
            f"kinesis shard `{self._plan.range.partition.text}`: iterators expire as soon as they "
            "are made: try again in a while"
        )
        for _ in rounds(_RENEWALS, expired):
            self._pace.wait()
            try:
                answer = self._kinesis.call("get_records", ShardIterator=iterator, Limit=left)
            except InvalidError as exc:
                if exc.context.get("code") != "ExpiredIteratorException":
                    raise
                iterator = self._iterator() or iterator
            else:
                self._pace.note(sum(len(each["Data"]) for each in answer["Records"]))
                return answer
        raise expired

    def _iterator(self) -> str | None:
        """Returns an iterator for the current position; None if it begins in the future."""
        number, place = self._plan.shard.number, self._place
        if place.kind == "oldest":
            return self._kinesis.iterator(number, ShardIteratorType="TRIM_HORIZON")
        if place.kind == "after":
            return self._kinesis.iterator(
                number,
                ShardIteratorType="AFTER_SEQUENCE_NUMBER",
                StartingSequenceNumber=str(place.value),
            )
        # The SDK sends whole seconds, so some records are too old.
        moment = datetime.fromtimestamp(place.value // 1000, UTC)
        try:
            return self._kinesis.iterator(
                number, ShardIteratorType="AT_TIMESTAMP", Timestamp=moment
            )
        except InvalidError as exc:
            if exc.context.get("time_ms", 0) >= place.value:
                raise
            return None  # Kinesis accepts no future time


class _Pace:
    """Keeps within the limits of a shard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_s = clock.monotonic_s()

    def wait(self) -> None:
        self._clock.sleep(self._next_s - self._clock.monotonic_s())
        self._next_s = self._clock.monotonic_s() + _READ_S

    def note(self, size: int) -> None:
        """Counts bytes that were read."""
        self._next_s += max(0.0, size / _BYTES_S - _READ_S)


class _Columns:
    """Events waiting to become a batch, column by column."""

    def __init__(self, plan: ShardReadPlan) -> None:
        self._plan = plan
        self._shard_id = shard_id(plan.shard.number)
        self._arn = hashlib.sha256(plan.info.arn.encode())
        self.total = 0  # events so far, including earlier batches
        self._clear()

    def _clear(self) -> None:
        self._times: list[int] = []
        self._ids: list[str] = []
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        self._headers: list[Headers] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Returns whether there is enough for a batch."""
        return len(self._ids) >= _CHUNK_EVENTS or self._bytes >= _CHUNK_BYTES

    def add(self, record: Mapping[str, Any], time_ms: int, room: int | None) -> bool:
        """Adds a record, or those packed in it. Returns False if there is no room for all."""
        sequence: str = record["SequenceNumber"]
        inside = user_records(record["Data"])
        if inside is None:
            whole = UserRecord(record["PartitionKey"], None, record["Data"])
            self._append(whole, time_ms, sequence, None)
            return True
        kept = [
            (number, each)
            for number, each in enumerate(inside)
            if self._plan.keep_outside or self._is_ours(each)
        ]
        if room is not None and self.total and len(kept) > room:
            return False
        for number, each in kept:
            self._append(each, time_ms, sequence, number)
        return True

    def take(self) -> pa.RecordBatch:
        """Returns all waiting events in event columns. Offsets count from the range's ordinal."""
        stored = batch_of([self._times, self._ids, self._keys, self._values, None, self._headers])
        partition, rows = self._plan.range.partition, len(self._ids)
        base = self._plan.range.ordinal + self.total - rows
        batch = with_position(stored, partition.topic, int(partition.name), base)
        self._clear()
        return batch

    def _append(self, each: UserRecord, time_ms: int, sequence: str, number: int | None) -> None:
        headers = [(SEQUENCE, sequence.encode())]
        event_id = f"{self._shard_id}:{sequence}"
        if number is not None:
            headers.append((SUB_SEQUENCE, b"%d" % number))
            event_id += f":{number}"
        if each.hash_key is not None:
            headers.append((HASH_KEY, each.hash_key.encode()))
        digest = self._arn.copy()
        digest.update(event_id.encode())
        self._times.append(time_ms)
        self._ids.append(digest.hexdigest())
        self._keys.append(each.key.encode(errors="surrogatepass"))  # JSON may have half a pair
        self._values.append(each.data)
        self._headers.append((*headers, *each.tags))
        self._bytes += len(each.data)
        self.total += 1

    def _is_ours(self, each: UserRecord) -> bool:
        shard = self._plan.shard
        return shard.first_hash <= hash_of(each.key, each.hash_key) <= shard.last_hash


MAGIC = b"\xf3\x89\x9a\xc2"
_MD5_BYTES = 16
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5  # protobuf's kinds of fields
_VARINT_BITS = 64
_HASH_END = 1 << 128


class UserRecord(NamedTuple):
    """A record that a producer gave to the library."""

    key: str
    hash_key: str | None
    data: bytes
    tags: tuple[tuple[str, bytes], ...] = ()


def user_records(data: bytes) -> list[UserRecord] | None:
    """Unpacks a record; None if it is not packed, damaged or empty."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _MD5_BYTES:
        return None
    message, digest = data[len(MAGIC) : -_MD5_BYTES], data[-_MD5_BYTES:]
    if hashlib.md5(message, usedforsecurity=False).digest() != digest:
        return None
    try:
        return _message(message) or None
    except ValueError:
        return None


def hash_of(key: str, hash_key: str | None) -> int:
    """Returns the number by which Kinesis chooses a shard."""
    if hash_key is not None:
        return int(hash_key)
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest())


def _message(message: bytes) -> list[UserRecord]:
    keys: list[str] = []
    hash_keys: list[str] = []
    parts: list[bytes] = []
    for number, value in _fields(message):
        if number == 1:
            keys.append(_text(value))
        elif number == 2:
            hash_keys.append(_hash_key(_text(value)))
        elif number == 3:
            parts.append(_bytes(value))
    return [_record(part, keys, hash_keys) for part in parts]


def _record(part: bytes, keys: list[str], hash_keys: list[str]) -> UserRecord:
    key: str | None = None
    hash_key: str | None = None
    data: bytes | None = None
    tags: list[tuple[str, bytes]] = []
    for number, value in _fields(part):
        if number == 1:
            key = _entry(keys, value)
        elif number == 2:
            hash_key = _entry(hash_keys, value)
        elif number == 3:
            data = _bytes(value)
        elif number == 4:
            tags.append(_tag(_bytes(value)))
    if key is None or data is None:
        raise ValueError("a record without key or data")
    return UserRecord(key, hash_key, data, tuple(tags))


def _tag(part: bytes) -> tuple[str, bytes]:
    name, content = "", b""
    for number, value in _fields(part):
        if number == 1:
            name = _text(value)
        elif number == 2:
            content = _bytes(value)
    return name, content


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message. Raises ``ValueError`` if it is truncated."""
    at, end = 0, len(message)
    while at < end:
        head, at = _varint(message, at)
        kind = head & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield head >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_LONG, _SHORT):
            size = 8 if kind == _LONG else 4
        else:
            raise ValueError(f"kind {kind} of a field")
        if size > end - at:
            raise ValueError("a field breaks off")
        yield head >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < _VARINT_BITS:
        if at >= len(message):
            raise ValueError("a number breaks off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number does not end")


def _entry(table: list[str], value: int | bytes) -> str:
    if not isinstance(value, int) or value >= len(table):
        raise ValueError("an entry that no table has")
    return table[value]


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()  # invalid UTF-8 is a ValueError too


def _hash_key(text: str) -> str:
    if not (text.isascii() and text.isdecimal()) or int(text) >= _HASH_END:
        raise ValueError("no hash key")
    return text
