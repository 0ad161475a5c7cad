"""Fields of JSON values that become an event's own."""

from __future__ import annotations

import json

import pytest

from tidelog.codec.event_batch import EVENT_SCHEMA, table_of, with_position
from tidelog.codec.fields import NOT_EXTRACTED_HEADER, FieldPaths, FieldTaker, JsonLines
from tidelog.errors import InvalidError
from tidelog.model.event import Event
from tidelog.model.limits import ID_BYTES_MAX

PATHS = FieldPaths("user.id", "id", "kind", "at")


def taken(*events: Event, paths: FieldPaths = PATHS) -> list[dict[str, object]]:
    table = table_of(list(events), 7)
    batch = with_position(table.to_batches()[0], "t", 0, 0)
    result = FieldTaker(paths).take(batch)
    assert result.schema.equals(EVENT_SCHEMA)
    return [
        {**row, "timestamp": int(row["timestamp"].timestamp() * 1000)} for row in result.to_pylist()
    ]


def test_all_four_are_taken_and_the_value_stays() -> None:
    value = b'{"user": {"id": 7}, "id": "a-1", "kind": "made", "at": "2026-11-15T10:00:00Z"}'
    (row,) = taken(Event(value, b"old", "old", 3, "old"))
    assert (row["key"], row["id"], row["type"]) == (b"7", "a-1", "made")
    assert row["timestamp"] == 1_794_736_800_000
    assert row["value"] == value
    assert row["headers"] is None


@pytest.mark.parametrize("at", ["1794736800", "1794736800000", "1794736800000000"])
def test_epochs_by_their_size(at: str) -> None:
    (row,) = taken(Event(b'{"at": %s}' % at.encode()), paths=FieldPaths(time="at"))
    assert row["timestamp"] == 1_794_736_800_000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"rubbish", b"not JSON"),
        (b"\xff", b"not UTF-8"),
        (None, b"null value"),
        (b'{"id": null}', b"missing or null"),
        (b'{"id": ""}', b"empty"),
        (b'{"id": "%s"}' % (b"x" * (ID_BYTES_MAX + 1)), b"too long"),
        (b"[]", b"missing or null"),
    ],
)
def test_what_cannot_be_taken_leaves_the_event_and_says_why(
    value: bytes | None, reason: bytes
) -> None:
    good = Event(b'{"id": "b"}')
    kept = Event(value, b"k", "old", 5, "t", (("h", b"1"),))
    one, two = taken(kept, good, paths=FieldPaths(id="id"))
    assert (one["key"], one["id"], one["timestamp"], one["type"]) == (b"k", "old", 5, "t")
    first, second = one["headers"]  # type: ignore[misc]
    assert first == {"name": "h", "value": b"1"}
    assert second["name"] == NOT_EXTRACTED_HEADER
    assert reason in second["value"]
    assert (two["id"], two["headers"]) == ("b", None)


def test_no_paths_and_a_bad_path() -> None:
    assert FieldPaths().given() is False
    with pytest.raises(InvalidError, match="name is empty"):
        FieldTaker(FieldPaths(key="a..b"))


@pytest.mark.parametrize("number", ["12345678901234567.1", "1e3", "1.50", "-0", "1E400", "0.0"])
@pytest.mark.parametrize("field", ["id", "key"])
def test_number_that_would_be_rounded_is_refused_as_id_and_key(field: str, number: str) -> None:
    lines = [b'{"f":%s}' % number.encode(), b'{"f":"%s"}' % number.encode()]
    refused, taken = JsonLines(FieldPaths(**{field: "f"})).events(lines)
    assert isinstance(refused, InvalidError)
    assert isinstance(taken, Event)
    assert getattr(taken, field) in (number, number.encode())


@pytest.mark.parametrize(
    "number", ["0", "5", "-7", "18446744073709551616", "-123456789012345678901"]
)
def test_a_whole_number_is_an_id_digit_by_digit(number: str) -> None:
    (event,) = JsonLines(FieldPaths(id="f")).events([b'{"f":%s}' % number.encode()])
    assert isinstance(event, Event)
    assert event.id == number


