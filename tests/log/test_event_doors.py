"""Every door gives the same verdict on an event, and what was read can be appended again."""

from __future__ import annotations

import enum
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidelog
from tidelog import Event, Home
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.codec.event_json import event_lines, event_of_line
from tidelog.coordination.audit import Why
from tidelog.errors import InvalidError
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model import limits
from tidelog.model.event import to_iso
from tidelog.model.playback import time_range


class _Kind(enum.StrEnum):
    MADE = "made"


class _Old(str, enum.Enum):  # noqa: UP042 - whose str() is not its text
    MADE = "made"


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t")
        yield opened


def _send(home: Home, event: Event) -> None:
    fields: dict[str, Any] = {n: getattr(event, n) for n in ("id", "timestamp", "type", "headers")}
    home.producer("t").send(event.value, event.key, **fields).result()


def _arrow(home: Home, event: Event) -> None:
    headers = event.headers
    if headers is not None:
        headers = [{"name": name, "value": value} for name, value in headers]  # type: ignore[assignment]
    columns = {name: [getattr(event, name)] for name in ("value", "key", "id", "type")}
    columns["headers"] = [headers]
    try:
        table = pa.table(
            {name: pa.array(v, STORED_SCHEMA.field(name).type) for name, v in columns.items()}
        )
    except (pa.ArrowException, UnicodeEncodeError, TypeError) as exc:
        raise InvalidError(str(exc)) from exc  # no table can have it
    home.append("t", table)


def _parsed(event: Event) -> Event:
    """By its JSON, as HTTP and `produce --format events` do; JSON has plain text only."""
    event_id, kind = (
        None if text is None else str.__str__(text) for text in (event.id, event.type)
    )
    shown = Event(event.value, event.key, event_id, 0, kind, tuple(event.headers or ()))
    return event_of_line(event_lines([shown]))


def _json(home: Home, event: Event) -> None:
    home.append("t", [_parsed(event)])


def _once(home: Home, event: Event) -> None:
    """With an idempotency key, as HTTP does."""
    append_once(home.context, home.topic("t"), "k", [_parsed(event)])


DOORS: dict[str, Callable[[Home, Event], object]] = {
    "send": _send,
    "list": lambda home, event: home.append("t", [event]),
    "arrow": _arrow,
    "json": _json,
    "once": _once,
}
GOOD: dict[str, Callable[[], Event]] = {
    "null header value": lambda: Event(b"x", headers=(("h", None), ("h", b""), ("", None))),
    "no headers": lambda: Event(b"x", headers=None),  # type: ignore[arg-type]
    "list of headers": lambda: Event(b"x", headers=[("h", b"1")]),  # type: ignore[arg-type]
    "null value": lambda: Event(None, b"", "i", headers=(("日", b"\xff"),)),
    "kinds of text": lambda: Event(b"x", id=np.str_("n"), type=_Kind.MADE),
    "old enum": lambda: Event(b"x", b"k", type=_Old.MADE),
    "kind of bytes": lambda: Event(np.bytes_(b"x"), np.bytes_(b"k")),
}
BAD: dict[str, Event] = {
    "surrogate id": Event(b"x", id="\ud800"),
    "surrogate type": Event(b"x", type="\ud800"),
    "surrogate header": Event(b"x", headers=(("\ud800", b""),)),
    "text as a header's value": Event(b"x", headers=(("h", 7),)),  # type: ignore[arg-type]
    "empty id": Event(b"x", id=""),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", GOOD)
def test_good_event_comes_in_by_every_door_and_again(home: Home, name: str, door: str) -> None:
    event = GOOD[name]()
    DOORS[door](home, event)
    (read,) = home.read("t")
    headers = tuple(tuple(each) for each in event.headers or ())
    assert (read.value, read.key, read.id, read.headers) == (
        event.value,
        event.key,
        event.id,
        headers,
    )
    assert read.type == (None if event.type is None else "made")
    home.append("t", [read])
    _send(home, read)
    _json(home, read)
    assert {each.headers for each in home.read("t")} == {headers}
    assert len(list(home.read("t"))) == 4


@pytest.mark.parametrize("door", ["send", "list", "arrow"])  # JSON cannot express the others
@pytest.mark.parametrize("name", BAD)
def test_bad_event_is_refused_by_every_door(home: Home, name: str, door: str) -> None:
    with pytest.raises(InvalidError):
        DOORS[door](home, BAD[name])
    assert list(home.read("t")) == []


@pytest.mark.parametrize("door", ["send", "list"])
def test_value_of_another_type_is_refused_with_what_to_give(home: Home, door: str) -> None:
    with pytest.raises(InvalidError, match=r"value is str: give bytes, such as text.encode\(\)"):
        DOORS[door](home, Event("text"))  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"value is dict: give bytes \(`send_json` encodes"):
        DOORS[door](home, Event({"a": 1}))  # type: ignore[arg-type]


def test_headers_may_be_any_iterable(home: Home) -> None:
    pairs = [("a", b"1"), ("b", None)]
    home.append("t", [Event(b"x", headers=(each for each in pairs))])  # type: ignore[arg-type]
    home.append("t", [Event(b"x", headers=map(tuple, pairs))])  # type: ignore[arg-type]
    home.producer("t").send(b"x", headers=iter(pairs)).result()
    assert [each.headers for each in home.read("t")] == [tuple(pairs)] * 3


