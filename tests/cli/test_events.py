"""Events as JSON, both ways."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog import Event, InvalidError
from tidelog.codec.event_batch import STORED_SCHEMA, events_of, one_batch, table_of, with_position
from tidelog.codec.event_json import event_lines, event_of_line
from tidelog.codec.fields import FieldPaths, FieldTaker, JsonLines
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
    assert event_of_line(b'{"value": {"n":  1.0}}') == Event(b'{"n":  1.0}')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `value`"),
        (b'{"value": {"base64": 1}}', "$.value"),
        (b'{"value": 1, "key": 1}', "$.key"),
        (b'{"value": "x", "timestmp": 1}', "unknown field `timestmp`"),
        (b'{"value": {"base64": "!"}}', "base64"),
        (b'{"value": "x", "key": {"base46": ""}}', "base46"),
        (b'{"value": "\xff"}', "utf-8"),
        (b'{"value": "\\ud800 and more"}', "not valid Unicode"),
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
    assert event_of_json(line, FieldPaths(time="meta.at")) == Event(line, timestamp=expected_ms)


def event_of_json(line: bytes, paths: FieldPaths) -> Event:
    (found,) = JsonLines(paths).events([line])
    if isinstance(found, InvalidError):
        raise found
    return found


def test_keys_ids_and_types_of_json_lines() -> None:
    line = '{"user": {"id": 7, "ok": true}, "a.b": "dotted", "ü": "ñ"}'.encode()
    paths = FieldPaths(key="user.id", id="/a.b", type="user.ok")
    assert event_of_json(line, paths) == Event(line, b"7", "dotted", type="true")
    assert event_of_json(line, FieldPaths(key="ü")) == Event(line, "ñ".encode())
    assert event_of_json(line, FieldPaths()) == Event(line)


def test_a_bad_line_does_not_harm_its_neighbours() -> None:
    lines = [b'{"id": "a"}', b"{", b'{"id": 7}']
    first, second, third = JsonLines(FieldPaths(id="id")).events(lines)
    assert (first, third) == (Event(lines[0], id="a"), Event(lines[2], id="7"))
    assert isinstance(second, InvalidError)


@pytest.mark.parametrize(
    ("line", "paths", "message"),
    [
        (b"[1]", FieldPaths(), "not a JSON object"),
        (b"nonsense", FieldPaths(), "not a JSON object"),
        (b'{"a": "\xff"}', FieldPaths(), "not UTF-8"),
        (b'{"a": {}}', FieldPaths(key="a.b"), "field `a.b` is missing or null"),
        (b'{"a": 1}', FieldPaths(key="a.b"), "field `a.b` is missing or null"),
        (b'{"a": null}', FieldPaths(id="a"), "field `a` is missing or null"),
        (b'{"a": [1]}', FieldPaths(key="a"), "not a plain value"),
        (b'{"a": ""}', FieldPaths(id="a"), "id is empty"),
        (b'{"a": true}', FieldPaths(time="a"), "neither an epoch nor an ISO 8601 time"),
        (b'{"a": "soon"}', FieldPaths(time="a"), "neither an epoch nor an ISO 8601 time"),
        (b'{"a": -5}', FieldPaths(time="a"), "1970"),
        (b'{"a": 1e300}', FieldPaths(time="a"), "neither an epoch"),
    ],
)
def test_json_lines_that_cannot_be_taken(line: bytes, paths: FieldPaths, message: str) -> None:
    with pytest.raises(InvalidError) as told:
        event_of_json(line, paths)
    assert message in str(told.value)


@pytest.mark.parametrize(
    "line",
    [
        b'{"user": {"id": 7}, "at": "1700000000"}',
        b'{"user": {"id": "x"}, "at": "2023-11-14T22:13:20Z"}',
        b'{"user": {"id": {}}, "at": "soon"}',
        b'{"user.id": 7, "at": 1700000000.25}',
        b'{"user": {"id": null}}',
    ],
)
def test_produce_and_pump_extract_the_same_fields(line: bytes) -> None:
    paths = FieldPaths(key="user.id", time="at")
    batch = with_position(one_batch(table_of([Event(line, timestamp=5)], 0)), "t", 0, 0)
    pumped = next(events_of(FieldTaker(paths).take(batch).select(STORED_SCHEMA.names), "t", 0, 0))
    (produced,) = JsonLines(paths).events([line])
    if isinstance(produced, InvalidError):
        assert pumped.headers, "the pump keeps the event, and says why"
    else:
        assert (pumped.key, pumped.timestamp) == (produced.key, produced.timestamp)
