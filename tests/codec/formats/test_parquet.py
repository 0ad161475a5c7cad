"""Parquet files as others see them: DuckDB reads them, and their inside is as promised."""

from __future__ import annotations

import io
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.codec.formats.files import batch, opened, read, table, write
from tidelog.codec.formats import FormatSettings, open_format, parquet


def test_duckdb_reads_every_codec(tmp_path: Path) -> None:
    events = batch(
        [
            {
                "value": b'{"n": %d}' % n,
                "key": None if n % 2 else b"",
                "timestamp": 253_402_300_799_999 if n == 7 else n,
                "headers": [{"name": "h", "value": b"%d" % n}, {"name": "h", "value": None}],
            }
            for n in range(100)
        ]
    )
    for codec in ("zstd", "snappy", "gzip", "lz4", "none"):
        path = tmp_path / f"{codec}.parquet"
        path.write_bytes(write(open_format("parquet", codec), [events]).data)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        rows = connection.execute(
            'SELECT count(*), sum("offset"), count(key), min(topic), max(partition),'
            " max(epoch_ms(timestamp)), sum((decode(value)::JSON->>'n')::INT),"
            " sum(len(headers)), count(headers[2].value), typeof(any_value(timestamp))"
            " FROM read_parquet(?, filename = true) GROUP BY filename",
            [str(tmp_path / "*.parquet")],
        ).fetchall()
    expected = (100, 4950, 50, "orders", 3, 253_402_300_799_999, 4950, 200, 0)
    assert rows == [(*expected, "TIMESTAMP WITH TIME ZONE")] * 5


def test_offsets_and_times_have_statistics_and_bodies_have_none() -> None:
    file = write(open_format("parquet"), [batch([{"value": b"x", "key": b"k"}] * 10)])
    metadata = pq.ParquetFile(pa.BufferReader(file.data)).metadata
    group = metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(10)}
    assert columns["offset"].statistics.min == 0
    assert columns["offset"].statistics.max == 9
    assert columns["timestamp"].is_stats_set
    assert not columns["value"].is_stats_set
    assert not columns["key"].is_stats_set
    assert columns["topic"].has_dictionary_page
    assert not columns["value"].has_dictionary_page
    assert "DELTA_BINARY_PACKED" in columns["offset"].encodings


def test_row_groups_are_cut_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 1_000)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 200_000)
    form = open_format("parquet")
    small = [batch([{"value": b"x"}] * 300) for _ in range(10)]
    large = [batch([{"value": b"x" * 1_000}] * 500)]
    for batches, rows_max in ((small, 1_200), (large, 195)):
        file = write(form, batches)
        metadata = pq.ParquetFile(pa.BufferReader(file.data)).metadata
        found = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        assert len(found) == 3
        assert max(found) <= rows_max
        assert read(form, file).equals(table(batches))


def test_the_size_is_foretold_before_a_row_group_is_full() -> None:
    sink = io.BytesIO()
    writer = open_format("parquet", "none").writer(sink)
    writer.write(batch([{"value": bytes(1_000)}] * 1_000))
    assert len(sink.getvalue()) < 100
    assert 900_000 < writer.bytes_written < 1_200_000
    writer.close()
    assert writer.bytes_written == len(sink.getvalue())


def test_typed_columns_have_types_statistics_and_dictionaries(tmp_path: Path) -> None:
    schema = "n int, at timestamp, kind string, tags array<string>, m map<string, bigint>"
    form = opened(("parquet", "zstd", {"schema": schema}))
    value = b'{"n": 1, "at": "2026-11-15T10:00:00Z", "kind": "a", "tags": ["x"], "m": {"k": 5}}'
    path = tmp_path / "typed.parquet"
    path.write_bytes(write(form, [batch([{"value": value, "key": b"k"}, {"value": b"{}"}])]).data)
    with duckdb.connect() as connection:
        rows = connection.execute(
            'SELECT "offset", key, n, epoch_ms("at"), kind, tags, m[\'k\'] FROM read_parquet(?)',
            [str(path)],
        ).fetchall()
    assert rows == [
        (0, b"k", 1, 1_794_736_800_000, "a", ["x"], 5),
        (1, None, None, None, None, None, None),
    ]
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {
        group.column(index).path_in_schema: group.column(index)
        for index in range(group.num_columns)
    }
    assert columns["tags.list.element"].has_dictionary_page
    assert columns["m.key_value.key"].has_dictionary_page
    assert columns["n"].statistics.max == 1
    assert form.extension == ".parquet"
    assert open_format("parquet", None, FormatSettings(schema="n int")).codec == "zstd"
