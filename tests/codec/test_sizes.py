"""Batches are cut by the sizes of their rows: large events do not hide among small ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidelog.codec import journal_file as journal
from tidelog.codec.event_batch import table_of
from tidelog.codec.formats.batches import fitting_rows, row_sizes, slices
from tidelog.connectors.sink import lot_pieces
from tidelog.log.producer.producer import Producer
from tidelog.model.event import Event
from tidelog.playback.pages import _fitting, _some

LARGE = 50_000


def uneven() -> pa.RecordBatch:
    """30 large events, 4,000 empty ones, and 5 large ones."""
    large, small = Event(b"x" * LARGE, timestamp=1), Event(b"", timestamp=1)
    events = [*[large] * 30, *[small] * 4_000, *[large] * 5]
    return table_of(events, 1).combine_chunks().to_batches()[0]


def test_no_slice_is_larger_than_its_bound_unless_one_row_is() -> None:
    batch = uneven()
    parts = list(slices(batch, 3 * LARGE, 1_000))
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([batch]))
    assert max(int(row_sizes(part).sum()) for part in parts) <= 3 * LARGE
    assert max(part.num_rows for part in parts) == 1_000
    assert [part.num_rows for part in slices(batch.slice(0, 4), 10)] == [1, 1, 1, 1]
    assert list(slices(batch.slice(0, 0), 10)) == []
    assert fitting_rows(batch, 2 * LARGE + 1_000) == 2
    assert fitting_rows(batch, 1) == 1
    assert fitting_rows(batch, 1 << 30) == batch.num_rows


def test_rows_of_a_table_in_chunks_have_the_same_sizes() -> None:
    batch = uneven()
    chunks = pa.Table.from_batches([batch.slice(0, 7), batch.slice(7, 0), batch.slice(7)])
    assert (row_sizes(chunks) == row_sizes(batch)).all()


def test_pieces_of_a_lot_are_small_where_sizes_are_uneven() -> None:
    batch = uneven()
    pieces = list(lot_pieces(batch))
    assert sum(piece.num_rows for piece in pieces) == batch.num_rows
    assert max(piece.nbytes for piece in pieces) < 1.1 * (1 << 20)


def test_segments_and_row_groups_are_small_where_sizes_are_uneven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = pa.Table.from_batches([uneven()])

    context = SimpleNamespace(log_settings=SimpleNamespace(segment_bytes=4 * LARGE))
    producer: Any = SimpleNamespace(_context=context)
    parts = Producer._slices(producer, table, whole=False)
    assert pa.concat_tables(parts).equals(table)
    assert max(int(row_sizes(part).sum()) for part in parts) <= 4 * LARGE
    monkeypatch.setattr(journal, "_GROUP_BYTES", 4 * LARGE)
    groups = list(journal._groups([table, table.slice(0, 2)]))
    assert pa.concat_tables(groups).equals(pa.concat_tables([table, table.slice(0, 2)]))
    assert max(int(row_sizes(group).sum()) for group in groups) <= 4 * LARGE
    monkeypatch.setattr(journal, "_GROUP_ROWS", 100)
    groups = list(journal._groups([table.slice(30, 150), table.slice(180, 50)]))
    assert [group.num_rows for group in groups] == [100, 100]


def test_pages_have_the_events_that_fit_where_sizes_are_uneven() -> None:
    batch = uneven()
    page = _fitting(batch, 5_000, 4 * LARGE)
    assert page is not None
    assert page.num_rows == 3
    some = _some(batch, 5_000, 4 * LARGE)
    assert (some.part.num_rows, some.is_cut) == (3, True)
