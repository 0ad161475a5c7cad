"""Writes events to a Kinesis stream, in the order of each partition key, at least once.

A writer stages segments in the home's store, and publishing puts their events. Kinesis
stores no progress, so a second publish, after a crash or by another driver, puts a range again from
its beginning. Then the events of at most one range per source partition are there twice. Readers of
the stream must detect that by content or tolerate it.

**Repeats.** Kinesis does not detect repeated puts: an unanswered put is sent again and may be
stored twice. A put of many records may fail for some. Then the first failed record of a partition
key is sent again with every later record of that key. So the last records of a key are always in
order, but some may be stored twice.

**Contents.** Only the value and key of an event are sent: Kinesis has no place for more, and none
for null, so a null value is sent as empty. The partition key is the event's key, otherwise its id,
otherwise a hash of its value. A key that Kinesis refuses, not UTF-8 or over 256 characters, is
hashed. Events that came from Kinesis with an explicit hash key are sent with it.

**Playbacks** put their events in the same way.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.clock import Clock, SystemClock, system_random
from tidelog.connectors.archive.staging import discard_files
from tidelog.connectors.kinesis.client import (
    HASH_KEY,
    Kinesis,
    KinesisAddress,
    parse_kinesis_address,
)
from tidelog.connectors.sink import ForwardSink, Lot, RangeWriter, SinkContext, TargetSink
from tidelog.connectors.topic.segments import SegmentTarget, SegmentWriter, staged_events
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.model.address import Address, parse_address
from tidelog.model.event import Event
from tidelog.model.pipeline import Manifest
from tidelog.model.times import Backoff
from tidelog.store import open_store_here
from tidelog.store.base import Store

__all__ = [
    "KinesisSettings",
    "KinesisSink",
    "KinesisWriter",
    "open_kinesis",
    "open_kinesis_playback",
    "open_writer",
    "partition_key",
]

_RECORDS_MAX = 500  # of one request
_REQUEST_BYTES = 5 << 20  # of its records with their keys; a larger record goes alone
_KEY_MAX = 256  # characters
_HASH_END = 1 << 128
_BACKOFF = Backoff(attempts=12, base_ms=100, max_ms=5_000)  # attempts without any progress
_BRIEF = Backoff(attempts=3, base_ms=100, max_ms=500)  # the same, while a caller waits


class _Record(NamedTuple):
    """What is sent of an event."""

    key: str
    data: bytes
    hash_key: str | None

    @property
    def size(self) -> int:
        return len(self.data) + len(self.key.encode())

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"Data": self.data, "PartitionKey": self.key}
        if self.hash_key is not None:
            entry["ExplicitHashKey"] = self.hash_key
        return entry


def open_writer(
    url: str, *, environ: Mapping[str, str], backoff: Backoff | None = None
) -> KinesisWriter:
    """Opens a writer to ``kinesis://STREAM?region=…``. Raises ``NotFoundError``.

    ``backoff`` says how long to try calls, and puts that Kinesis refuses.
    """
    place = parse_kinesis_address(parse_address(url), environ, "sink")
    kinesis = Kinesis(place) if backoff is None else Kinesis(place, backoff=backoff)
    info = kinesis.describe()[0]
    return KinesisWriter(kinesis, place.stream, info.record_bytes_max, backoff=backoff or _BACKOFF)


class KinesisWriter:
    """Puts events into one stream; for one thread."""

    def __init__(
        self,
        kinesis: Kinesis,
        stream: str,
        record_bytes_max: int,
        *,
        clock: Clock | None = None,
        source: random.Random | None = None,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._kinesis = kinesis
        self._backoff = backoff
        self._stream = stream
        self._record_bytes_max = record_bytes_max
        self._clock = clock or SystemClock()
        self._random = source or system_random()

    def check(self, event: Event) -> None:
        """Raises ``InvalidError`` for an event that makes too large a record. Sends nothing."""
        key = partition_key(event.key, event.id, event.value)
        _check_size(_Record(key, event.value or b"", None), self._record_bytes_max, self._stream)

    def put(self, events: pa.RecordBatch | pa.Table) -> int:
        """Puts events in stored or event columns. Returns how many; all are durable then.

        Raises ``InvalidError`` before putting anything if an event is too large. Raises
        ``UnavailableError`` if Kinesis accepts no more; its context has the number of stored events
        as ``put``.
        """
        check_record_sizes(events, self._record_bytes_max, self._stream)
        waiting = deque(_records(events))
        delays = self._backoff.delays_s(self._random)
        total, left, room = len(waiting), len(waiting), _RECORDS_MAX
        while waiting:
            request = _request(waiting, room)
            again, code = self._send(request)
            waiting.extendleft(reversed(again))
            if len(waiting) < left:
                left, delays = len(waiting), self._backoff.delays_s(self._random)
            if not again:
                room = min(_RECORDS_MAX, 2 * room)
                continue
            room = max(1, len(request) // 2)  # so that fewer are sent twice
            delay_s = next(delays, None)
            if delay_s is None:
                raise UnavailableError(
                    f"kinesis stream `{self._stream}`: accepts no more, {code}: {total - left} of "
                    f"{total} events are there: try again in a while, or give it more shards",
                    put=total - left,
                )
            self._clock.sleep(delay_s)
        return total

    def _send(self, request: Sequence[_Record]) -> tuple[list[_Record], str]:
        """Sends a request. Returns the records to send again, in order, and Kinesis's reason."""
        answer = self._kinesis.call(
            "put_records", StreamName=self._stream, Records=[each.entry() for each in request]
        )
        again: list[_Record] = []
        failed: set[str] = set()
        code = ""
        for record, result in zip(request, answer["Records"], strict=True):
            if result.get("ErrorCode"):
                failed.add(record.key)
                code = result["ErrorCode"]
            if record.key in failed:
                again.append(record)
        return again, code


