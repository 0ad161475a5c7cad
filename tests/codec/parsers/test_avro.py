"""Times in Avro records: schemas from a file, a folder and a registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest

from tests.codec.parsers.layouts import batch, laid
from tidelog.codec.parsers import FolderSettings, open_parser
from tidelog.errors import InvalidError, UnavailableError

NOON = 1_794_744_000


def record(*fields: tuple[str, Any], name: str = "Order") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields],
    }


ORDER = record(("id", "string"), ("at", "long"), ("tags", {"type": "array", "items": "string"}))


def encoded(schema: dict[str, Any], value: dict[str, Any], number: int | None = None) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    head = b"" if number is None else b"\x00" + number.to_bytes(4, "big")
    return head + stream.getvalue()


def order(at: int = NOON, number: int | None = None) -> bytes:
    return encoded(ORDER, {"id": "o-1", "at": at, "tags": ["a", "b"]}, number)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "order.avsc"
    path.write_text(json.dumps(ORDER))
    return path


def test_a_schema_in_a_file(file: Path) -> None:
    values = [order(), order(0), order(-1), None, b"", order() + b"x", order()[:-1], b"\xff" * 40]
    found = laid(f"avro:at?schema={file}", values)
    assert found[:4] == [
        "dt=2026-11-15",
        "dt=1970-01-01",
        "!time is outside of the years 1970 to 9999: -1",
        "!null value",
    ]
    assert all(row.startswith("!value is not Avro of its schema: ") for row in found[4:])
    assert found[5].endswith("1 bytes are left over")


TYPES: list[tuple[Any, Any, str]] = [
    ("int", NOON, "dt=2026-11-15"),
    ("double", NOON + 0.5, "dt=2026-11-15"),
    ("string", "2026-11-15T12:00:00+01:00", "dt=2026-11-15"),
    ("string", "soon", "!field `at` is neither an epoch nor an ISO 8601 time: soon"),
    (["null", "long"], NOON, "dt=2026-11-15"),
    (["null", "long"], None, "!field `at` is missing or null"),
    ("bytes", b"1", "!field `at` is bytes, not a time"),
    ("boolean", True, "!field `at` is bool, not a time"),
    ({"type": "int", "logicalType": "date"}, date(2026, 11, 15), "dt=2026-11-15"),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        datetime(1999, 11, 15, tzinfo=UTC),  # which as a plain number would be seconds
        "dt=1999-11-15",
    ),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        datetime(2026, 11, 15, tzinfo=UTC),
        "dt=2026-11-15",
    ),
    (record(("at", "long"), name="Inner"), {"at": NOON}, "!field `at` is dict, not a time"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), TYPES, ids=[str(each[0]) for each in TYPES])
def test_types(tmp_path: Path, kind: Any, value: Any, expected: str) -> None:
    schema = record(("at", kind))
    path = tmp_path / "one.avsc"
    path.write_text(json.dumps(schema))
    assert laid(f"avro:at?schema={path}", [encoded(schema, {"at": value})]) == [expected]


def test_a_field_inside_a_record(tmp_path: Path) -> None:
    schema = record(("meta", ["null", record(("at", "long"), name="Meta")]))
    path = tmp_path / "one.avsc"
    path.write_text(json.dumps(schema))
    values = [encoded(schema, {"meta": {"at": NOON}}), encoded(schema, {"meta": None})]
    found = laid(f"avro:meta.at?schema={path}", values)
    assert found == ["dt=2026-11-15", "!field `meta.at` is missing or null"]


NULLS = {"type": "array", "items": "null"}
NODE = record(("at", "long"), ("next", ["null", "Node"]), name="Node")
REFUSED = {
    "itself": NODE,
    "by way of another": record(
        ("in", record(("out", {"type": "map", "values": "Order"}), name="In"))
    ),
    "in a namespace": {**NODE, "namespace": "shop.v1"},
    "nulls": record(("at", "long"), ("none", NULLS)),
    "empty records": record(("none", {"type": "array", "items": record(name="Empty")})),
    "empty fixed": record(
        ("none", {"type": "fixed", "name": "Zero", "size": 0}),
        ("many", {"type": "array", "items": "Zero"}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_whose_values_could_end_the_process_are_refused(name: str, tmp_path: Path) -> None:
    schema = REFUSED[name]
    (tmp_path / "7.avsc").write_text(json.dumps(schema))
    with pytest.raises(InvalidError, match="which is not supported"):
        open_parser(f"avro:at?schema={tmp_path}/7.avsc", FolderSettings())
    deep = b"\x00\x00\x00\x00\x07" + b"\x02\x02" * 200_000 + b"\x02\x00"
    (found,) = laid(f"avro:at?schemas={tmp_path}", [deep])
    assert found.endswith("which is not supported")


def test_a_type_used_twice_is_no_circle(tmp_path: Path) -> None:
    inner = record(("at", "long"), ("mark", {"type": "enum", "name": "Mark", "symbols": ["A"]}))
    schema = record(
        ("one", {**inner, "name": "Part"}),
        ("two", ["null", "Part"]),
        ("all", {"type": "array", "items": "Part"}),
    )
    path = tmp_path / "one.avsc"
    path.write_text(json.dumps(schema))
    part = {"at": NOON, "mark": "A"}
    value = encoded(schema, {"one": part, "two": part, "all": [part, part]})
    assert laid(f"avro:two.at?schema={path}", [value]) == ["dt=2026-11-15"]


def test_framed_values_of_one_schema(file: Path) -> None:
    values = [order(number=7), order(number=9_999_999), order(), b"\x00\x00", b"\x00" * 5]
    found = laid(f"avro:at?schema={file}&framed=yes", values)
    assert found[:2] == ["dt=2026-11-15"] * 2
    unframed = "!value does not begin with a zero byte and a schema's id"
    assert found[2:4] == [unframed] * 2
    assert found[4].startswith("!value is not Avro of its schema: ")


def test_a_folder_of_schemas(tmp_path: Path) -> None:
    later = record(("at", "string"), ("id", "string"), name="Order")
    (tmp_path / "7.avsc").write_text(json.dumps(ORDER))
    (tmp_path / "8.avsc").write_text(json.dumps(later))
    (tmp_path / "9.avsc").write_text("{")
    values = [
        order(number=7),
        encoded(later, {"at": "2026-11-16", "id": ""}, 8),
        order(number=9),
        order(number=10),
    ]
    found = laid(f"avro:at?schemas={tmp_path}", values)
    assert found[:2] == ["dt=2026-11-15", "dt=2026-11-16"]
    assert "9.avsc` is not an Avro schema" in found[2]
    assert found[3] == "!schema 10 is not in the folder of schemas"


class Registry(BaseHTTPRequestHandler):
    """Knows schema 7; 8 is of another type, 9 no schema, 500 a failure."""

    asked: list[str]

    def do_GET(self) -> None:
        number = self.path.removeprefix("/base/schemas/ids/")
        type(self).asked.append(number)
        replies: dict[str, tuple[int, Any]] = {
            "7": (200, {"schema": json.dumps(ORDER)}),
            "8": (200, {"schema": "syntax = 'proto3'", "schemaType": "PROTOBUF"}),
            "9": (200, {"schema": "nonsense"}),
            "500": (500, {"message": "down"}),
        }
        status, body = replies.get(number, (404, {"error_code": 40_403}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def registry() -> Iterator[str]:
    Registry.asked = []
    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/base"
        server.shutdown()
        thread.join()


def test_a_registry_is_asked_once_for_each_schema(registry: str) -> None:
    values = [order(number=number) for number in (7, 8, 9, 10)] * 3
    found = laid(f"avro:at?registry={registry}", values)
    assert found[0] == found[4] == "dt=2026-11-15"
    assert found[1] == "!schema 8 in the registry is not an Avro schema"
    assert found[2].startswith("!schema 9 in the registry is not an Avro schema (")
    assert found[3] == "!schema 10 is not in the registry"
    assert sorted(Registry.asked) == ["10", "7", "8", "9"]


def test_a_registry_that_fails_makes_no_dead_letters(registry: str) -> None:
    parser = open_parser(f"avro:at?registry={registry}", FolderSettings())
    with pytest.raises(UnavailableError, match="answers 500"):
        parser.lay_out(batch([order(number=500)]))
    nobody = open_parser("avro:at?registry=http://127.0.0.1:9", FolderSettings())
    with pytest.raises(UnavailableError, match="does not answer"):
        nobody.lay_out(batch([order(number=7)]))


def test_what_is_refused_at_open(tmp_path: Path, file: Path) -> None:
    (tmp_path / "bad.avsc").write_text('{"type": "recrd"}')
    (tmp_path / "plain.avsc").write_text('"long"')
    cases = {
        "avro:at": "give schema, schemas or registry",
        f"avro:at?schema={file}&registry=http://x": "give schema, schemas or registry",
        f"avro:?schema={file}": "a field's name is empty",
        f"avro:att?schema={file}": "no field `att` (did you mean `at`?): it has id, at, tags",
        f"avro:at?schema={tmp_path}/none.avsc": "cannot be read",
        f"avro:at?schema={tmp_path}": "cannot be read",
        f"avro:at?schema={tmp_path}/bad.avsc": "is not an Avro schema",
        f"avro:at?schema={tmp_path}/plain.avsc": "is not a record's",
        f"avro:at?schemas={tmp_path}/none": "is not a folder",
        "avro:at?registry=ftp://host": "give http://host:port",
        "avro:at?registry=http://me:pw@host": "names a user or password",
        f"avro:at?schem={file}": "unknown option `schem` (did you mean `schema`?)",
        f"avro:at?schema={file}&framed=maybe": "option framed is `maybe`: give yes or no",
        f"avro:at?schema={file}&schema={file}": "option `schema` is empty or given twice",
    }
    for text, message in cases.items():
        with pytest.raises(InvalidError) as caught:
            open_parser(text, FolderSettings())
        assert message in str(caught.value), text
        assert "\n" not in str(caught.value)
