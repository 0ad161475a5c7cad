"""How deep a value may nest: bounded by a limit of ours, not by the interpreter's stack."""

from __future__ import annotations

import sys

import msgspec
import pytest

from tidelog.codec.event_json import event_of_line
from tidelog.codec.fields import FieldPaths, JsonLines
from tidelog.errors import InvalidError
from tidelog.model.decoding import check_json_depth, check_msgpack_depth, is_deep_json
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
    ],
)
def test_brackets_in_strings_and_side_by_side_do_not_count(text: bytes | str, deep: bool) -> None:
    assert is_deep_json(text) is deep


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
