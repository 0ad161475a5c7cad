"""Parsers of lines of text: by a pattern, and by the number of a field."""

from __future__ import annotations

import pytest

from tests.codec.parsers.layouts import laid, times_of

OUTSIDE = "!time is outside of the years 1970 to 9999: "

REGEX = [
    (r"at=(\d+)", b"level=3 at=1794744000 x", 1_794_744_000_000),
    (r"at=(\d+)", b"at=1794744000123", 1_794_744_000_123),
    (r"at=(\d+)", b"at=1 at=2", 1_000),  # the first match
    (r"\[([^\]]+)\]", b"x [2026-11-15T12:00:00+01:00] y", 1_794_740_400_000),
    (r"^(\S+ \S+)", b"2026-11-15 12:00:00 INFO hello", 1_794_744_000_000),
    (r"(\d+)-(\d+)", b"1794744000-5", 1_794_744_000_000),
    (r"(?:a|b)(\d+)", b"b1794744000", 1_794_744_000_000),
    (r"(?i)AT=(\d+)", b"at=1794744000", 1_794_744_000_000),
    (r"(?P<time>\d+)", b"1794744000", 1_794_744_000_000),
    (r"it's (\d+)", b"it's 1794744000", 1_794_744_000_000),
    ("ü(\\d+)", "ü1794744000".encode(), 1_794_744_000_000),
    (r"at=(\d+)", b"caf\xe9 at=1794744000", 1_794_744_000_000),  # Latin-1 elsewhere in the line
    (r"at=(\d+)", b"a\x00b at=1794744000", 1_794_744_000_000),
    (r"at=(-?\d+)", b"at=-5", OUTSIDE + "-5"),
    (
        r"at=(\w*)",
        b"at=soon",
        "!what the pattern finds is neither an epoch nor an ISO 8601 time: soon",
    ),
    (r"at=(\w*)", b"at=", "!pattern finds no time: at="),
    (r"at=(\d+)", b"nothing\there", "!pattern finds no time: nothing?here"),
    (r"at=(\d+)", b"", "!pattern finds no time: "),
    (r"at=(\d+)", None, "!null value"),
    (r"(a+)+$", b"a" * 50_000 + b"!", "!pattern finds no time: " + "a" * 60),  # in linear time
]


@pytest.mark.parametrize(
    ("pattern", "value", "expected"), REGEX, ids=[f"{p} {str(v)[:30]}" for p, v, _ in REGEX]
)
def test_regex(pattern: str, value: bytes | None, expected: int | str) -> None:
    if isinstance(expected, str):
        assert laid(f"regex:{pattern}", [value]) == [expected]
    else:
        assert times_of(f"regex:{pattern}", [value]) == [expected]


DELIMITED = [
    ("3|,", b"a,b,1794744000,d", 1_794_744_000_000),
    ("1|,", b"1794744000", 1_794_744_000_000),
    ("3|,", b"a,b, 2026-11-15T12:00:00Z \r\n", 1_794_744_000_000),
    (r"2|\t", b"a\t1794744000\tb", 1_794_744_000_000),
    (r"2|\x01", b"a\x011794744000", 1_794_744_000_000),
    ("2||", b"a|1794744000", 1_794_744_000_000),
    ("2|::", b"a::1794744000", 1_794_744_000_000),
    ("2|'", b"a'1794744000", 1_794_744_000_000),
    ("2|é", "aé1794744000".encode(), 1_794_744_000_000),
    ("2|,", b"\xff\xff,1794744000", 1_794_744_000_000),
    ("3|,", b"a,b", "!field 3 is missing or empty: a,b"),
    ("3|,", b"a,b,,d", "!field 3 is missing or empty: a,b,,d"),
    ("3|,", b"a,b,  ,d", "!field 3 is missing or empty: a,b,  ,d"),
    ("1|,", b"", "!field 1 is missing or empty: "),
    ("1|,", b'"1794744000"', '!field 1 is neither an epoch nor an ISO 8601 time: "1794744000"'),
    ("1|,", None, "!null value"),
]


@pytest.mark.parametrize(
    ("argument", "value", "expected"), DELIMITED, ids=[f"{a} {v!r}" for a, v, _ in DELIMITED]
)
def test_delimited(argument: str, value: bytes | None, expected: int | str) -> None:
    if isinstance(expected, str):
        assert laid(f"delimited:{argument}", [value]) == [expected]
    else:
        assert times_of(f"delimited:{argument}", [value]) == [expected]


def test_lines_in_one_batch_are_what_they_are_alone() -> None:
    laid(r"regex:at=(\w*)", [value for _, value, _ in REGEX])
    laid("delimited:3|,", [value for _, value, _ in DELIMITED])