@pytest.mark.parametrize(
    "events",
    [[b"x"], [None], ["x", Event(b"x")], b"x", 5, Event(b"x"), [Event(b"x", headers=5)]],  # type: ignore[arg-type]
)
def test_append_of_other_things_is_refused(home: Home, events: Any) -> None:
    with pytest.raises(InvalidError, match=r"append: got|headers are int"):
        home.append("t", events)


@pytest.mark.parametrize("headers", [5, [5], ["ab"], [("a",)], [("a", 5)], [{"a": 1, "b": 2}]])
def test_send_refuses_headers_that_are_not_pairs(home: Home, headers: Any) -> None:
    with pytest.raises(InvalidError, match="header"):
        home.producer("t").send(b"x", headers=headers)


def test_table_with_two_columns_of_a_name_is_refused(home: Home) -> None:
    column = pa.array([b"x"])
    for names in (["value", "value"], ["value", "key", "key"]):
        table = pa.Table.from_arrays([column] * len(names), names)
        with pytest.raises(InvalidError, match="more than one column"):
            home.append("t", table)


def test_names_and_reasons_with_a_lone_surrogate_are_refused(home: Home) -> None:
    for attempt in (
        lambda: home.consumer("t", "c\ud800"),
        lambda: home.producer("t", "p\ud800"),
        lambda: Why("me", "because\ud800"),
        lambda: Why("me\ud800"),
    ):
        with pytest.raises(InvalidError, match="not valid Unicode"):
            attempt()


@pytest.mark.parametrize("text", ["\\ud800", "\\udc00a", "a\\ud800b"])
def test_lone_surrogate_in_json_is_named(text: str) -> None:
    with pytest.raises(InvalidError, match="not valid Unicode"):
        event_of_line(b'{"value": "%s"}' % text.encode())
    with pytest.raises(InvalidError, match="truncated"):
        event_of_line(b'{"value": "x')
    assert event_of_line(json.dumps({"value": "😀"}).encode()).value == "😀".encode()


def test_playback_may_end_after_the_last_millisecond() -> None:
    end = to_iso(limits.TIMESTAMP_MS_END)
    for text in (end, "10000-01-01", "10000-01-01T00:00:00Z"):
        assert time_range("9999-12-31T23:59:59Z", text, 0).end_ms == limits.TIMESTAMP_MS_END
    with pytest.raises(InvalidError):
        time_range(end, end, 0)


LARGE = 4 << 20


@pytest.mark.parametrize(
    "line",
    [
        b'{"value":"x","headers":[' + b'["a",""],' * (LARGE // 9) + b'["a","b"]]}',
        b'{"value":"x","headers":{' + b'"a":"",' * (LARGE // 7) + b'"b":""}}',
        b'{"value":"x",' + b'"a":0,' * (LARGE // 6) + b'"b":0}',
        b'{"value":[' + (b"[" * 60 + b"]" * 60 + b",") * (LARGE // 121) + b"0]}",
        b'{"value":[' + b"0," * (LARGE // 2) + b"0,]}",
        b'{"value":"x","headers":[["a","b"' + b",0" * (LARGE // 2) + b"]]}",
    ],
    ids=["headers", "an object of headers", "unknown fields", "nested", "no JSON", "a long pair"],
)
def test_a_line_that_is_refused_takes_little_memory_and_no_long_calls(line: bytes) -> None:
    """Calls that hold the interpreter for seconds also make objects, which can be counted."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidError):
            event_of_line(line, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(line)
    finally:
        tracemalloc.stop()


def test_long_lines_are_read_like_short_ones() -> None:
    text = "é" * 50_000
    headers = [["n", text], ["none", None], ["bytes", {"base64": "//8="}]]
    fields = {"key": "k", "id": "i", "type": "t", "timestamp": 5, "headers": headers, "offset": [1]}
    pairs = (("n", text.encode()), ("none", None), ("bytes", b"\xff\xff"))
    for value, stored in (
        (text, text.encode()),
        ({"base64": "//8="}, b"\xff\xff"),
        (None, None),
        ({"n": [1, text]}, json.dumps({"n": [1, text]}).encode()),
    ):
        line = json.dumps({"value": value, **fields}).encode()
        assert event_of_line(line) == Event(stored, b"k", "i", 5, "t", pairs)
    pad = "x" * 70_000
    for wrong, said in (
        ({"value": {"base64": "?" + pad}}, "base64"),
        ({"key": pad}, "missing required field `value`.*: give"),
        ({"value": pad, "other": 1}, "unknown field `other`.*: give"),
        ({"value": pad, "id": 7}, "got `int` - at `\\$.id`"),
        ({"value": [pad], "headers": 7}, "got `int` - at `\\$.headers`"),
    ):
        with pytest.raises(InvalidError, match=said):
            event_of_line(json.dumps(wrong).encode())
    with pytest.raises(InvalidError, match="nested too deeply"):
        event_of_line(b'{"value":"%s","topic":%s}' % (pad.encode(), b"[" * 201 + b"]" * 201))
    with pytest.raises(InvalidError):
        event_of_line(b'{"value":["\\ud800","%s"]}' % pad.encode())
