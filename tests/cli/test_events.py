"""Events as JSON, both ways."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog import Event, InvalidError
from tidelog.cli.fields import Fields, event_of_json
from tidelog.codec.event_json import event_lines, event_of_line
from tidelog.model import limits

TEXT = st.text(st.characters(codec="utf-8"))
BYTES = st.binary() | TEXT.map(str.encode)
EVENTS = st.builds(
    Event,
    value=st.none() | BYTES,
    key=st.none() | BYTES,
    id=st.none() | TEXT.filter(bool),
    timestamp=st.integers(0, limits.TIMESTAMP_MS_END - 1),
    type=st.none() | TEXT,
    headers=st.lists(st.tuples(TEXT, BYTES), max_size=3).map(tuple),
)


@given(st.lists(EVENTS, max_size=5))
def test_every_event_comes_back_as_it_was(events: list[Event]) -> None:
    lines = event_lines(events).split(b"\n")
    assert lines.pop() == b""
    assert [event_of_line(line) for line in lines] == events


def test_the_shape_is_the_one_that_is_documented() -> None:
    event = Event(
        b"\xff\x00",
        "kü\n".encode(),
        "one",
        1_700_000_000_007,
        "made",
        (("plain", b"text"), ("raw", b"\xfe")),
        "orders",
        3,
        41,
    )
    line = event_lines([event])
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "topic": "orders",
        "partition": 3,
        "offset": 41,
        "timestamp": "2023-11-14T22:13:20.007Z",
        "id": "one",
        "key": "kü\n",
        "value": {"base64": "/wA="},
        "type": "made",
        "headers": [["plain", "text"], ["raw", {"base64": "/g=="}]],
    }
    nulls = json.loads(event_lines([Event(None, timestamp=0)]))
    assert (nulls["value"], nulls["key"], nulls["headers"]) == (None, None, [])


def test_only_the_value_must_be_there_and_times_may_be_numbers() -> None:
    assert event_of_line(b'{"value": "x"}') == Event(b"x")
    assert event_of_line(b'{"value": null, "timestamp": 7}') == Event(None, timestamp=7)
    assert event_of_line(b'{"value": "", "headers": null}') == Event(b"")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `value`"),
        (b'{"value": 1}', "$.value"),
        (b'{"value": "x", "timestmp": 1}', "unknown field `timestmp`"),
        (b'{"value": {"base64": "!"}}', "base64"),
        (b'{"value": {"base46": ""}}', "base46"),
        (b'{"value": "\xff"}', "utf-8"),
        (b'{"value": "\\ud800 and more"}', "malformed"),
        (b'{"value": "x", "timestamp": "yesterday"}', "ISO 8601"),
        (b'{"value": "x", "headers": [["a"]]}', "$.headers[0]"),
        (b'{"value": "x"', "truncated"),
    ],
)
def test_what_is_no_event_is_told(line: bytes, message: str) -> None:
    with pytest.raises(InvalidError) as told:
        event_of_line(line)
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("written", "expected_ms"),
    [
        ('"2023-11-14T22:13:20Z"', 1_700_000_000_000),
        ('"2023-11-14T22:13:20.5"', 1_700_000_000_500),
        ('"2023-11-15T00:13:20+02:00"', 1_700_000_000_000),
        ("1700000000", 1_700_000_000_000),
        ("1700000000.25", 1_700_000_000_250),
        ("1700000000007", 1_700_000_000_007),
        ("1700000000007999", 1_700_000_000_007),
        ("1700000000007999999", 1_700_000_000_007),
        ("0", 0),
    ],
)
def test_times_of_json_lines(written: str, expected_ms: int) -> None:
    line = f'{{"meta": {{"at": {written}}}}}'.encode()
    assert event_of_json(line, Fields(time="meta.at")) == Event(line, timestamp=expected_ms)


def test_keys_and_ids_of_json_lines() -> None:
    line = '{"user": {"id": 7, "ok": true}, "a.b": "dotted", "ü": "ñ"}'.encode()
    assert event_of_json(line, Fields(key="user.id", id="a.b")) == Event(line, b"7", "dotted")
    assert event_of_json(line, Fields(key="ü", id="user.ok")) == Event(line, "ñ".encode(), "true")
    assert event_of_json(line, Fields()) == Event(line)


@pytest.mark.parametrize(
    ("line", "fields", "message"),
    [
        (b"[1]", Fields(), "no JSON object"),
        (b"nonsense", Fields(), "no JSON object"),
        (b'{"a": "\xff"}', Fields(), "no JSON object"),
        (b'{"a": {}}', Fields(key="a.b"), "no field `a.b`"),
        (b'{"a": 1}', Fields(key="a.b"), "no field `a.b`"),
        (b'{"a": null}', Fields(id="a"), "no field `a`, or null"),
        (b'{"a": [1]}', Fields(key="a"), "no plain value"),
        (b'{"a": true}', Fields(time="a"), "no time"),
        (b'{"a": "soon"}', Fields(time="a"), "ISO 8601"),
        (b'{"a": -5}', Fields(time="a"), "1970"),
        (b'{"a": 1e300}', Fields(time="a"), "1970"),
    ],
)
def test_json_lines_that_cannot_be_taken(line: bytes, fields: Fields, message: str) -> None:
    with pytest.raises(InvalidError) as told:
        event_of_json(line, fields)
    assert message in str(told.value)
