"""Times in Thrift structs, in bytes written here by hand as its two protocols have them."""

from __future__ import annotations

import struct

import pytest

from tests.codec.parsers.layouts import laid, times_of

NOON = 1_794_744_000
STOP = b"\x00"
MISSING = "!field 3 is missing or null"
EARLY = "!value is not Thrift's {} protocol: it ends early"


def field(kind: int, number: int, body: bytes) -> bytes:
    return struct.pack(">bh", kind, number) + body


def text(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


I64 = field(10, 3, struct.pack(">q", NOON))
BEFORE = [
    field(2, 1, b"\x01"),  # bool
    field(3, 1, b"\x07"),  # i8
    field(4, 1, struct.pack(">d", 1.5)),
    field(6, 1, struct.pack(">h", 9)),
    field(8, 1, struct.pack(">i", 9)),
    field(10, 1, struct.pack(">q", 9)),
    field(16, 1, b"u" * 16),  # uuid
    field(11, 1, text(b"caf\xe9")),
    field(12, 1, field(10, 3, struct.pack(">q", 5)) + field(11, 9, text(b"x")) + STOP),
    field(13, 1, b"\x0b\x0a" + struct.pack(">i", 1) + text(b"k") + struct.pack(">q", 5)),
    field(13, 1, b"\x08\x0a" + struct.pack(">i", 2) + b"\x00" * 24),
    field(13, 1, b"\x00\x00" + struct.pack(">i", 0)),
    field(14, 1, b"\x08" + struct.pack(">i", 3) + b"\x00" * 12),
    field(15, 1, b"\x0c" + struct.pack(">i", 2) + STOP + field(2, 1, b"\x00") + STOP),
    field(15, 1, b"\x0f" + struct.pack(">i", 1) + b"\x0b" + struct.pack(">i", 1) + text(b"deep")),
]


@pytest.mark.parametrize("before", BEFORE, ids=[repr(each[:12]) for each in BEFORE])
def test_binary_skips_what_stands_before(before: bytes) -> None:
    assert times_of("thrift:3", [before + I64 + STOP]) == [NOON * 1_000]
    assert laid("thrift:3", [before + STOP]) == [MISSING]
    cut = [before[:end] for end in range(len(before))]
    assert set(laid("thrift:3", cut)) == {EARLY.format("binary")}


BINARY = [
    (I64 + STOP, NOON * 1_000),
    (I64, NOON * 1_000),  # nothing after it is read
    (field(8, 3, struct.pack(">i", NOON)) + STOP, NOON * 1_000),
    (field(10, 3, struct.pack(">q", NOON * 1_000 + 5)) + STOP, NOON * 1_000 + 5),
    (field(10, 3, struct.pack(">q", -1)) + STOP, "!time is outside of the years 1970 to 9999: -1"),
    (field(4, 3, struct.pack(">d", 1.0)) + STOP, "!field 3 is not an i64 or i32"),
    (field(11, 3, text(b"1794744000")) + STOP, "!field 3 is not an i64 or i32"),
    (STOP, MISSING),
    (None, "!null value"),
    (b"", EARLY.format("binary")),
    (I64[:-1], EARLY.format("binary")),
    (field(11, 1, struct.pack(">i", -1)) + I64, EARLY.format("binary")),
    (field(11, 1, struct.pack(">i", 2_000_000_000)) + I64, EARLY.format("binary")),
    (field(15, 1, b"\x0c" + struct.pack(">i", 2_000_000_000)) + I64, EARLY.format("binary")),
    (field(15, 1, b"\x0a" + struct.pack(">i", 500)) + I64, EARLY.format("binary")),
    (b"\x63\x00\x01", "!value is not Thrift's binary protocol: it has the type 99"),
    (b"\x0c\x00\x01" * 100, "!value is not Thrift's binary protocol: it is nested too deep"),
]


@pytest.mark.parametrize(("value", "expected"), BINARY, ids=[repr(v)[:40] for v, _ in BINARY])
def test_binary(value: bytes | None, expected: int | str) -> None:
    if isinstance(expected, str):
        assert laid("thrift:3", [value]) == [expected]
    else:
        assert times_of("thrift:3?protocol=binary", [value]) == [expected]


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def zigzag(number: int) -> bytes:
    return varint((number << 1) ^ (number >> 63))


def short(kind: int, step: int, body: bytes = b"") -> bytes:
    return bytes([step << 4 | kind]) + body


C_I64 = short(6, 2, zigzag(NOON))  # two steps on from field 1
C_BEFORE = [
    short(1, 1),  # true
    short(2, 1),  # false
    short(3, 1, b"\x07"),
    short(4, 1, zigzag(-9)),
    short(5, 1, zigzag(9)),
    short(6, 1, zigzag(-(1 << 62))),
    short(7, 1, struct.pack("<d", 1.5)),
    short(8, 1, varint(5) + b"caf\xe9s"),
    short(8, 1, varint(300) + b"x" * 300),
    short(9, 1, b"\x36" + zigzag(1) + zigzag(2) + zigzag(300)),
    short(9, 1, b"\xf5" + varint(20) + b"\x00" * 20),
    short(9, 1, b"\x31\x01\x02\x01"),  # bools in a list do have bytes
    short(9, 1, b"\x06"),
    short(10, 1, b"\x18" + varint(2) + b"ab"),
    short(11, 1, b"\x00"),  # an empty map
    short(11, 1, b"\x01\x81" + varint(1) + b"k\x01"),  # text to bool
    short(12, 1, short(6, 3, zigzag(5)) + short(1, 1) + STOP),
    short(13, 1, b"u" * 16),
]


@pytest.mark.parametrize("before", C_BEFORE, ids=[repr(each[:12]) for each in C_BEFORE])
def test_compact_skips_what_stands_before(before: bytes) -> None:
    text_ = "thrift:3?protocol=compact"
    assert times_of(text_, [before + C_I64 + STOP]) == [NOON * 1_000]
    assert laid(text_, [before + STOP]) == [MISSING]
    cut = [before[:end] for end in range(0, len(before), 1 + len(before) // 20)]
    assert set(laid(text_, cut)) == {EARLY.format("compact")}


COMPACT = [
    (short(6, 3, zigzag(NOON)), NOON * 1_000),
    (short(5, 3, zigzag(NOON)), NOON * 1_000),
    (b"\x06" + zigzag(3) + zigzag(NOON), NOON * 1_000),  # the id in full
    (short(6, 15, zigzag(1)) + b"\x06" + zigzag(3) + zigzag(NOON), NOON * 1_000),  # ids may fall
    (short(6, 3, zigzag(-5)), "!time is outside of the years 1970 to 9999: -5"),
    (short(1, 3), "!field 3 is not an i64 or i32"),
    (STOP, MISSING),
    (None, "!null value"),
    (b"", EARLY.format("compact")),
    (short(6, 3, b"\xff"), EARLY.format("compact")),
    (short(6, 3, b"\xff" * 12), "!value is not Thrift's compact protocol: a number is too long"),
    (short(9, 1, b"\xfc" + varint(1 << 40)), EARLY.format("compact")),
    (short(15, 1), "!value is not Thrift's compact protocol: it has the type 15"),
    (short(12, 1) * 100, "!value is not Thrift's compact protocol: it is nested too deep"),
]


@pytest.mark.parametrize(("value", "expected"), COMPACT, ids=[repr(v)[:40] for v, _ in COMPACT])
def test_compact(value: bytes | None, expected: int | str) -> None:
    if isinstance(expected, str):
        assert laid("thrift:3?protocol=compact", [value]) == [expected]
    else:
        assert times_of("thrift:3?protocol=compact", [value]) == [expected]
