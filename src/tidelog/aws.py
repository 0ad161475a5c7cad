"""Functions of AWS Lambda: each of them makes a handler, for a module that Lambda calls.

The home is the one that ``TIDELOG_HOME`` names. A handler raises what fails, so Lambda or the
service that called it tries again. This room does not know how anything is stored.

**Consumers.** A function is notified, reads a partition once, and asks to be called again. A call
gets notifications (``{"topic": …, "partition": …, "offset": …}``) of a topic's target ``lambda:``,
or of its target ``sns:`` by a subscription of the function, or of a queue between the two. For each
partition that they name:

1. Read up to ``max_events`` of the consumer's next events, and give each to ``handle``. The cursor
   moves after each of them. An error of ``handle`` ends this partition, and its event comes again.
   So does the end of the call's time, which is looked at before each event.
2. If there are more, notify the topic's targets, so that another call goes on.
3. If another reader has the partition, look until it shows that it is alive: then leave it the
   rest, since it does step 2 at its own end, after the event that we were notified of. A reader
   that shows nothing for 1.5 times ``lease_ttl_ms`` is dead, and this call takes over.

An error of one partition, or a message that is no notification, does not stop the others. The call
raises it at its end, so the service retries the whole call.

A call that dies has handled what its cursor says. Lambda retries it, and its lease ends by step 3.

**Scribes.** A message of the queue is one turn of maintenance of one home. A message ``{}`` is for
the home of the settings. ``{"replica": "NAME"}`` is for the home that ``TIDELOG_HOMES`` gives this
name: a JSON object of config strings by name. So one function serves several homes, and a schedule
with a message for each of them decides how often. A turn that fails raises after the turns of all
messages, so the queue gives its messages again; the message of a turn that never ran expires.

**Ingest.** Functions append records of a Kinesis stream, and pixels of an HTTP API. A batch of
records is appended under a key of its own: its stream, shard, and first and last number. Lambda
retries a batch as it was, so a retry stores nothing twice, and ids are those that a pump gives
(``connectors.kinesis``). Records that a producer library has put together are taken apart.

A pixel is answered when its event is durable. The API has no tokens, so the function names the
topics that it appends to, and a request cannot choose the id of its event.

**Playbacks.** A call says what to play, as ``tidelog playback --params`` does:
``{"topic": …, "start": …, "end": …, "to": …, "resume": …}``; times are text, or milliseconds since
1970. It logs a line for each slot, and ``Success`` at the end. Shortly before its time is over it
stops. A playback under a name (``resume``) goes on where it was when it is called again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from tidelog.backends import real_world
from tidelog.errors import InvalidError, TidelogError, UnavailableError, raise_first
from tidelog.home import Home, World, open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.handler import ReadOnceResult
from tidelog.log.consumer.leases import Start, read_lease
from tidelog.log.notifier import Notification
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model.decoding import decode_json
from tidelog.model.event import Event, to_iso
from tidelog.model.topic import check_topic_name
from tidelog.playback.play import SlotCount
from tidelog.server.api import pixel_event as pixel
from tidelog.server.options import ServeOptions

__all__ = [
    "LambdaHandler",
    "consumer_handler",
    "pixel_handler",
    "playback_handler",
    "pump_handler",
    "scribe_handler",
]

LambdaHandler = Callable[[Mapping[str, Any], Any], dict[str, Any]]
"""What Lambda calls: with an event and the call's context; it returns JSON."""

_LOOK_S = 0.5  # between two looks at another reader
_MARGIN_MS = 10_000  # a call that has less time left starts nothing more
_UNLIMITED_MS = 2 * _MARGIN_MS  # the time that is left of a call without a context


class _TimeOver(Exception):  # noqa: N818 - not an error: another call goes on
    """The time of a call is over before the next event."""


