"""Times in Protocol Buffers messages, described by a descriptor set that the test builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from tests.codec.parsers.layouts import laid
from tidelog.codec.parsers import FolderSettings, open_parser
from tidelog.errors import InvalidError

NOON = 1_794_744_000
Field = descriptor_pb2.FieldDescriptorProto
KINDS = {
    "at": Field.TYPE_INT64,
    "small": Field.TYPE_UINT32,
    "unsigned": Field.TYPE_FIXED64,
    "real": Field.TYPE_DOUBLE,
    "text": Field.TYPE_STRING,
    "raw": Field.TYPE_BYTES,
    "flag": Field.TYPE_BOOL,
}


def described() -> list[Any]:
    """Two files, of which the second imports the first, and Google's timestamps."""
    meta = descriptor_pb2.FileDescriptorProto(name="meta.proto", package="shop", syntax="proto3")
    message = meta.message_type.add(name="Meta")
    message.field.add(name="at", number=1, type=Field.TYPE_INT64, label=Field.LABEL_OPTIONAL)
    file = descriptor_pb2.FileDescriptorProto(
        name="order.proto",
        package="shop",
        syntax="proto3",
        dependency=["meta.proto", "google/protobuf/timestamp.proto"],
    )
    message = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate(KINDS.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=Field.LABEL_OPTIONAL)
    message.field.add(name="many", number=20, type=Field.TYPE_INT64, label=Field.LABEL_REPEATED)
    for number, name, kind in ((21, "meta", ".shop.Meta"), (22, "stamp", _STAMP)):
        message.field.add(
            name=name,
            number=number,
            type=Field.TYPE_MESSAGE,
            type_name=kind,
            label=Field.LABEL_OPTIONAL,
        )
    message.oneof_decl.add(name="_maybe")
    message.field.add(
        name="maybe",
        number=23,
        type=Field.TYPE_INT64,
        label=Field.LABEL_OPTIONAL,
        oneof_index=0,
        proto3_optional=True,
    )
    return [meta, file]


_STAMP = ".google.protobuf.Timestamp"


@pytest.fixture(scope="module")
def order() -> Any:
    """The class of the message, made apart from the parser's own."""
    pool = descriptor_pool.DescriptorPool()
    stamp = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(stamp)
    for file in (stamp, *described()):
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


@pytest.fixture
def options(tmp_path: Path) -> str:
    return options_of(tmp_path, described()[::-1])  # in the wrong order, without timestamps


def options_of(folder: Path, files: list[Any]) -> str:
    path = folder / "order.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=files).SerializeToString())
    return f"descriptor={path}&message=shop.Order"


CASES = [
    ("at", {"at": NOON}, "dt=2026-11-15"),
    ("at", {"at": NOON * 1_000}, "dt=2026-11-15"),
    ("at", {"at": -1}, "!time is outside of the years 1970 to 9999: -1"),
    ("at", {}, "!field `at` is missing or 0"),  # never 1970 by default
    ("at", {"at": 0}, "!field `at` is missing or 0"),
    ("small", {"small": NOON}, "dt=2026-11-15"),
    ("unsigned", {"unsigned": (1 << 64) - 1}, "dt=2554-07-21"),
    ("real", {"real": NOON + 0.5}, "dt=2026-11-15"),
    ("real", {"real": float("nan")}, "!field `real` is neither an epoch nor an ISO 8601 time: nan"),
    ("text", {"text": "2026-11-15T12:00:00Z"}, "dt=2026-11-15"),
    ("text", {"text": ""}, "!field `text` is missing or 0"),
    ("maybe", {"maybe": 0}, "dt=1970-01-01"),  # here the message does know
    ("maybe", {}, "!field `maybe` is missing or null"),
    ("meta.at", {"meta": {"at": NOON}}, "dt=2026-11-15"),
    ("meta.at", {"meta": {}}, "!field `meta.at` is missing or 0"),
    ("meta.at", {}, "!field `meta.at` is missing or null"),
    ("stamp", {"stamp": {"seconds": NOON, "nanos": 999_999_999}}, "dt=2026-11-15"),
    ("stamp", {"stamp": {"seconds": 86_399, "nanos": 999_999_999}}, "dt=1970-01-01"),
    ("stamp", {"stamp": {}}, "dt=1970-01-01"),
    ("stamp", {}, "!field `stamp` is missing or null"),
    (
        "stamp",
        {"stamp": {"seconds": -1}},
        "!time is outside of the years 1970 to 9999: -1.000",
    ),
    ("stamp.seconds", {"stamp": {"seconds": NOON}}, "dt=2026-11-15"),
]


@pytest.mark.parametrize(("field", "value", "expected"), CASES)
def test_fields(order: Any, options: str, field: str, value: Any, expected: str) -> None:
    data = order(**value).SerializeToString()
    assert laid(f"protobuf:{field}?{options}", [data]) == [expected]


def test_hostile_bytes(order: Any, options: str) -> None:
    good = order(at=NOON, many=[1, 2, 3]).SerializeToString()
    values = [b"\xff", b"\x08", good[:-1], b"\x0b" * 100, None, b"", good]
    found = laid(f"protobuf:at?{options}", values)
    assert all(row.startswith("!value is not Protobuf of its message: ") for row in found[:4])
    assert found[4:] == ["!null value", "!field `at` is missing or 0", "dt=2026-11-15"]


def test_what_is_refused_at_open(tmp_path: Path, options: str) -> None:
    (tmp_path / "text.desc").write_text("not a descriptor")
    (tmp_path / "part").mkdir()
    part = options_of(tmp_path / "part", described()[1:])
    cases = {
        "protobuf:at": "give ?descriptor=FILE&message=package.Name",
        f"protobuf:at?descriptor={tmp_path}/order.desc": "give ?descriptor=FILE&message",
        f"protobuf:?{options}": "a field's name is empty",
        f"protobuf:att?{options}": "no field `att` (did you mean `at`?)",
        f"protobuf:at.x?{options}": "no field `x`",
        f"protobuf:many?{options}": "field `many` is repeated",
        f"protobuf:raw?{options}": "field `raw` is not a valid time",
        f"protobuf:flag?{options}": "field `flag` is not a valid time",
        f"protobuf:meta?{options}": "field `meta` is not a valid time",
        f"protobuf:at?{options}s": "no message `shop.Orders` (did you mean `shop.Order`?)",
        f"protobuf:at?descriptor={tmp_path}/none&message=shop.Order": "cannot be read",
        f"protobuf:at?descriptor={tmp_path}/text.desc&message=x": "is not a valid descriptor set",
        f"protobuf:at?{part}": "is not whole",
        f"protobuf:at?{options}&schema=x": "unknown option `schema`",
    }
    for text, message in cases.items():
        with pytest.raises(InvalidError) as caught:
            open_parser(text, FolderSettings())
        assert message in str(caught.value), text
        assert "\n" not in str(caught.value)
