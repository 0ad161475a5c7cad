"""Batches that are joined: no row is lost, however large the values are."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidelog.codec.event_batch import (
    STORED_SCHEMA,
    batch_bytes,
    batch_of,
    joined_batches,
    one_batch,
)
from tidelog.errors import InternalError


def batch(values: list[bytes]) -> pa.RecordBatch:
    return batch_of([list(range(len(values))), None, None, values, None, None])


def values_of(batches: list[pa.RecordBatch]) -> list[bytes]:
    return [value for each in batches for value in each.column("value").to_pylist()]


def test_one_batch_keeps_all_rows_in_order() -> None:
    found = one_batch([batch([b"a", b"b"]), batch([]), batch([b"c"])])
    assert found.column("value").to_pylist() == [b"a", b"b", b"c"]


def test_one_batch_of_nothing_has_the_schema() -> None:
    assert one_batch([], STORED_SCHEMA).schema == STORED_SCHEMA
    assert one_batch(pa.Table.from_batches([], STORED_SCHEMA)).num_rows == 0


def test_small_batches_are_joined_until_they_have_enough_rows() -> None:
    found = list(joined_batches([batch([b"x"] * 3)] * 5, rows=6, size=1 << 20))
    assert [each.num_rows for each in found] == [6, 6, 3]


def test_large_values_make_batches_of_fewer_rows() -> None:
    large = [batch([bytes([n]) * 1_000]) for n in range(10)]
    found = list(joined_batches(large, rows=1_000, size=3_500))
    assert all(batch_bytes(each) < 5_000 for each in found)
    assert values_of(found) == values_of(large)


def test_batches_too_large_for_one_array_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.model.limits.BATCH_BYTES_MAX", 4_000)
    given = [batch([b"a"]), batch([b"b" * 5_000]), batch([b"c"])]
    found = list(joined_batches(given, rows=1_000, size=10_000))
    assert [each.num_rows for each in found] == [1, 1, 1]
    assert values_of(found) == values_of(given)


@pytest.mark.long
def test_more_than_an_arrow_array_holds_is_refused_not_cut() -> None:
    """2,300 values of 1 MB: ``combine_chunks`` leaves two chunks."""
    mega = batch([bytes(1 << 20)] * 100)
    with pytest.raises(InternalError, match="2300 rows"):
        one_batch([mega] * 23)
    parts = joined_batches([mega] * 23, rows=4_000, size=16 << 20)
    assert sum(each.num_rows for each in parts) == 2_300
