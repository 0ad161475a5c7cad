"""Times in MessagePack maps."""

from __future__ import annotations

from datetime import UTC, datetime

import msgpack
import pytest

from tests.codec.parsers.layouts import laid, times_of

OUTSIDE = "!time is outside of the years 1970 to 9999: "
MISSING = "!field `at` is missing or null"

CASES = [
    ({"at": 1_794_744_000}, 1_794_744_000_000),
    ({"at": 1_794_744_000_123}, 1_794_744_000_123),
    ({"at": 1_794_744_000.5}, 1_794_744_000_500),
    ({"at": "1794744000"}, 1_794_744_000_000),
    ({"at": "2026-11-15T12:00:00+01:00"}, 1_794_740_400_000),
    ({"at": datetime(2026, 11, 15, 12, tzinfo=UTC)}, 1_794_744_000_000),  # MessagePack's own
    ({1: 2, "at": 1_794_744_000}, 1_794_744_000_000),
    ({"at": (1 << 64) - 1}, 18_446_744_073_709),
    ({"at": -1}, OUTSIDE + "-1"),
    ({"at": float("nan")}, "!field `at` is neither an epoch nor an ISO 8601 time: nan"),
    ({"at": float("inf")}, "!field `at` is neither an epoch nor an ISO 8601 time: inf"),
    ({"at": "soon"}, "!field `at` is neither an epoch nor an ISO 8601 time: soon"),
    ({"at": None}, MISSING),
    ({"at": True}, "!field `at` is bool, not a time"),
    ({"at": b"1794744000"}, "!field `at` is bytes, not a time"),
    ({"at": [1]}, "!field `at` is list, not a time"),
    ({"at": {"x": 1}}, "!field `at` is dict, not a time"),
    ({}, MISSING),
    ([1, 2], MISSING),
    (1_794_744_000, MISSING),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=[str(value) for value, _ in CASES])
def test_fields(value: object, expected: int | str) -> None:
    packed = msgpack.packb(value, datetime=True)
    if isinstance(expected, str):
        assert laid("msgpack:at", [packed]) == [expected]
    else:
        assert times_of("msgpack:at", [packed]) == [expected]


def test_fields_inside_maps() -> None:
    packed = [msgpack.packb(each) for each in ({"a": {"b": 1_794_744_000}}, {"a": 5}, {"a": {}})]
    missing = "!field `a.b` is missing or null"
    assert laid("msgpack:a.b", packed) == ["dt=2026-11-15", missing, missing]


HOSTILE = [
    b"",
    b"\xc1",  # never used
    b"\x81",  # a map that ends early
    b"\xdf\xff\xff\xff\xff",  # a map of four billion
    b"\xdd\xff\xff\xff\xff" * 3,
    b"\x91" * 200_000,  # very deep
    b"\x81\xa2at\x01\x00",  # something behind it
    b"\x81\xa2at\xa2\xff\xfe",  # not UTF-8
    b"\x81\x80\x01",  # a map as a key
    b"\x81\x90\x01",
    b"\x81\xa2at\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # year beyond
]


@pytest.mark.parametrize("value", HOSTILE, ids=[repr(value[:12]) for value in HOSTILE])
def test_hostile_bytes(value: bytes) -> None:
    good = msgpack.packb({"at": 1_794_744_000})
    bad, null, fine = laid("msgpack:at", [value, None, good])
    assert bad.startswith(("!value is not MessagePack", "!field `at` is missing"))
    assert (null, fine) == ("!null value", "dt=2026-11-15")
