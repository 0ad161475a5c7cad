"""Functions of AWS Lambda: each of them makes a handler, for a module that Lambda calls.

The home is the one that ``TIDELOG_HOME`` names. A handler raises what fails, so Lambda or the
service that called it tries again. This room does not know how anything is stored.

A consumer as a function: it is notified, reads a partition once, and asks to be called again.

A call gets notifications (``{"topic": …, "partition": …, "offset": …}``) of a topic's target
``lambda:``, or of its target ``sns:`` by a subscription of the function, or of a queue between the
two. For each partition that they name:

1. Read up to ``max_events`` of the consumer's next events, and give each to ``handle``. The cursor
   moves after each of them. An error of ``handle`` ends the call, and its event comes again.
2. If there are more, notify the topic's targets, so that another call goes on.
3. If another reader has the partition, look until it shows that it is alive: then leave it the
   rest, since it does step 2 at its own end, after the event that we were notified of. A reader
   that shows nothing for 1.5 times ``lease_ttl_ms`` is dead, and this call takes over.

A call that dies has handled what its cursor says. Lambda retries it, and its lease ends by step 3.

The scribe as a function: a message of its queue is one turn of maintenance of one home.

A message ``{}`` is for the home of the settings. ``{"replica": "NAME"}`` is for the home that
``TIDELOG_HOMES`` gives this name: a JSON object of config strings by name. So one function serves
several homes, and a schedule with a message for each of them decides how often. A turn that fails
raises, so the queue gives its message again; the message of a turn that nobody got to expires.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from tidelog.errors import InvalidError, UnavailableError
from tidelog.home import Home, World, open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Start, read_lease
from tidelog.log.notifier import Notification
from tidelog.model.decoding import decode_json
from tidelog.model.event import Event
from tidelog.opening import real_world

__all__ = ["LambdaHandler", "consumer_handler", "scribe_handler"]

LambdaHandler = Callable[[Mapping[str, Any], Any], dict[str, Any]]
"""What Lambda calls: with an event and the call's context; it returns JSON."""

_LOOK_S = 0.5  # between two looks at another reader
_LOT = 100  # events between two looks at the time that is left
_MARGIN_MS = 10_000  # a call that has less time left starts nothing more


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
        found = []
        for wanted in _notified(event):
            topic = opened[0].topic(wanted.topic)
            consumer = consumers.get(topic.incarnation)
            if consumer is None:
                consumer = opened[0].consumer(wanted.topic, name, start)
                consumers[topic.incarnation] = consumer
            call = _Call(opened[0], consumer, name, wanted, context)
            found.append(call.read(handle, max_events))
        return {"consumer": name, "partitions": found}

    return handler


class _Call:
    """The work of one call on one partition."""

    def __init__(
        self, home: Home, consumer: Consumer, name: str, wanted: _Wanted, context: Any
    ) -> None:
        self._home = home
        self._consumer = consumer
        self._name = name
        self._wanted = wanted
        self._left_ms = getattr(context, "get_remaining_time_in_millis", lambda: _MARGIN_MS * 2)

    def read(self, handle: Callable[[Event], object], max_events: int) -> dict[str, Any]:
        """Steps 1 to 3; returns what was done."""
        read, result = 0, {"done": False, "busy": False}
        while read < max_events and not result["done"] and not result["busy"]:
            lot = min(_LOT, max_events - read)
            result = self._consumer.read_once(self._wanted.partition, lot, handle)
            if result["busy"] and not read:
                result = self._wait(lot, handle)
            read += result["events_read"]
            if self._left_ms() < _MARGIN_MS:
                break
        is_notified = not result["done"] and not result["busy"]
        if is_notified:
            self._home.notify(*self._wanted)
        done = {"events_read": read, "done": result["done"], "busy": result["busy"]}
        return {**self._wanted._asdict(), **done, "notified_again": is_notified}

    def _wait(self, lot: int, handle: Callable[[Event], object]) -> dict[str, Any]:
        """Step 3; returns the result of a read, or that another reader is alive."""
        clock = self._home.context.clock
        end_s = clock.monotonic_s() + 2 * self._home.settings.lease_ttl_ms / 1000
        seen = self._lease_version()
        while clock.monotonic_s() < end_s and self._left_ms() >= _MARGIN_MS:
            clock.sleep(_LOOK_S)
            result = self._consumer.read_once(self._wanted.partition, lot, handle)
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


def _notified(event: Mapping[str, Any]) -> list[_Wanted]:
    """Returns the partitions that a call is notified of, each once, in order."""
    found = {_Wanted(each.topic, each.partition): None for each in _notifications(event)}
    return list(found)


def _notifications(event: Mapping[str, Any]) -> Iterator[Notification]:
    """Yields what an event of a target, of SNS or of SQS holds."""
    records = event.get("Records")
    if not isinstance(records, list):
        yield _decode(msgspec.json.encode(dict(event)))
        return
    for record in records:
        message = _message(record)
        if message is None:
            raise InvalidError(
                "consumer function: was called with records of another service: "
                "subscribe it to the notifications of topics alone"
            )
        yield _decode(message)


def _message(record: Any) -> str | None:
    """Returns the message of a record of SNS or SQS; None for one of another service."""
    if not isinstance(record, dict):
        return None
    notice = record.get("Sns")
    message = notice.get("Message") if isinstance(notice, dict) else record.get("body")
    if not isinstance(message, str):
        return None
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
        turns = [
            _turn(_home_of(str(body), here.environ), replace(here, environ=others))
            for body in bodies
        ]
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
