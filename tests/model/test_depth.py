"""How deep a value may nest: bounded by a limit of ours, not by the interpreter's stack."""

from __future__ import annotations

import sys

import msgspec
import pytest

from tidelog.codec.event_json import event_of_line
from tidelog.codec.fields import FieldPaths, JsonLines
from tidelog.errors import InvalidError
from tidelog.model.decoding import (
    check_json_depth,
    check_msgpack_depth,
    is_deep_json,
    json_items,
)
from tidelog.model.event import Event
from tidelog.model.limits import NESTING_MAX


def _json(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_json_at_the_limit_passes_and_one_level_more_is_refused() -> None:
    check_json_depth(_json(NESTING_MAX))
    with pytest.raises(InvalidError, match=f"nested too deeply: the limit is {NESTING_MAX} levels"):
        check_json_depth(_json(NESTING_MAX + 1), "value")


def test_every_interpreter_parses_json_at_the_limit() -> None:
    assert msgspec.json.decode(_json(NESTING_MAX)) is not None
    assert sys.getrecursionlimit() > 2 * NESTING_MAX


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        (b"[" + b"{}," * 5_000 + b"{}]", False),
        (b'"' + b"[" * 5_000 + b'"', False),
        (b'{"a":"' + b'\\\\\\"[' * 500 + b'","b":[]}', False),
        (b'{"a":"\\\\",' + b'"b":[' * 300, True),
        (b'{"a":' * 201 + b"1" + b"}" * 201, True),
        (b'{"a":' * 200 + b"1" + b"}" * 200, False),
        ("é" + "[" * 300, True),
        (b'"' + b"x" * 65_533 + b"\\" * 2 + b'"' + b"[" * 201, True),
        (b'"' + b"x" * 65_534 + b"\\" * 3 + b'"' + b"[" * 300 + b'"', False),
        (b'["' + b"[" * 200_000 + b'",' + b"[" * 199, False),
        (b'["' + b"[" * 200_000 + b'",' + b"[" * 200, True),
        (b"[" * 150 + b" " * 70_000 + b"[" * 51, True),
    ],
)
def test_brackets_in_strings_and_side_by_side_do_not_count(text: bytes | str, deep: bool) -> None:
    assert is_deep_json(text) is deep


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (b"[]", 1),
        (b"[1]", 1),
        (b'["a,b",{"c":1,"d":[2,3]},[4,5]]', 3),
        (b'{"a":1,"b":[2,3,4]}', 2),
        (b"[" + b"0," * 300_000 + b"0]", 300_001),
        (b"[" + b'"\\",\\\\",' * 50_000 + b"0]", 50_001),
    ],
)
def test_items_are_counted_without_parsing(text: bytes, items: int) -> None:
    assert json_items(text) == items
    assert items == 1 or len(msgspec.json.decode(text)) == items


def test_event_lines_have_the_same_bound_in_the_server_and_on_the_command_line() -> None:
    deep = b'{"value":"x","more":' + _json(NESTING_MAX) + b"}"
    with pytest.raises(InvalidError, match="nested too deeply"):
        event_of_line(deep)
    fits = b'{"more":' + _json(NESTING_MAX - 1) + b"}"
    refused, taken = JsonLines(FieldPaths()).events([deep, fits])
    assert "nested too deeply" in str(refused)
    assert taken == Event(fits)


@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\0\0\0\x01\x01"])
def test_msgpack_has_the_same_bound(opens: bytes) -> None:
    check_msgpack_depth(opens * NESTING_MAX + b"\x01")
    with pytest.raises(InvalidError, match="nested too deeply"):
        check_msgpack_depth(opens * (NESTING_MAX + 1) + b"\x01")


def test_wide_msgpack_and_bytes_that_look_like_containers_pass() -> None:
    check_msgpack_depth(msgspec.msgpack.encode([[n % 3, {}] for n in range(2_000)]))
    check_msgpack_depth(msgspec.msgpack.encode({"a": b"\x91" * 5_000, "b": "é" * 500}))
    check_msgpack_depth(msgspec.msgpack.encode([1.5, -3, 2**60, None, True, "x" * 70_000, []] * 99))