@pytest.mark.parametrize("paths", [FieldPaths(), FieldPaths(id="f")])
def test_lines_that_are_nearly_json_are_refused(paths: FieldPaths) -> None:
    wrong = [
        b'{"f":"x",}',
        b'{"f":"x","g":[1,]}',
        b'{"f":"x","g":NaN}',
        b'{"f":"x","g":-Infinity}',
        b'{"f":"x","g":[1, inf]}',
        b'{"f":"x","g":nan}',
    ]
    for line, found in zip(wrong, JsonLines(paths).events(wrong), strict=True):
        assert isinstance(found, InvalidError), line
    right = [b'{"f":"x","g":",}"}', b'{"f":"a, info","g":": NaN"}']
    assert all(isinstance(each, Event) for each in JsonLines(paths).events(right))


REPEATED = [
    ("a", b'{"a":1,"a":2}', b"2"),
    ("a", b'{"a":1,"\\u0061":2}', b"2"),
    ("a", b'{"a":1,"b":{"a":3}}', b"1"),
    ("a", b'{"a":"a","b":"\\"a\\":2"}', b"a"),
    ("a", b'{"a":{"a":1},"a":12345678901234567890123}', b"12345678901234567890123"),
    ("a.b", b'{"a":{"b":1},"a":{"b":2}}', b"2"),
    ("a.b", b'{"a":{"b":1,"b":2},"b":3}', b"2"),
    ("a.b", b'{"a":{"b":1},"a":{}}', None),
    ("a.b", b'{"a":{"b":1},"a":null}', None),
    ("a.b", b'{"a":{"b":1},"a":5}', None),
    ("a", b'{"a":1,"a":null}', None),
    ("/l/1/x", b'{"l":[0,{"x":1,"x":2}]}', b"2"),
    ("/l/1/x", b'{"l":[0],"l":[1,{"x":3}]}', b"3"),
    ("/a~1b", b'{"a/b":1,"a\\/b":2}', b"2"),
    ('q"', b'{"q\\"":1,"q\\u0022":2}', b"2"),
]


@pytest.mark.parametrize(("path", "value", "key"), REPEATED)
def test_the_last_of_a_repeated_name_counts(path: str, value: bytes, key: bytes | None) -> None:
    """As in typed columns and in Python's JSON, whichever way a field is taken."""
    neighbour = Event(b'{"a":{"b":"n"}}')
    row, _ = taken(Event(value, b"old"), neighbour, paths=FieldPaths(path))
    (event,) = JsonLines(FieldPaths(path)).events([value])
    if key is None:
        assert row["key"] == b"old"
        assert isinstance(event, InvalidError)
        return
    assert row["key"] == key
    assert isinstance(event, Event)
    assert (event.key, event.value) == (key, value)
    found = json.loads(value)
    for name in path.split("/")[1:] if path.startswith("/") else path.split("."):
        found = found[int(name) if isinstance(found, list) else name.replace("~1", "/")]
    assert str(found).encode() == key


@pytest.mark.parametrize(
    ("path", "line", "time_ms"),
    [
        ("a.at", b'{"a": {"at": 1794743999.999999999 }}', 1_794_743_999_999),
        ("/a/1", b'{"a": [0.12345678, 1794743999.999999999]}', 1_794_743_999_999),
        ("at", b'{"x": 0.123456789, "at": 1794743999.5}', 1_794_743_999_500),
        ("at", b'{"x": 0.123456789, "at": "2026-11-15T11:59:59.9999Z"}', 1_794_743_999_999),
        ("at", b'{"at": 1, "at": 1794743999.999999999}', 1_794_743_999_999),
        ("/a~1b", b'{"a/b": 1794743999.999999999}', 1_794_743_999_999),
    ],
)
def test_time_is_cut_off_at_milliseconds_wherever_its_number_is(
    path: str, line: bytes, time_ms: int
) -> None:
    (event,) = JsonLines(FieldPaths(time=path)).events([line])
    assert isinstance(event, Event)
    assert event.timestamp == time_ms
