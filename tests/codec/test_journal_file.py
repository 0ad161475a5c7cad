"""A journal's bytes: what was packed comes out, in parts too, or the damage is told."""

from __future__ import annotations

import io
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.codec.test_id_index import blocks_with, hash_id
from tidelog.codec.event_batch import batch_of
from tidelog.codec.journal_file import JOURNAL_SCHEMA, EncodedJournal, JournalFile, encode_journal
from tidelog.codec.segment import decode_index
from tidelog.errors import CorruptError
from tidelog.model.topic import JournalOrigin

pytestmark = pytest.mark.unit


def table_of(offsets: list[int], value_bytes: int = 20, ids: bool = True) -> pa.Table:
    count = len(offsets)
    random = np.random.default_rng(len(offsets))
    batch = batch_of(
        [
            [1_000 + offset * 7 % 5_000 for offset in offsets],
            [f"id-{offset}" for offset in offsets] if ids else None,
            [b"k%d" % (offset % 3) for offset in offsets],
            [None if offset % 11 == 5 else random.bytes(value_bytes) for offset in offsets],
            ["t"] * count,
            [[("h", b"%d" % offset)] if offset % 4 == 0 else None for offset in offsets],
        ]
    )
    return pa.Table.from_batches([batch]).add_column(
        0, JOURNAL_SCHEMA.field(0), pa.array(offsets, pa.int64())
    )


def opened(journal: EncodedJournal, base: int, count: int) -> tuple[JournalFile, list[int]]:
    fetched: list[int] = []

    def fetch(start: int, end: int) -> bytes:
        fetched.append(end - start)
        return journal.data[start:end]

    return JournalFile(fetch, journal.run(base, count, "key", 0), "journal `key`"), fetched


def test_what_was_packed_comes_out_group_by_group() -> None:
    tables = [table_of(list(range(first, first + 900, 3)), 20_000) for first in (0, 900, 1_800)]
    journal = encode_journal(tables, applied=7)
    file, _ = opened(journal, 0, 2_700)
    assert len(file.groups) > 3
    found = pa.Table.from_batches([file.read(group) for group in file.groups])
    assert found.equals(pa.concat_tables(tables).cast(JOURNAL_SCHEMA))
    assert journal.journal.events == 900
    assert journal.journal.applied == 7
    times = found.column("timestamp").cast(pa.int64()).to_pylist()
    assert (journal.first_ms, journal.last_ms) == (min(times), max(times))


@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 6), (299, 301), (2_697, 9_999), (1, 3)])
def test_only_the_groups_of_a_range_are_given(start: int, end: int) -> None:
    journal = encode_journal([table_of(list(range(0, 2_700, 3)), 20_000)], applied=0)
    file, _ = opened(journal, 0, 2_700)
    wanted = {offset for offset in range(0, 2_700, 3) if start <= offset < end}
    groups = file.groups_of(start, end)
    found = [offset for group in groups for offset in file.read(group).column(0).to_pylist()]
    assert wanted <= set(found)
    if not wanted:
        assert len(groups) <= 1


def test_sources_are_stored_under_a_key_that_never_changes() -> None:
    """Journals that are stored already have it: another key would lose where they came from."""
    origin = JournalOrigin(0, 10, "segment", 0)
    encoded = encode_journal([table_of(list(range(10)))], 0, lambda: [origin])
    metadata = pq.read_metadata(io.BytesIO(encoded.data)).metadata
    assert b"tidelog.sources" in metadata


def test_few_columns_cost_few_bytes() -> None:
    journal = encode_journal([table_of(list(range(3_000)), 1_000)], applied=0)
    file, fetched = opened(journal, 0, 3_000)
    fetched.clear()
    batch = file.read(file.groups[0], ["id", "offset"])
    assert batch.schema.names == ["offset", "id"]
    assert sum(fetched) < len(journal.data) / 20


def test_any_parquet_reader_reads_it(tmp_path: Path) -> None:
    journal = encode_journal([table_of(list(range(500)))], applied=0)
    assert pq.read_table(io.BytesIO(journal.data)).num_rows == 500
    path = tmp_path / "journal.parquet"
    path.write_bytes(journal.data)
    assert duckdb.sql(f"select sum(\"offset\") from '{path}'").fetchall() == [(sum(range(500)),)]


def test_its_ids_are_in_its_index_by_row_group() -> None:
    journal = encode_journal([table_of(list(range(1_000)), 20_000)], applied=0)
    file, _ = opened(journal, 0, 1_000)
    index = decode_index(journal.data[journal.ids_start : journal.ids_end], "journal `key`")
    for group in file.groups:
        for offset in (group.first, group.last):
            assert group.number in blocks_with(index, hash_id(f"id-{offset}"))
    without = encode_journal([table_of([1, 2], ids=False)], applied=0)
    assert (without.ids_start, without.ids_end) == (0, 0)


def test_an_emptied_journal_is_one_too() -> None:
    journal = encode_journal([], applied=3)
    file, _ = opened(journal, 10, 5)
    assert file.groups == ()
    assert file.groups_of(0, 100) == ()
    assert pq.read_table(io.BytesIO(journal.data)).num_rows == 0


def test_damage_is_told_or_does_no_harm() -> None:
    """Pages have checksums; in a page's header there are hints that nobody here goes by."""
    journal = encode_journal([table_of(list(range(300)))], applied=0)
    run = journal.run(0, 300, "key", 0)
    file, _ = opened(journal, 0, 300)
    whole = file.read(file.groups[0])
    told = 0
    places = [*range(4, journal.ids_start, 97), *range(journal.ids_end, len(journal.data), 7)]
    for at in places:
        data = journal.data[:at] + bytes([journal.data[at] ^ 0x10]) + journal.data[at + 1 :]
        try:
            broken = JournalFile(lambda start, end, data=data: data[start:end], run, "journal")
            assert broken.read(file.groups[0]).equals(whole)
        except CorruptError:
            told += 1
    assert told > 0.9 * len(places)
