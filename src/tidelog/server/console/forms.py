"""Forms that create a topic, append an event and correct one.

A form that cannot be accepted comes back as it was filled in, with each error beside its field.
What changes events is shown first, and done with ``sure``: an append carries a key of its own, so
that a form sent twice appends once; a correction carries a mark of the value that the person saw,
so that it never replaces another one.
"""

from __future__ import annotations

import binascii
import difflib
import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tidelog.coordination.audit import WHY_MAX
from tidelog.errors import AlreadyExistsError, InvalidError, NotFoundError, TidelogError
from tidelog.home import Home
from tidelog.model import defaults, limits
from tidelog.model.decoding import check_json_depth
from tidelog.model.event import Event, Headers, check_event, check_timestamp
from tidelog.model.times import duration_ms, moment_ms
from tidelog.model.topic import Topic, check_topic_name, partition_for
from tidelog.server.console.events import EventPages
from tidelog.server.console.format import Bytes, one_line, url
from tidelog.server.console.sampler import Sampler
from tidelog.server.console.session import Answer, Redirect, ShownPage, Visit
from tidelog.server.http.errors import status_of

__all__ = ["Fields", "FormPages"]

VALUE_MAX = 64_000  # characters of a value in a form
_KINDS = {"json": "JSON", "text": "text", "base64": "base64", "none": "none: a tombstone"}
_DIFF_LINES_MAX = 400
_FOLDED = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|^\n")  # what a browser's field does not keep
_TOPIC_FIELDS = {"name": "", "partitions": "1", "slot": defaults.TOPIC_SLOT}
_EVENT_FIELDS = ("kind", "value", "key", "id", "type", "time", "headers")

T = TypeVar("T")


@dataclass(slots=True)
class Fields:
    """The fields of a form, and what is wrong with each; an empty name is the form as a whole."""

    given: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, read: Callable[[], T]) -> T | None:
        """Returns what a field means; None, and its error, if it cannot be accepted."""
        try:
            return read()
        except TidelogError as exc:
            self.errors[name] = exc.message
            return None


