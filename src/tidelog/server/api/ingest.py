"""``POST /topics/{topic}/events``: events in, positions out, once all are durable.

A body is one JSON event, a JSON array of them, JSON lines, or the bytes of one value with its key,
id, time and type in headers. Small bodies are sent from the event loop itself, which takes
microseconds; large ones from a thread. Requests share flushes; those with an ``Idempotency-Key``
are appended on their own, so that a repeat finds them (``log/producer/idempotent_append.py``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import msgspec

from tidelog.codec.event_json import event_of_line, json_problem
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnknownOutcomeError
from tidelog.home import Home
from tidelog.log.producer.flush import (
    EVENT_OVERHEAD_BYTES,
    SendFuture,
    flushes_of,
    positions_of,
)
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model import limits as model_limits
from tidelog.model.decoding import json_items, too_deep
from tidelog.model.event import Event, Position, Positions, check_event, parse_timestamp
from tidelog.model.topic import Topic
from tidelog.server.api.open_topics import OpenTopic, OpenTopics
from tidelog.server.http.auth import Admission
from tidelog.server.http.errors import MediaTypeError, TooLargeError
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.request import EVENT_BYTES, HEADER_BYTES, content_type

__all__ = ["IDEMPOTENCY_KEY", "IF_ABSENT", "Headers", "Ingest"]


IDEMPOTENCY_KEY = "Idempotency-Key"
IF_ABSENT = "Tidelog-If-Absent"
_IDEMPOTENCY_KEY_MAX = 255  # bytes
_SMALL_BYTES = 65_536  # a body up to this size is sent from the loop
_LARGE_BYTES = 1 << 20  # beyond this size not even its lines are counted in the loop
_FEW_EVENTS = 200  # up to this number the loop itself handles them: a millisecond at most
_LOCKED_BYTES = _SMALL_BYTES + _FEW_EVENTS * EVENT_OVERHEAD_BYTES  # sent under one lock
_MANY_EVENTS = 5_000  # beyond this number they have threads of their own
_WORK_BYTES = 200  # of a body take as long to parse as an event does

_JSON = frozenset((b"application/json",))
_LINES = frozenset((b"application/x-ndjson", b"application/jsonl", b"application/json-lines"))
_OF_RAW = frozenset((b"tidelog-id", b"tidelog-key", b"tidelog-time", b"tidelog-type"))
_RAW = frozenset((b"", b"application/octet-stream", b"text/plain"))

_array = msgspec.json.Decoder(list[msgspec.Raw])
Headers = Mapping[bytes, bytes]
P = ParamSpec("P")
T = TypeVar("T")


class Ingest:
    """Appends what requests bring."""

    def __init__(
        self,
        home: Home,
        topics: OpenTopics,
        threads: ServerThreads,
        check: Callable[[Admission], None],
        link: Callable[[], object | None] = lambda: None,
    ) -> None:
        self._check_admission = check  # whether what let a request in still does
        self._home = home
        self._topics = topics
        self._threads = threads
        self._pool = threads.pool
        self._link = link  # to the span of the present request
        self._event_bytes_max = home.context.log_settings.event_bytes_max

    async def append(
        self,
        topic: str,
        headers: Headers,
        body: bytes,
        charge: Callable[[int], None],
        admission: Admission,
    ) -> Sequence[Position]:
        """Stores the events of a body; refuses all or none of them. Returns their positions.

        ``admission`` is checked again just before, since a turn at a thread may take long.
        ``charge`` counts the memory that the events take, and may refuse them. Idempotency keys are
        separate for each token.
        """
        opened = self._topics.get(topic) or await self._topics.open(topic)
        key = headers.get(b"idempotency-key")
        if_absent = _if_absent(headers)
        if key is None and not if_absent and _is_small(headers, body):
            return await self.send(opened, self._events(headers, body), admission)
        with self._topics.using(opened):  # other topics may be opened while it is parsed
            events = await self._parse(headers, body, charge)
            try:
                if if_absent:
                    return await self._threads.run(self._append_absent, topic, events, admission)
                if key is None:
                    return await self.send(opened, events, admission)
                by = "" if admission.token is None else admission.token.id
                once = _idempotency_key(key, by)
                return await self._append_once(opened, once, events, admission)
            finally:
                if _are_many(events):
                    self._free(events)

    async def _parse(
        self, headers: Headers, body: bytes, charge: Callable[[int], None]
    ) -> list[Event]:
        """Returns the events of a body that is large, or whose request is not a plain append."""
        if _is_small(headers, body):
            return await self._threads.run(self._events, headers, body)
        if len(body) <= _LARGE_BYTES:
            count = _events_at_most(headers, body)
        else:
            count = await self._threads.run(_events_at_most, headers, body)
        charge(len(body) + EVENT_BYTES * count)
        work = count + len(body) // _WORK_BYTES
        events = await self._run(work, self._events, headers, body)
        return await self._charged(events, charge)

    async def _charged(self, events: list[Event], charge: Callable[[int], None]) -> list[Event]:
        """Returns events of a large body, after a charge for what their headers take."""
        count = await self._run(len(events), _headers_of, events)
        try:
            charge(HEADER_BYTES * count)
        except TidelogError:
            self._free(events)
            raise
        return events

    async def events_of(
        self, headers: Headers, body: bytes, charge: Callable[[int], None]
    ) -> list[Event]:
        """Returns the events of a body, each within its limits; the rest as in :meth:`append`."""

        def parse() -> list[Event]:
            events = self._events(headers, body)
            for event in events:
                self.check(event)
            return events

        if len(body) <= _SMALL_BYTES and (count := _events_at_most(headers, body)) <= _FEW_EVENTS:
            return parse()
        count = await self._threads.run(_events_at_most, headers, body)
        charge(len(body) + EVENT_BYTES * count)
        events = await self._run(count + len(body) // _WORK_BYTES, parse)
        return await self._charged(events, charge)

    async def with_events(
        self, events: list[Event], admission: Admission, take: Callable[[list[Event]], T]
    ) -> T:
        """Returns what ``take`` returns for events; in a thread if they are many, and frees them.

        ``admission`` is checked again just before, since a turn at a thread may take long.
        """

        def checked() -> T:
            self._check_admission(admission)
            return take(events)

        if not _are_many(events):
            return checked()
        try:
            return await self._run(len(events), checked)
        finally:
            self._free(events)

    async def answer(self, topic: str, positions: Sequence[Position]) -> bytes:
        """Returns the body of a success: the positions of the events."""
        if len(positions) <= _FEW_EVENTS:
            return _answer(topic, positions)
        return await self._run(len(positions), _answer, topic, positions)

    async def _run(self, events: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call about this many events in a thread; about many in threads of their own."""
        if events <= _MANY_EVENTS:
            return await self._threads.run(call, *args, **kwargs)
        return await self._threads.run_large(call, *args, **kwargs)

    async def send(
        self, opened: OpenTopic, events: list[Event], admission: Admission
    ) -> Sequence[Position]:
        """Stores events through the shared producer. Returns their positions."""

        async def store(topic: OpenTopic) -> Sequence[Position]:
            with self._topics.using(topic):
                if self._fit_into_loop(events):
                    sent = self.enter(topic, events, admission)
                else:
                    sent = await self._run(len(events), self.enter, topic, events, admission)
            return await self._durable(topic, sent)

        return await self._reopening(opened, store)

    def enter(
        self, opened: OpenTopic, events: list[Event], admission: Admission
    ) -> list[SendFuture]:
        """Puts events into the producer's buffer, if it has room for all of them.

        Waits for nothing. Raises ``BusyError``.
        """
        sizes = [self.check(event) + EVENT_OVERHEAD_BYTES for event in events]
        whole = sum(sizes)
        self._check_admission(admission)
        sent: list[SendFuture] = []
        try:
            if len(events) == 1 or (len(events) <= _FEW_EVENTS and whole <= _LOCKED_BYTES):
                with opened.entering:
                    opened.check_room(whole)
                    for event in events:
                        sent.append(opened.send(event))  # noqa: PERF401 - an error leaves those before
            else:
                with opened.promised_room(whole) as promise:
                    for event, size in zip(events, sizes, strict=True):
                        sent.append(opened.send(event))
                        promise.left -= size
        except TidelogError as exc:
            if not sent:
                raise
            raise UnknownOutcomeError(
                f"append to `{opened.topic.name}`: {len(sent)} of {len(events)} events may be "
                f"stored, then: {exc}"
            ) from exc
        return sent

    def _fit_into_loop(self, events: list[Event]) -> bool:
        """Returns whether the loop itself may check these events and send them."""
        return len(events) <= _FEW_EVENTS and sum(map(self.check, events)) <= _SMALL_BYTES

    async def _durable(self, opened: OpenTopic, sent: list[SendFuture]) -> Sequence[Position]:
        """Returns the positions of events, once they are durable."""
        is_small = len(sent) <= _FEW_EVENTS
        flushes = flushes_of(sent) if is_small else await self._run(len(sent), flushes_of, sent)
        if (link := self._link()) is not None:
            for flush, _ in flushes:
                flush.links.append(link)
        try:
            for flush, _ in flushes:
                await opened.wait_durable(flush)
            if len(sent) == 1 and sent[0].flush.error is None:  # the common case
                return (sent[0].flush.positions()[sent[0].index],)
            if is_small:
                return positions_of(opened.topic.name, flushes)
            return await self._run(len(sent), positions_of, opened.topic.name, flushes)
        except TidelogError as exc:
            raise exc.with_traceback(None) from exc.__cause__  # other requests raise it too
        finally:
            if not is_small:
                self._free(sent)

    async def _reopening(self, opened: OpenTopic, call: Callable[[OpenTopic], Awaitable[T]]) -> T:
        """Returns what a call returns. Opens a topic again that was made again since."""
        try:
            return await call(opened)
        except NotFoundError:
            self._topics.drop(opened)
            return await call(await self._topics.open(opened.topic.name))

    def _free(self, many: list[Any]) -> None:
        """Frees very many objects in a thread, since that takes milliseconds."""
        with contextlib.suppress(RuntimeError):  # the server stops, and has no threads any more
            self._pool.submit(many.clear)

    async def _append_once(
        self, opened: OpenTopic, key: str, events: list[Event], admission: Admission
    ) -> Sequence[Position]:
        def append(topic: Topic) -> Positions:
            for event in events:
                self.check(event)
            self._check_admission(admission)
            return append_once(self._home.context, topic, key, events)

        return await self._reopening(opened, lambda each: self._threads.run(append, each.topic))

    def _append_absent(
        self, topic: str, events: list[Event], admission: Admission
    ) -> Sequence[Position]:
        for event in events:
            self.check(event)
        self._check_admission(admission)
        return self._home.append(topic, events, if_absent=True)

    def _events(self, headers: Headers, body: bytes) -> list[Event]:
        """Returns the events of a body. Raises ``InvalidError`` or ``MediaTypeError``."""
        kind = content_type(headers)
        if kind not in _RAW and not _OF_RAW.isdisjoint(headers):
            given = ", ".join(name.decode() for name in sorted(_OF_RAW.intersection(headers)))
            raise InvalidError(
                f"header {given}: is for a body that is the value: put it into the JSON event"
            )
        if kind in _JSON:
            if body.lstrip()[:1] != b"[":
                return [self._event_of_line(body)]
            if len(body) > _SMALL_BYTES and json_items(body) > model_limits.SEGMENT_EVENTS_MAX:
                raise _too_many()
            try:
                lines: Sequence[Any] = _array.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                problem = json_problem(body, exc)
                raise InvalidError(f"body: is not JSON: {problem}: give a list of events") from exc
            except RecursionError as exc:  # much deeper than an event may be
                raise too_deep("body") from exc
        elif kind in _LINES:
            lines = _lines_of(body)
        elif kind in _RAW:
            return [_event_of_headers(headers, body)]
        else:
            raise MediaTypeError(
                f"header content-type: is `{kind[:80].decode('latin-1')}`: send application/json, "
                "application/x-ndjson, or application/octet-stream for the bytes of one value"
            )
        if not lines:
            raise InvalidError("body: holds no event: give one or more")
        if len(lines) > model_limits.SEGMENT_EVENTS_MAX:
            raise _too_many()
        whole = body if kind in _LINES else None
        return [self._event_of_line(line, index, whole) for index, line in enumerate(lines)]

    def _event_of_line(
        self, line: bytes, index: int | None = None, lines: bytes | None = None
    ) -> Event:
        """Returns an event: the body itself, or an item by its index in a list or in ``lines``."""
        try:
            return event_of_line(line, self._event_bytes_max)
        except InvalidError as exc:
            if "bytes" in exc.context:
                raise self._too_large(exc.context["bytes"]) from exc
            if index is None:
                raise InvalidError(f"body: {exc}", **exc.context) from exc
            what = "event" if lines is None else "line"
            number = index + 1 if lines is None else _line_number(lines, index)
            raise InvalidError(f"{what} {number}: {exc}", **exc.context, **{what: number}) from exc

    def check(self, event: Event) -> int:
        """Returns how many bytes an event has. Raises ``InvalidError`` or ``TooLargeError``."""
        size = check_event(event, sys.maxsize)
        if size > self._event_bytes_max:
            raise self._too_large(size)
        return size

    def _too_large(self, size: int) -> TooLargeError:
        return TooLargeError(
            f"event: has {size} bytes, at most {self._event_bytes_max} are allowed: split it",
            bytes_max=self._event_bytes_max,
        )