def check_record_sizes(events: pa.RecordBatch | pa.Table, bytes_max: int, stream: str) -> None:
    """Raises ``InvalidError`` for an event that makes too large a record."""
    largest: int = pc.max(pc.binary_length(events.column("value"))).as_py() or 0
    if largest + 4 * _KEY_MAX <= bytes_max:
        return
    for record in _records(events):
        _check_size(record, bytes_max, stream)


def _check_size(record: _Record, bytes_max: int, stream: str) -> None:
    if record.size > bytes_max:
        raise InvalidError(
            f"kinesis stream `{stream}`: an event with key `{record.key[:80]}` has "
            f"{record.size} bytes, at most {bytes_max} are allowed in a record: leave it out, "
            "or raise the stream's maximum record size",
            refused="size",
        )


def partition_key(key: bytes | None, event_id: str | None, value: bytes | None) -> str:
    """Returns the partition key of an event; always the same for the same event."""
    if key:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            return _hash_text(key)
        return text if len(text) <= _KEY_MAX else _hash_text(key)
    if event_id:
        return event_id if len(event_id) <= _KEY_MAX else _hash_text(event_id.encode())
    return _hash_text(value or b"")


def _records(events: pa.RecordBatch | pa.Table) -> Iterator[_Record]:
    names = events.schema.names
    keys, ids, values, headers = (
        events.column(name).to_pylist() if name in names else [None] * events.num_rows
        for name in ("key", "id", "value", "headers")
    )
    for key, event_id, value, pairs in zip(keys, ids, values, headers, strict=True):
        yield _Record(partition_key(key, event_id, value), value or b"", _hash_key(pairs))


def _hash_key(headers: Iterable[Mapping[str, Any]] | None) -> str | None:
    for each in headers or ():
        if each["name"] == HASH_KEY and each["value"]:
            text = each["value"].decode(errors="replace")
            if text.isascii() and text.isdecimal() and int(text) < _HASH_END:
                return str(int(text))
    return None


def _request(waiting: deque[_Record], room: int) -> list[_Record]:
    """Returns records from the front that fit into one request; at least one."""
    request: list[_Record] = []
    size = 0
    while waiting and len(request) < room:
        size += waiting[0].size
        if request and size > _REQUEST_BYTES:
            break
        request.append(waiting.popleft())
    return request


def _hash_text(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class KinesisSettings:
    """How events get into Kinesis; plain values."""

    store: str  # URL of the home's store, which stages the segments
    incarnation: str  # of the stream
    record_bytes_max: int


def open_kinesis(address: Address, *, environ: Mapping[str, str], store: str) -> KinesisSink:
    """Opens the sink at ``kinesis://STREAM?region=…&endpoint_url=…``. Raises ``NotFoundError``."""
    place = parse_kinesis_address(address, environ, "sink")
    info, _ = Kinesis(place).describe()
    return KinesisSink(place, KinesisSettings(store, info.incarnation, info.record_bytes_max))


class KinesisSink:
    """A Kinesis stream. Pickles without secrets; writers need none."""

    def __init__(
        self,
        place: KinesisAddress,
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

    def publish(self, manifest: Manifest) -> int:
        """Implements ``Sink.publish``, except that a second call stores the events twice.

        Raises ``NotFoundError`` if the stream was deleted, or deleted and created again.
        """
        if not manifest.written:
            return 0
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
        return 0

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
                "driver has put it there and continues, or it was deleted"
            ) from exc


def _reopen(url: str, settings: KinesisSettings) -> KinesisSink:
    """Opens the sink in another process, with the credentials of that process."""
    environ = os.environ  # noqa: TID251 - a worker reads its own environment
    return KinesisSink(parse_kinesis_address(parse_address(url), environ, "sink"), settings)


_: type[TargetSink] = KinesisSink


def open_kinesis_playback(address: Address, setting: SinkContext) -> KinesisPlaybackSink:
    """Opens the sink at ``kinesis://STREAM?region=…``. Raises ``NotFoundError``."""
    backoff = _BRIEF if setting.is_brief else None
    return KinesisPlaybackSink(open_writer(address.text, environ=setting.environ, backoff=backoff))


class KinesisPlaybackSink:
    """A Kinesis stream."""

    lot_events = 5_000
    lot_bytes = None

    def __init__(self, writer: KinesisWriter) -> None:
        self._writer = writer

    def check(self, event: Event, now_ms: int) -> None:
        """Raises ``InvalidError`` for an event that is too large."""
        self._writer.check(event)

    def put(self, lot: Lot) -> None:
        self._writer.put(lot.batch)

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Does nothing: each put is complete."""


_is_forward_sink: type[ForwardSink] = KinesisPlaybackSink
