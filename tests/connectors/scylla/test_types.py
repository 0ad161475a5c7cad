"""CQL values to JSON: all types, straight from the bytes that a server sends."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from cassandra.query import tuple_factory

from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play
from tests.support.scylla_reads import at, opened
from tidelog.connectors.scylla.session import ScyllaSession, parse_scylla
from tidelog.connectors.scylla.types import to_json, values_to_json

UUID = "123e4567-e89b-12d3-a456-426614174000"

LITERALS: dict[str, list[tuple[str, Any]]] = {
    "ascii": [("'a'", "a"), ("''", "")],
    "bigint": [("-9223372036854775808", -(2**63)), ("5", 5)],
    "blob": [("0x00ff", "0x00ff"), ("0x", "0x")],
    "boolean": [("true", True), ("false", False)],
    "date": [
        ("'2026-11-15'", "2026-11-15"),
        ("'-5877641-06-23'", -(2**31)),
        ("'0001-01-01'", "0001-01-01"),
    ],
    "decimal": [
        ("1.50", "1.50"),
        ("-0.001", "-0.001"),
        ("1E+30", "1E+30"),
        ("12345678901234567890.5", "12345678901234567890.5"),
    ],
    "double": [("1.5", 1.5), ("NaN", "NaN"), ("-Infinity", "-Infinity"), ("1e300", 1e300)],
    "duration": [
        ("1mo2d3ns", "1mo2d3ns"),
        ("-2d", "-0mo2d0ns"),
        ("89h4m48s", "0mo0d320688000000000ns"),
    ],
    "float": [
        ("0.1", 0.1),
        ("16777216", 16777216.0),
        ("Infinity", "Infinity"),
        ("3.4028235e38", 3.4028235e38),
    ],
    "inet": [("'127.0.0.1'", "127.0.0.1"), ("'2001:db8::1'", "2001:db8::1")],
    "int": [("-2147483648", -(2**31))],
    "smallint": [("-32768", -32768)],
    "text": [("'\"\\\\ \U0001f600 \u00e4\n'", '"\\\\ \U0001f600 \u00e4\n'), ("''", "")],
    "time": [("'23:59:59.999999999'", "23:59:59.999999999"), ("'00:00:00'", "00:00:00.000000000")],
    "timestamp": [
        ("'2026-11-15T10:11:12.345Z'", "2026-11-15T10:11:12.345Z"),
        ("9223372036854775807", 2**63 - 1),
        ("-1", "1969-12-31T23:59:59.999Z"),
        ("-62135596800000", "0001-01-01T00:00:00.000Z"),
    ],
    "timeuuid": [("50554d6e-29bb-11e5-b345-feff819cdc9f", "50554d6e-29bb-11e5-b345-feff819cdc9f")],
    "tinyint": [("-128", -128)],
    "uuid": [(UUID, UUID)],
    "varint": [("170141183460469231731687303715884105728", str(2**127)), ("0", "0")],
    "list<int>": [("[3, 1, 3]", [3, 1, 3])],
    "set<text>": [("{'b', 'a'}", ["a", "b"])],
    "map<int, text>": [("{1: 'a', -2: 'b'}", {"-2": "b", "1": "a"})],
    "map<frozen<list<int>>, boolean>": [("{[1, 2]: true}", {"[1,2]": True})],
    "frozen<list<frozen<map<text, int>>>>": [("[{'a': 1}, {}]", [{"a": 1}, {}])],
    "tuple<int, text>": [("(1, 'a')", [1, "a"]), ("(1, null)", [1, None])],
    "frozen<thing>": [
        ("{a: 1, \"B c\": {'x'}}", {"a": 1, "B c": ["x"]}),
        ("{a: null}", {"a": None, "B c": None}),
    ],
    "vector<float, 2>": [("[1, 2.5]", [1.0, 2.5])],
    "vector<text, 2>": [("['a', 'bcd']", ["a", "bcd"])],
}


@pytest.fixture(scope="module")
def session(cassandra_server: Cassandra) -> Iterator[ScyllaSession]:
    play = Play(cassandra_server)
    play.session.execute('CREATE TYPE thing (a int, "B c" frozen<set<text>>)')
    play.session.execute("DROP TABLE orders")
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(LITERALS))
    play.session.execute(f"CREATE TABLE orders (k int PRIMARY KEY, {columns})")
    source = opened(play.url(), at(0))
    from tidelog.model.address import parse_address

    made = ScyllaSession(parse_scylla(parse_address(source.url), {}, 0)[0])
    yield made
    made.close()
    play.close()


@pytest.mark.server
def test_values_of_every_type_become_json(
    session: ScyllaSession, cassandra_server: Cassandra
) -> None:
    place = session.place
    writer = cassandra_server.session(place.keyspace)
    writer.row_factory = tuple_factory
    for number, (kind, pairs) in enumerate(LITERALS.items()):
        statement = session.prepare(f"SELECT c{number} FROM {place.keyspace}.orders WHERE k = 1")
        convert = to_json(statement.result_metadata[0][3])
        for literal, expected in pairs:
            writer.execute(f"INSERT INTO orders (k, c{number}) VALUES (1, {literal})")
            ((row,),) = session.pages(statement, ())
            found = json.loads(convert(row[0]))
            assert found == expected, (kind, literal, row[0])
            assert type(found) is type(expected), (kind, literal)
    writer.cluster.shutdown()


class Kind:
    """A type as the driver describes it."""

    def __init__(self, typename: str, *subtypes: Kind) -> None:
        self.typename = typename
        self.subtypes = subtypes


def test_empty_and_unknown_values_are_told_too() -> None:
    for name in ("int", "bigint", "double", "float", "timestamp", "date", "time", "inet", "varint"):
        assert to_json(Kind(name))(b"") == '""'
    assert to_json(Kind("org.example.Strange"))(b"\x01") == '"0x01"'
    assert to_json(Kind("text"))(b"\xff") == '"\ufffd"'


def test_numbers_that_python_would_not_write_out_are_given_as_bytes() -> None:
    huge = b"\x7f" * 2_000
    assert json.loads(to_json(Kind("varint"))(huge)) == f"0x{huge.hex()}"
    scaled = struct.pack(">i", -(2**31)) + b"\x01"
    assert json.loads(to_json(Kind("decimal"))(scaled)) == "1E+2147483648"
    assert len(to_json(Kind("decimal"))(struct.pack(">i", 2**31 - 1) + b"\x01")) < 20


def test_nulls_in_collections_and_lists_of_a_change_log() -> None:
    item = struct.pack(">ii", 2, -1) + struct.pack(">ii", 4, 7)
    assert to_json(Kind("list", Kind("int")))(item) == "[null,7]"
    pairs = struct.pack(">i", 1) + struct.pack(">i", 16) + bytes(16) + struct.pack(">ii", 4, 9)
    assert values_to_json(Kind("map", Kind("timeuuid"), Kind("int")))(pairs) == "[9]"
    assert values_to_json(Kind("map", Kind("timeuuid"), Kind("int")))(b"") == "[]"