class _CallTime:
    """The time of one call, in which it handles one event at least."""

    def __init__(self, context: Any) -> None:
        self.left_ms = getattr(context, "get_remaining_time_in_millis", lambda: _UNLIMITED_MS)
        self._margin_ms = min(_MARGIN_MS, self.left_ms() // 2)  # a call may be short
        self._handled = 0

    @property
    def is_over(self) -> bool:
        return bool(self.left_ms() < self._margin_ms)

    def handler(self, handle: Callable[[Event], object]) -> Callable[[Event], None]:
        """Returns a handler that raises ``_TimeOver`` before an event that comes too late."""

        def timed(event: Event) -> None:
            if self._handled and self.is_over:
                raise _TimeOver
            handle(event)
            self._handled += 1

        return timed


class _Wanted(NamedTuple):
    topic: str
    partition: int


def consumer_handler(
    handle: Callable[[Event], object],
    name: str,
    *,
    start: Start = "earliest",
    max_events: int = 1_000,
    home: str | None = None,
    world: World | None = None,
) -> LambdaHandler:
    """Returns a handler for Lambda that gives each event of the consumer ``name`` to ``handle``.

    A call handles up to ``max_events`` of each partition that it is notified of, and stops earlier
    when its time ends. It returns what it did with each. ``home`` is a folder or config string; by
    default the one of the settings.
    """
    if max_events < 1:
        raise InvalidError(f"consumer `{name}`: max_events is {max_events}: give 1 or more")
    opened: list[Home] = []
    consumers: dict[str, Consumer] = {}

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        if not opened:
            opened.append(open_home(home, world=world))
        wanted, errors = _notified(event)
        time, found = _CallTime(context), []
        for each in wanted:
            try:
                topic = opened[0].topic(each.topic)
                consumer = consumers.get(topic.incarnation)
                if consumer is None:
                    consumer = opened[0].consumer(each.topic, name, start)
                    consumers[topic.incarnation] = consumer
                call = _Call(opened[0], consumer, name, each, time)
                found.append(call.read(handle, max_events))
            except Exception as exc:  # noqa: BLE001 - raised when the others are done
                errors.append(exc)
        raise_first(errors)
        return {"consumer": name, "partitions": found}

    return handler


class _Call:
    """The work of one call on one partition."""

    def __init__(
        self, home: Home, consumer: Consumer, name: str, wanted: _Wanted, time: _CallTime
    ) -> None:
        self._home = home
        self._consumer = consumer
        self._name = name
        self._wanted = wanted
        self._time = time

    def read(self, handle: Callable[[Event], object], max_events: int) -> dict[str, Any]:
        """Steps 1 to 3; returns what was done."""
        read = 0

        def counted(event: Event) -> None:
            nonlocal read
            timed(event)
            read += 1

        timed = self._time.handler(handle)
        try:
            result = self._consumer.read_once(self._wanted.partition, max_events, counted)
            if result["busy"]:
                result = self._wait(max_events, counted)
        except _TimeOver:
            result = {"events_read": read, "done": False, "busy": False}
        is_notified = not result["done"] and not result["busy"]
        if is_notified:
            self._home.notify(*self._wanted)
        done = {"events_read": read, "done": result["done"], "busy": result["busy"]}
        return {**self._wanted._asdict(), **done, "notified_again": is_notified}

    def _wait(self, max_events: int, handle: Callable[[Event], object]) -> ReadOnceResult:
        """Step 3; returns the result of a read, or that another reader is alive."""
        clock = self._home.context.clock
        end_s = clock.monotonic_s() + 2 * self._home.settings.lease_ttl_ms / 1000
        seen = self._lease_version()
        while clock.monotonic_s() < end_s and not self._time.is_over:
            clock.sleep(_LOOK_S)
            result = self._consumer.read_once(self._wanted.partition, max_events, handle)
            if not result["busy"] or self._lease_version() != seen:
                return result
        raise UnavailableError(
            f"consumer `{self._name}`: another reader has `{self._wanted.topic}/"
            f"{self._wanted.partition}` and does not move on: try again"
        )

    def _lease_version(self) -> str:
        topic = self._home.topic(self._wanted.topic)
        found = read_lease(self._home.context, topic, self._name, self._wanted.partition)
        return found[1] if found else ""


def _notified(event: Mapping[str, Any]) -> tuple[list[_Wanted], list[Exception]]:
    """Returns the partitions that a call is notified of, each once, in order; and what it cannot
    read.
    """
    found: dict[_Wanted, None] = {}
    errors: list[Exception] = []
    records = event.get("Records")
    for each in records if isinstance(records, list) else [None]:
        try:
            message = msgspec.json.encode(dict(event)) if each is None else _message(each)
            told = _decode(message)
        except InvalidError as exc:
            errors.append(exc)
        else:
            found[_Wanted(told.topic, told.partition)] = None
    return list(found), errors


def _message(record: Any) -> str:
    """Returns the message of a record of SNS or SQS. ``InvalidError`` for another service's."""
    known = record if isinstance(record, dict) else {}
    notice = known.get("Sns")
    message = notice.get("Message") if isinstance(notice, dict) else known.get("body")
    if not isinstance(message, str):
        raise InvalidError(
            "consumer function: was called with records of another service: "
            "subscribe it to the notifications of topics alone"
        )
    with contextlib.suppress(msgspec.MsgspecError):
        return decode_json(message, _Envelope).Message  # SNS put its own into a queue
    return message


class _Envelope(msgspec.Struct):
    Message: str


def _decode(message: bytes | str) -> Notification:
    try:
        return decode_json(message, Notification)
    except msgspec.MsgspecError as exc:
        raise InvalidError(
            f"consumer function: was called with something else than a notification: {exc}: "
            "give it topic, partition and offset"
        ) from exc


_HOMES = "TIDELOG_HOMES"  # no setting: those of a home do not know it


class _Message(msgspec.Struct):
    replica: str | None = None


def scribe_handler(world: World | None = None) -> LambdaHandler:
    """Returns a handler for Lambda that does a turn for each message that it is called with.

    Called with anything but messages of SQS, it does one turn of the home of the settings.
    """

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        here = world or real_world()
        records = event.get("Records")
        bodies = [each.get("body") for each in records] if isinstance(records, list) else ["{}"]
        others = {name: text for name, text in here.environ.items() if name != _HOMES}
        turns, errors = [], []
        for body in bodies:
            try:
                found = _home_of(str(body), here.environ)
                turns.append(_turn(found, replace(here, environ=others)))
            except Exception as exc:  # noqa: BLE001 - raised when the other homes had their turns
                errors.append(exc)
        raise_first(errors)
        return turns[0] if len(turns) == 1 else {"turns": turns}

    return handler


def _home_of(body: str, environ: Mapping[str, str]) -> str | None:
    """Returns the config string that a message is for; None for the home of the settings."""
    try:
        replica = decode_json(body, _Message).replica
        if replica is None:
            return None
        homes = decode_json(environ.get(_HOMES, "{}"), dict[str, str])
    except msgspec.MsgspecError as exc:
        raise InvalidError(
            f"scribe function: a message or TIDELOG_HOMES: {exc}: give the message "
            '{"replica": NAME}, and in TIDELOG_HOMES a JSON object of config strings'
        ) from exc
    if replica not in homes:
        raise InvalidError(
            f"scribe function: TIDELOG_HOMES has no home `{replica[:80]}`: give one of "
            f"{', '.join(sorted(homes)) or 'none so far'}"
        )
    return homes[replica]


def _turn(home: str | None, world: World) -> dict[str, Any]:
    with open_home(home, world=world) as opened:
        turn = opened.maintain()
    if turn is None:
        raise UnavailableError("another scribe of this home is at work: wait for its turn")
    if not turn.succeeded:
        errors = [each.error for each in turn.troubles]
        errors += [each.error for each in turn.swept.refused] if turn.swept else []
        why = "; ".join(map(str, errors)) or "the time was over: the next turn goes on"
        raise UnavailableError(f"the turn did not succeed: {why}")
    return {
        "topics": turn.topics,
        "journals": turn.compiled.journals,
        "erased": turn.erased,
        "objects_deleted": turn.swept.objects_deleted if turn.swept else 0,
    }


def pump_handler(
    topic: str, *, home: str | None = None, world: World | None = None
) -> LambdaHandler:
    """Returns a handler for Lambda that appends the records of a Kinesis event source to a topic.

    ``home`` is a folder or config string; by default the one of the settings.
    """
    check_topic_name(topic)
    opened: list[Home] = []

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        events, key = _records(event)
        if not opened:
            opened.append(open_home(home, world=world))
        if events:
            opened[0].watch(topic)
            # The headers that Tidelog adds do not count: a record may be as large as an event.
            append_once(opened[0].context, opened[0].topic(topic), key, events, own=True)
        return {"topic": topic, "events": len(events)}

    return handler


def _records(event: Mapping[str, Any]) -> tuple[list[Event], str]:
    """Returns the events of a batch, and the key under which they are appended."""
    try:
        records = event["Records"]
        events = [each for record in records for each in _events(record)]
        names = [str(records[at]["eventID"]) for at in (0, -1)] if records else []
    except (KeyError, OverflowError, TypeError, ValueError, binascii.Error) as exc:
        raise InvalidError(
            f"pump function: was called with something else than records of Kinesis ({exc}): "
            "map a stream to it"
        ) from exc
    arn = str(records[0]["eventSourceARN"]) if records else ""
    digest = hashlib.sha256("\n".join([arn, *names, str(len(records))]).encode())
    return events, f"kinesis {digest.hexdigest()}"


def _events(record: Mapping[str, Any]) -> Iterator[Event]:
    """Yields the event of a record, or those that are packed in it."""
    from tidelog.connectors.kinesis.client import (  # noqa: PLC0415 - needs the SDK
        HASH_KEY,
        SEQUENCE,
        SUB_SEQUENCE,
    )
    from tidelog.connectors.kinesis.reader import UserRecord, user_records  # noqa: PLC0415 - same

    found = record["kinesis"]
    data = base64.b64decode(found["data"], validate=True)
    sequence = str(found["sequenceNumber"])
    time_ms = int(float(found["approximateArrivalTimestamp"]) * 1000)
    inside = user_records(data)
    whole = [UserRecord(str(found["partitionKey"]), None, data)]
    for number, each in enumerate(inside or whole):
        headers = [(SEQUENCE, sequence.encode())]
        name = str(record["eventID"])  # shardId-…:sequence
        if inside is not None:
            headers.append((SUB_SEQUENCE, b"%d" % number))
            name += f":{number}"
        if each.hash_key is not None:
            headers.append((HASH_KEY, each.hash_key.encode()))
        digest = hashlib.sha256(str(record["eventSourceARN"]).encode())
        digest.update(name.encode())
        yield Event(
            each.data,
            each.key.encode(),
            digest.hexdigest(),
            time_ms,
            headers=(*headers, *each.tags),
        )


def pixel_handler(
    topics: Sequence[str],
    *,
    keep_headers: Sequence[str] = (),
    keep_request: bool = False,
    home: str | None = None,
    world: World | None = None,
) -> LambdaHandler:
    """Returns a handler for Lambda behind an HTTP API of API Gateway: ``GET /track/{topic}.gif``.

    ``/track.gif`` is the first of these topics, unless its query names another one. The options are
    those of ``tidelog serve``.
    """
    if not topics:
        raise InvalidError("pixel function: names no topic: give one")
    options = ServeOptions(public_pixels=tuple(topics), keep_headers=tuple(keep_headers))
    names = dict.fromkeys((*pixel.HEADERS_KEPT, *options.keep_headers))
    kept = pixel.KeptRequest(tuple((name, name.encode()) for name in names))
    opened: list[Home] = []

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        http = (event.get("requestContext") or {}).get("http") or {}
        path, method = str(event.get("rawPath", "")), str(http.get("method", ""))
        try:
            params = pixel.parse_query(_raw(event.get("rawQueryString", "")))
            topic = _topic(path, params.get("topic"), topics)
            if method != "GET" or topic is None:
                return _said(404, "not_found", "this function answers GET /track/{topic}.gif")
            pixel.is_durable(params)  # refuses other words; here it always is
            if "id" in params:
                return _said(403, "forbidden", "a pixel may not choose the id of its event")
            headers = {
                _raw(name).lower(): _raw(value)
                for name, value in (event.get("headers") or {}).items()
            }
            own = kept._replace(method=method, path=path) if keep_request else kept
            made = pixel.event_of_query(params, headers, http.get("sourceIp"), own)
            if not opened:
                opened.append(open_home(home, world=world))
            pixel.check_time(made, opened[0].context.clock.now_ms())
            position = opened[0].append(topic, [made])[0]
        except TidelogError as exc:
            if isinstance(exc, InvalidError):
                return _said(400, exc.kind, exc.message)
            if isinstance(exc, UnavailableError):
                return _said(503, exc.kind, "the home cannot be reached: try again")
            raise
        answered = {name.decode(): value.decode() for name, value in pixel.HEADERS}
        return {
            "statusCode": 200,
            "headers": {**answered, "tidelog-position": str(position)},
            "body": base64.b64encode(pixel.GIF).decode(),
            "isBase64Encoded": True,
        }

    return handler


def _topic(path: str, named: object, topics: Sequence[str]) -> str | None:
    """Returns the topic that a request names, if the function may append to it."""
    wanted: object = None
    if path == "/track.gif":
        wanted = topics[0] if named is None else named
    elif path.startswith("/track/") and path.endswith(".gif") and named is None:
        wanted = path[len("/track/") : -len(".gif")]
    return next((topic for topic in topics if topic == wanted), None)


def _raw(text: object) -> bytes:
    """Returns text as bytes; half a character, which is not UTF-8, becomes base64 in the event."""
    return str(text).encode("utf-8", "surrogatepass")


def _said(status: int, kind: str, message: str) -> dict[str, Any]:
    body = msgspec.json.encode({"error": {"kind": kind, "message": message}}).decode()
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return {"statusCode": status, "headers": headers, "body": body, "isBase64Encoded": False}


class _PlaybackCall(msgspec.Struct, forbid_unknown_fields=True):
    topic: str | None = None
    start: str | int | None = None
    end: str | int | None = None
    to: str | None = None
    resume: str | None = None


def playback_handler(
    topic: str | None = None,
    to: str | None = None,
    *,
    home: str | None = None,
    world: World | None = None,
) -> LambdaHandler:
    """Returns a handler for Lambda that plays a range of times; the last 15 minutes by default.

    ``topic`` and ``to`` are for calls that do not name their own.
    """

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        try:
            asked = decode_json(msgspec.json.encode(dict(event)), _PlaybackCall)
        except msgspec.MsgspecError as exc:
            names = ", ".join(_PlaybackCall.__struct_fields__)
            raise InvalidError(f"playback function: {exc}: give {names}") from exc
        what, where = asked.topic or topic, asked.to or to
        if what is None or where is None:
            raise InvalidError("playback function: was called without topic or to: give both")
        time = _CallTime(context)
        stop = threading.Event()

        def note(slot: SlotCount) -> None:
            first = "" if slot.first_ms is None else f": {to_iso(slot.first_ms)} [{slot.events}]"
            sys.stdout.write(f"{to_iso(slot.slot_ms)}{first}\n")
            if time.is_over:
                stop.set()

        with open_home(home, world=world) as opened:
            times = (asked.start, asked.end)
            played = opened.playback(
                what, *times, to=where, name=asked.resume, on_slot=note, stop=stop
            )
        sys.stdout.write("Success\n" if played.finished else "Stopped\n")
        return {"events": played.events, "slots": played.slots, "finished": played.finished}

    return handler