def _are_many(events: list[Event]) -> bool:
    """Returns whether it takes milliseconds to free them."""
    return len(events) > _FEW_EVENTS or _headers_of(events) > _MANY_EVENTS


def _headers_of(events: list[Event]) -> int:
    """Returns how many headers events have together."""
    return sum(len(event.headers) for event in events)


def _events_at_most(headers: Headers, body: bytes) -> int:
    """Returns how many events a body has at most, without parsing it."""
    kind = content_type(headers)
    if kind in _LINES:
        return min(body.count(b"\n") + 1, model_limits.SEGMENT_EVENTS_MAX)
    return min(body.count(b"{"), model_limits.SEGMENT_EVENTS_MAX) if kind in _JSON else 1


def _is_small(headers: Headers, body: bytes) -> bool:
    """Returns whether the loop itself may handle a body."""
    return len(body) <= _SMALL_BYTES and _events_at_most(headers, body) <= _FEW_EVENTS


def _answer(topic: str, positions: Sequence[Position]) -> bytes:
    rows = b",".join(
        [b'{"partition":%d,"offset":%d}' % (at.partition, at.offset) for at in positions]
    )
    return b'{"topic":"%s","positions":[%s]}' % (topic.encode(), rows)


def _line_number(body: bytes, index: int) -> int:
    """Returns the number, from 1, of the line after ``index`` others that are not blank."""
    filled = (number for number, line in enumerate(body.split(b"\n"), 1) if line.strip())
    return next(islice(filled, index, None))


