"""Writes events to a Kinesis stream, in the order of each partition key, at least once.

Kinesis does not detect repeated puts: an unanswered put is sent again and may be stored twice. A
put of many records may fail for some. Then the first failed record of a partition key is sent again
with every later record of that key. So the last records of a key are always in order, but some may
be stored twice.

Only the value and key of an event are sent: Kinesis has no place for more, and none for null, so a
null value is sent as empty. The partition key is the event's key, otherwise its id, otherwise a
hash of its value. A key that Kinesis refuses, not UTF-8 or over 256 characters, is hashed. Events
that came from Kinesis with an explicit hash key are sent with it.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.clock import Clock, SystemClock, system_random
from tidelog.connectors.kinesis.client import HASH_KEY, Kinesis, parse_place
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.address import parse_address
from tidelog.model.backoff import Backoff

__all__ = ["KinesisWriter", "check_record_sizes", "open_writer", "partition_key"]

_RECORDS_MAX = 500  # of one request
_REQUEST_BYTES = 5 << 20  # of its records with their keys; a larger record goes alone
_KEY_MAX = 256  # characters
_HASH_END = 1 << 128
_BACKOFF = Backoff(attempts=12, base_ms=100, max_ms=5_000)  # attempts without any progress


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


def open_writer(url: str, *, environ: Mapping[str, str]) -> KinesisWriter:
    """Opens a writer to ``kinesis://STREAM?region=…``. Raises ``NotFoundError``."""
    place = parse_place(parse_address(url), environ, "sink")
    kinesis = Kinesis(place)
    return KinesisWriter(kinesis, place.stream, kinesis.describe()[0].record_bytes_max)


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
    ) -> None:
        self._kinesis = kinesis
        self._stream = stream
        self._record_bytes_max = record_bytes_max
        self._clock = clock or SystemClock()
        self._random = source or system_random()

    def put(self, events: pa.RecordBatch | pa.Table) -> int:
        """Puts events in stored or event columns. Returns how many; all are durable then.

        Raises ``InvalidError`` before putting anything if an event is too large. Raises
        ``UnavailableError`` if Kinesis accepts no more; its context has the number of stored events
        as ``put``.
        """
        check_record_sizes(events, self._record_bytes_max, self._stream)
        waiting = deque(_records(events))
        delays = _BACKOFF.delays_s(self._random)
        total, left, room = len(waiting), len(waiting), _RECORDS_MAX
        while waiting:
            request = _request(waiting, room)
            again, code = self._send(request)
            waiting.extendleft(reversed(again))
            if len(waiting) < left:
                left, delays = len(waiting), _BACKOFF.delays_s(self._random)
            if not again:
                room = min(_RECORDS_MAX, 2 * room)
                continue
            room = max(1, len(request) // 2)  # so that fewer are sent twice
            delay_s = next(delays, None)
            if delay_s is None:
                raise UnavailableError(
                    f"kinesis stream `{self._stream}`: takes no more, {code}: {total - left} of "
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
        if record.size > bytes_max:
            raise InvalidError(
                f"kinesis stream `{stream}`: an event with key `{record.key[:80]}` has "
                f"{record.size} bytes, at most {bytes_max} are allowed in a record: leave it out, "
                "or raise the stream's maximum record size"
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
