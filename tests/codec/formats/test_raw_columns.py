"""Rows as JSON: every time that a column holds has a form, also those that Python cannot hold."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from tidelog.codec.event_json import plain_rows, row_lines

YEAR_10000_S = 253_402_300_800


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [
        (pa.timestamp("s"), 0, "1970-01-01T00:00:00.000Z"),
        (pa.timestamp("ms", "UTC"), -1, "1969-12-31T23:59:59.999Z"),
        (pa.timestamp("us", "UTC"), 1_500, "1970-01-01T00:00:00.001500Z"),
        (pa.timestamp("ns", "Asia/Tokyo"), 1, "1970-01-01T00:00:00.000000001Z"),
        (pa.timestamp("us"), YEAR_10000_S * 10**6 - 1, "9999-12-31T23:59:59.999999Z"),
        (pa.timestamp("us"), YEAR_10000_S * 10**6, YEAR_10000_S * 10**6),
        (pa.timestamp("s"), -(2**62), -(2**62)),
        (pa.date32(), 3, "1970-01-04"),
        (pa.date32(), 2**31 - 1, 2**31 - 1),
        (pa.date64(), 86_400_000, "1970-01-02"),
    ],
)
def test_every_time_is_printed(kind: pa.DataType, number: int, expected: str | int) -> None:
    stored = pa.array([number, None], pa.int32() if pa.types.is_date32(kind) else pa.int64())
    times = stored.cast(kind)
    some = pa.RecordBatch.from_arrays(
        [
            times,
            pa.ListArray.from_arrays([0, 1, 2], times),
            pa.StructArray.from_arrays([times], ["at"]),
            pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "k"]), times),
            times.dictionary_encode(),
        ],
        ["plain", "listed", "inside", "mapped", "coded"],
    )
    first, second = [json.loads(line) for line in row_lines(some).splitlines()]
    assert first == {
        "plain": expected,
        "listed": [expected],
        "inside": {"at": expected},
        "mapped": [["k", expected]],
        "coded": expected,
    }
    assert second["plain"] is None
    assert second["inside"] == {"at": None}


def test_other_values_are_as_arrow_has_them() -> None:
    rows = [{"a": 1, "b": "x", "c": b"y", "d": [1.5, None], "e": {"f": True}}]
    assert plain_rows(pa.RecordBatch.from_pylist(rows), lambda count, _: count) == rows
