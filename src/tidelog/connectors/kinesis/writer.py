"""Events into a stream of Kinesis, in the order of each partition key, and at least once.

Kinesis knows no repeated puts: what was sent and not answered is sent again, and may be there
twice. A put of many may fail for some of its records. Then the first that failed of a partition key
is sent again with all of that key that came behind it, so that the last ones of a key are always
in order; some of them are there twice then, too.

Only value and key of an event go: Kinesis has no place for more, and none for null, so a value that
is null is sent empty. The partition key is the event's key; else its id; else a hash of its value.
One that Kinesis would not take, as it is no UTF-8 or longer than 256 characters, is hashed. Events
that came out of Kinesis with an explicit hash key are sent with it.
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
_REQUEST_BYTES = 5 << 20  # of its records with their keys; a larger one goes alone
_KEY_MAX = 256  # characters
_HASH_END = 1 << 128
_BACKOFF = Backoff(attempts=12, base_ms=100, max_ms=5_000)  # without any progress


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
    """A writer to ``kinesis://STREAM?region=…``. ``NotFoundError`` when there is no such stream."""
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
        """Put events in stored or event columns; how many. When it returns, all are there.

        ``InvalidError``, with nothing put, for an event that is too large. ``UnavailableError``
        when Kinesis takes no more: some are there, and its context has their number as ``put``.
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
            room = max(1, len(request) // 2)  # so that less is sent twice
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
        """Send a request; what must be sent again, in order, and Kinesis's word for why."""
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
    """``InvalidError`` for an event that makes a record which is too large."""
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
    """The partition key of an event; always the same for the same event."""
    if key:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            return _hashed(key)
        return text if len(text) <= _KEY_MAX else _hashed(key)
    if event_id:
        return event_id if len(event_id) <= _KEY_MAX else _hashed(event_id.encode())
    return _hashed(value or b"")


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
    """As many from the front as there is room for in one request; at least one."""
    request: list[_Record] = []
    size = 0
    while waiting and len(request) < room:
        size += waiting[0].size
        if request and size > _REQUEST_BYTES:
            break
        request.append(waiting.popleft())
    return request


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