def _lines_of(body: bytes) -> list[bytes]:
    """Returns the lines that are not blank, and at most a few more than an append may have.

    Splits a large body piece by piece, since one call about it would hold up all other threads.
    """
    found: list[bytes] = []
    at = 0
    while at < len(body) and len(found) <= model_limits.SEGMENT_EVENTS_MAX:
        end = body.find(b"\n", at + _SMALL_BYTES) + 1 or len(body)
        found += [line for line in body[at:end].split(b"\n") if line.strip()]
        at = end
    return found


def _too_many() -> TooLargeError:
    return TooLargeError(
        f"body: holds more than {model_limits.SEGMENT_EVENTS_MAX} events: send it in parts"
    )


def _event_of_headers(headers: Headers, body: bytes) -> Event:
    """Returns the event whose value is the body."""
    time = _text(headers, b"tidelog-time")
    key = headers.get(b"tidelog-key")
    return Event(
        value=body,
        key=key,
        id=_text(headers, b"tidelog-id"),
        timestamp=None if time is None else parse_timestamp(time),
        type=_text(headers, b"tidelog-type"),
    )


def _text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as exc:
        raise InvalidError(f"header {name.decode()}: is not UTF-8: give text") from exc


def _if_absent(headers: Headers) -> bool:
    given = headers.get(b"tidelog-if-absent")
    if given is None:
        return False
    if given != b"true":
        raise InvalidError(f"header {IF_ABSENT}: give `true`, or leave it out")
    if b"idempotency-key" in headers:
        raise InvalidError(f"headers {IF_ABSENT} and {IDEMPOTENCY_KEY}: give one of them")
    return True


def _idempotency_key(key: bytes, by: str) -> str:
    if not 1 <= len(key) <= _IDEMPOTENCY_KEY_MAX or not key.isascii():
        raise InvalidError(
            f"header {IDEMPOTENCY_KEY}: give 1 to {_IDEMPOTENCY_KEY_MAX} ASCII characters"
        )
    return f"{by}:{key.decode()}" if by else key.decode()
