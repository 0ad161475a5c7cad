"""Filters by fields of JSON values."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from tidelog.codec.fields import parse_field_filter
from tidelog.errors import InvalidError

VALUES: list[Any] = [
    {"amount": 9, "user": {"id": "u-7"}, "city": "San José"},
    {"amount": 10.5, "user": {"id": "u-8"}, "city": "Bern", "a.b": 1},
    {"amount": "12", "user": None, "city": "sand and sea"},
    {"amount": 9007199254740993, "user": {"id": 7}},
    [1, 2],
]


def rows(text: str) -> list[int]:
    raw = [*(json.dumps(value).encode() for value in VALUES), b"\xff not JSON", None]
    found = parse_field_filter(text).fits(pa.array(raw, pa.binary()))
    return [row for row, fits in enumerate(found.to_pylist()) if fits]


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ("amount > 10", [1, 2, 3]),
        ("amount>=10.5 and amount < 1e3", [1, 2]),
        ("amount = 12", [2]),
        ("amount = 9007199254740992", []),  # exact, where a float would round
        ("amount = 9007199254740993", [3]),
        ("user.id = u-7", [0]),
        ('user.id = "7"', [3]),
        ("user.id != u-7", [1, 2, 3, 4, 5, 6]),
        ("city contains SAN", [0, 2]),
        ("city = sand and sea", None),
        ("city = 'sand and sea'", [2]),
        ("city = San José", [0]),
        ("user.id = null", [2, 4, 5, 6]),
        ("city != null AND amount > 9", [1, 2]),
        ("/a.b = 1", [1]),
        ("/1 = 2", [4]),
    ],
)
def test_a_filter_selects_what_it_says(text: str, fitting: list[int] | None) -> None:
    if fitting is None:  # the second half is not a condition
        with pytest.raises(InvalidError, match="is not a condition"):
            rows(text)
        return
    assert rows(text) == fitting


@pytest.mark.parametrize(
    "text",
    ["", "amount", "> 3", "amount >", "amount ? 3", "a = 1 or b = 2", "a > null", "a..b = 1"],
)
def test_what_is_not_a_filter_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=r"filter|names|field"):
        parse_field_filter(text)