class FormPages:
    """Creates topics, appends events and corrects them."""

    def __init__(self, home: Home, sampler: Sampler, events: EventPages) -> None:
        self._home = home
        self._sampler = sampler
        self._events = events

    # Create a topic.

    def topic_form(self, visit: Visit) -> Answer:
        """``GET /console/create-topic``"""
        return _show_topic_form(Fields(dict(_TOPIC_FIELDS)))

    def make_topic(self, visit: Visit) -> Answer:
        """``POST /console/create-topic``"""
        form = Fields({name: visit.text(name) for name in _TOPIC_FIELDS})
        name = form.given["name"]
        form.check("name", lambda: check_topic_name(name))
        partitions = form.check("partitions", lambda: _partitions(form.given["partitions"]))
        slot_ms = form.check("slot", lambda: _slot_ms(form.given["slot"]))
        if form.errors or partitions is None or slot_ms is None:
            return _show_topic_form(form)
        try:
            self._home.create_topic(name, partitions, slot=slot_ms, who=visit.session.who)
        except AlreadyExistsError:
            form.errors["name"] = f"topic `{name}`: exists already: choose another name"
            return _show_topic_form(form, 409)
        except InvalidError as exc:
            form.errors[""] = exc.message
            return _show_topic_form(form)
        self._sampler.expire()
        return Redirect(url("/console/topics", name))

    # Append an event.

    def produce_form(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/produce``"""
        topic = self._home.topic(visit.path["topic"])
        given = dict.fromkeys(_EVENT_FIELDS, "")
        given["key"] = visit.exact("key")
        return self._show_produce(topic, Fields({**given, "kind": "json"}))

    def produce(self, visit: Visit) -> Answer:
        """``POST /console/topics/{topic}/produce``: shows the event; ``sure`` appends it"""
        topic = self._home.topic(visit.path["topic"])
        given = {name: _exact(visit, name) for name in _EVENT_FIELDS}
        form = Fields({**given, "kind": given["kind"] or "json"})
        event = self._event(form, visit.now_ms)
        if event is None:
            return self._show_produce(topic, form, status=400)
        if not visit.form.get("sure"):
            return self._show_produce(topic, form, event, once=visit.text("once"))
        once = visit.text("once")
        if not once:
            raise InvalidError("produce: has no key: send it from its page")
        try:
            key = f"console {visit.session.who} {once}"  # no other token's
            (at,) = self._home.append_once(topic.name, key, [event])
        except (InvalidError, AlreadyExistsError) as exc:
            form.errors[""] = exc.message
            return self._show_produce(topic, form, event, status_of(exc))
        self._sampler.expire()
        where = url("/console/topics", topic.name, "events", str(at.partition), str(at.offset))
        return Redirect(f"{where}?appended=1")

    def _event(self, form: Fields, now_ms: int) -> Event | None:
        """Returns the event that a form describes; None, with errors, if it cannot be stored."""
        given = form.given
        value = form.check("value", lambda: read_value(given["kind"], given["value"]))
        time_ms = form.check("time", lambda: _time_ms(given["time"].strip(), now_ms))
        headers = form.check("headers", lambda: _headers(given["headers"]))
        if form.errors:
            return None
        event = Event(
            value,
            key=_bytes(given["key"]),
            id=given["id"] or None,
            timestamp=time_ms,
            type=given["type"] or None,
            headers=headers or (),
        )
        most = self._home.context.log_settings.event_bytes_max
        for name in ("key", "id", "type"):
            part = Event(None, **{name: getattr(event, name)})
            form.check(name, lambda part=part: check_event(part, most))  # type: ignore[misc]
        form.check("" if form.errors else "value", lambda: check_event(event, most))
        return None if form.errors else event

    def _show_produce(
        self,
        topic: Topic,
        form: Fields,
        event: Event | None = None,
        status: int = 200,
        once: str = "",
    ) -> Answer:
        """``once`` is that of an append that failed: it may have landed, and is never doubled."""
        partition = None
        if event is not None and event.key is not None:
            partition = partition_for(event.key, topic.partitions)
        values = {
            "topic": topic,
            "form": form,
            "kinds": _KINDS,
            "event": event,
            "shown": Bytes(event.value if event else None),
            "size": check_event(event) if event else 0,
            "partition": partition,
            "once": once or self._home.context.ids.new() if event else "",
            "value_max": VALUE_MAX,
        }
        return ShownPage("produce.html", values, status)

    # Correct an event.

    def correct_form(self, visit: Visit) -> Answer:
        """``GET /console/topics/{topic}/events/{partition}/{offset}/correct``"""
        topic, event = self._events.event_at(visit)
        kind, text = _editable(event.value)
        given = {"kind": kind, "value": text, "why": "", "archives": ""}
        return self._show_correct(topic, event, Fields(given))

    def correct(self, visit: Visit) -> Answer:
        """``POST`` to the same: first what would change; ``sure`` replaces the value"""
        topic, event = self._events.event_at(visit)
        given = {name: _exact(visit, name) for name in ("kind", "value", "archives")}
        form = Fields({**given, "why": visit.text("why")})
        value = form.check("value", lambda: read_value(given["kind"], given["value"]))
        value = _laid_out_as(event.value, value) if given["kind"] == "json" else value
        form.check("why", lambda: _check_why(form.given["why"]))
        if event.id is None:
            form.errors[""] = "this event has no id: only events with one can be corrected"
        elif not form.errors and value == event.value:
            form.errors["value"] = "it is the value that the event has: change something"
        if form.errors or event.id is None:
            return self._show_correct(topic, event, form, status=400)
        form.check("value", lambda: check_event(msgspec.structs.replace(event, value=value)))
        if not visit.form.get("sure") or form.errors:
            status = 400 if form.errors else 200
            change = None if form.errors else _changes(event.value, value)
            return self._show_correct(topic, event, form, change, status)
        if visit.text("seen") != _mark(event.value):
            form.errors[""] = "the event was changed since you looked: look at the change again"
            change = _changes(event.value, value)
            return self._show_correct(topic, event, form, change, 409)
        try:
            self._home.update(
                topic.name,
                event.id,
                value,
                archives=bool(given["archives"]),
                why=form.given["why"],
                who=visit.session.who or None,
            )
        except (InvalidError, NotFoundError) as exc:
            form.errors[""] = exc.message
            return self._show_correct(topic, event, form, status=status_of(exc))
        self._sampler.expire()
        return Redirect(f"{_place(event)}?corrected=1")

    def _show_correct(
        self,
        topic: Topic,
        event: Event,
        form: Fields,
        change: list[tuple[str, str]] | None = None,
        status: int = 200,
    ) -> Answer:
        values = {
            "topic": topic,
            "event": event,
            "form": form,
            "kinds": _KINDS,
            "change": change,
            "seen": _mark(event.value),
            "where": _place(event),
            "value_max": VALUE_MAX,
            "why_max": WHY_MAX,
            "is_large": len(event.value or b"") > VALUE_MAX,
        }
        return ShownPage("correct.html", values, status)


def read_value(kind: str, text: str) -> bytes | None:
    """Returns the value that a form gives as JSON, text or base64. Raises ``InvalidError``."""
    if kind == "none":
        return None
    if kind == "text":
        return text.encode("utf-8", "surrogateescape")
    if kind == "base64":
        try:
            return b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError) as exc:
            raise InvalidError(f"value: is not valid base64: {exc}") from exc
    if kind != "json":
        raise InvalidError(f"value: is given as `{kind[:40]}`: choose JSON, text or base64")
    if not text.strip():
        raise InvalidError("value: is empty: write JSON, or choose another kind")
    check_json_depth(text, "value")
    data = text.strip().encode("utf-8", "surrogateescape")
    try:
        Event(data).json()
    except InvalidError as exc:
        raise InvalidError(f"value: is not valid JSON: {exc.__cause__}") from exc
    return data


def _show_topic_form(form: Fields, status: int = 0) -> Answer:
    values = {"form": form, "partitions_max": limits.PARTITIONS_MAX}
    return ShownPage("create_topic.html", values, status or (400 if form.errors else 200))


def _partitions(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9 and int(text) >= 1:
        found = int(text)
        if found <= limits.PARTITIONS_MAX:
            return found
    raise InvalidError(f"partitions: give a whole number from 1 to {limits.PARTITIONS_MAX:,}")


def _slot_ms(text: str) -> int:
    found = duration_ms(text)
    if not 1 <= found <= limits.SLOT_MS_MAX:
        raise InvalidError("slot: give 1ms to 1d")
    return found


def _exact(visit: Visit, name: str) -> str:
    """Returns a field as it was typed: browsers send every line end as two characters."""
    return visit.long(name, VALUE_MAX).replace("\r\n", "\n")


def _time_ms(text: str, now_ms: int) -> int | None:
    return check_timestamp(moment_ms(text, now_ms)) if text else None


def _headers(text: str) -> Headers:
    found: list[tuple[str, bytes | None]] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise InvalidError(f"header `{line[:60]}`: write `name: value`, one on each line")
        found.append((name.strip(), value.strip().encode("utf-8", "surrogateescape")))
    headers = tuple(found)
    check_event(Event(None, headers=headers))
    return headers


def _bytes(text: str) -> bytes | None:
    return text.encode("utf-8", "surrogateescape") if text else None


def _check_why(text: str) -> None:
    if not 0 < len(text) <= WHY_MAX:
        raise InvalidError(f"why: say why, in up to {WHY_MAX:,} characters: the audit keeps it")


def _editable(value: bytes | None) -> tuple[str, str]:
    """Returns how a form shows a value: JSON laid out, text, or base64."""
    shown = Bytes(value)
    if value is None:
        return "none", ""
    if shown.json is not None:
        return "json", msgspec.json.format(value, indent=2).decode()
    if shown.is_text and not _FOLDED.search(value):
        return "text", value.decode()
    return "base64", b64encode(value).decode()


def _laid_out_as(before: bytes | None, after: bytes | None) -> bytes | None:
    """Returns JSON on one line if the value before was: a form shows it over many lines."""
    if before is None or after is None or Bytes(before).json is None:
        return after
    for indent in (-1, 0):
        if msgspec.json.format(before, indent=indent) == before:
            return msgspec.json.format(after, indent=indent)
    return before if msgspec.json.format(before, indent=2) == after else after


def _changes(before: bytes | None, after: bytes | None) -> list[tuple[str, str]]:
    """Returns the lines of both values, each with ``-``, ``+`` or a space before it."""
    old, new = _lines(before), _lines(after)
    found: list[tuple[str, str]] = []
    # Whole lines only: to compare what is inside of them takes minutes for values made for that.
    for kind, a, a_end, b, b_end in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind == "equal":
            found += [(" ", line) for line in old[a:a_end]]
            continue
        found += [("-", line) for line in old[a:a_end]]
        found += [("+", line) for line in new[b:b_end]]
    return found[:_DIFF_LINES_MAX]


def _lines(value: bytes | None) -> list[str]:
    if value is None:
        return ["(no value: a tombstone)"]
    shown = Bytes(value)
    if shown.json is not None:
        return shown.json.split("\n")[:_DIFF_LINES_MAX]
    if shown.is_text:
        return shown.text.split("\n")[:_DIFF_LINES_MAX]
    return [one_line(value)]


def _mark(value: bytes | None) -> str:
    """Returns what identifies a value, so that a correction replaces the one that was shown."""
    return "none" if value is None else hashlib.sha256(value).hexdigest()


def _place(event: Event) -> str:
    at = event.position
    return url("/console/topics", at.topic, "events", str(at.partition), str(at.offset))
