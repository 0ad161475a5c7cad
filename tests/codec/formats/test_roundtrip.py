"""Every format gives back exactly the events that it was given, whatever is in them."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.formats.files import (
    BATCHES,
    TYPED,
    VARIANTS,
    batch,
    label,
    opened,
    read,
    table,
    write,
)
from tidelog import InvalidError, NotFoundError
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.batches import PIECE_BYTES, row_sizes

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=label)


def without_empty_headers(events: pa.Table) -> pa.Table:
    """Whole events as JSON lines do not tell an empty list of headers from none."""
    column = events.column("headers")
    nothing = pa.scalar(None, column.type)
    kept = pc.if_else(pc.equal(pc.list_value_length(column), 0), nothing, column)
    return events.set_column(
        EVENT_SCHEMA.names.index("headers"), EVENT_SCHEMA.field("headers"), kept
    )


@every_variant
@settings(deadline=None, max_examples=40)
@given(batches=BATCHES, cut=st.integers(0, 3))
def test_all_columns_come_back(variant: Any, batches: list[pa.RecordBatch], cut: int) -> None:
    form = opened(variant)
    sliced = [each.slice(cut) for each in batches]  # a slice has offsets of its own
    expected = table(sliced)
    if variant[2].get("mode") == "events":
        expected = without_empty_headers(expected)
    assert read(form, write(form, sliced)).to_pylist() == expected.to_pylist()


@every_variant
def test_files_larger_than_a_block_come_back(variant: Any) -> None:
    form = opened(variant)
    values = [b'{"n": %d, "text": "%s"}' % (n, b"x" * (n % 700)) for n in range(9_000)]
    values[17] = b"y" * 5_000_000  # larger than what is read at a time
    values[18] = values[4_000] = None  # type: ignore[call-overload]
    whole = batch(
        [
            {
                "value": value,
                "key": b"k%d" % (n % 10),
                "headers": [{"name": "n", "value": b"%d" % n}] if n % 3 else None,
            }
            for n, value in enumerate(values)
        ]
    )
    pieces = [whole.slice(start, 1_001) for start in range(0, 9_000, 1_001)]
    file = write(form, pieces)
    assert read(form, file).equals(table([whole]))
    assert write(form, pieces) == file  # and the same batches give the same file


@every_variant
def test_a_reader_gives_a_bounded_amount_at_a_time(variant: Any) -> None:
    form = opened(variant)
    values = batch([{"value": bytes([n]) * (1 << 20)} for n in range(20)])
    found = list(form.read(*filter(None, dataclasses.astuple(write(form, [values, values])))))
    assert table(found).equals(table([values, values]))
    assert max(each.nbytes for each in found) <= PIECE_BYTES + (1 << 20)


@every_variant
def test_a_file_without_events_is_a_file(variant: Any) -> None:
    form = opened(variant)
    for batches in ([], [batch([])]):
        assert read(form, write(form, batches)).num_rows == 0


@every_variant
def test_sinks_and_sources_may_be_of_any_kind(variant: Any, tmp_path: Path) -> None:
    form = opened(variant)
    events = batch([{"value": b'{"a": 1}'}, {"value": None}, {"value": b"", "key": b""}])
    has_sidecar = form.sidecar_name("x") is not None

    streams = [pa.BufferOutputStream() for _ in range(1 + has_sidecar)]
    writer = form.writer(*streams)
    writer.write(events)
    writer.close()
    buffers = [stream.getvalue().to_pybytes() for stream in streams]  # the sinks are still open

    paths = [tmp_path / f"{index}{form.extension}" for index in range(1 + has_sidecar)]
    files = [path.open("wb", buffering=0) for path in paths]  # may take a part of a write
    writer = form.writer(*files)
    writer.write(events)
    writer.close()
    assert not any(file.closed for file in files)
    for file in files:
        file.close()
    assert [path.read_bytes() for path in paths] == buffers

    for sources in (buffers, paths, [str(path) for path in paths]):
        assert table(list(form.read(*sources))).equals(table([events]))
    handles = [io.BytesIO(buffer) for buffer in buffers]
    assert table(list(form.read(*handles))).equals(table([events]))
    with pytest.raises(NotFoundError, match="absent`: is not there"):
        list(form.read(*[tmp_path / "absent" for _ in paths]))


@every_variant
def test_other_columns_and_missing_sidecars_are_refused(variant: Any) -> None:
    form = opened(variant)
    has_sidecar = form.sidecar_name("x") is not None
    writer = form.writer(*[io.BytesIO() for _ in range(1 + has_sidecar)])
    with pytest.raises(InvalidError, match="batch: has the columns value: give the event columns"):
        writer.write(pa.record_batch({"value": [b"x"]}))
    wrong = [io.BytesIO() for _ in range(2 - has_sidecar)]
    with pytest.raises(InvalidError, match="sidecar"):
        form.writer(*wrong)
    with pytest.raises(InvalidError, match="sidecar"):
        form.read(*[b"" for _ in wrong])


class Full(io.BytesIO):
    """A sink on a full disk."""

    def write(self, data: Any, /) -> int:
        raise OSError(28, "No space left on device")


@every_variant
def test_a_full_disk_is_the_sinks_own_error(variant: Any) -> None:
    form = opened(variant)

    def fill() -> None:
        beside = [io.BytesIO()] if form.sidecar_name("x") else []
        writer = form.writer(Full(), *beside)
        writer.write(batch([{"value": b"x" * 100_000}]))
        writer.close()

    with pytest.raises(OSError, match="No space left on device") as error:
        fill()
    assert error.value.errno == 28


@pytest.mark.parametrize("name", ["parquet", "orc", "avro"])
def test_typed_files_keep_the_value_and_restore_by_default(name: str) -> None:
    events = batch(
        [
            {"value": b'{"id": 1, "user": {"name": "a", "tags": ["x", null]}}', "key": b"k"},
            {"value": b' {"user": null, "more": 1}', "headers": [{"name": "h", "value": None}]},
        ]
    )
    for kept in ({}, {"keep_value": True}):
        form = opened((name, "none", {"schema": TYPED, **kept}))
        assert read(form, write(form, [events])).equals(table([events]))
    form = opened((name, "none", {"schema": TYPED, "keep_value": False}))
    file = write(form, [events])
    with pytest.raises(InvalidError, match="cannot be restored from it: write it again without"):
        form.read(file.data)


@pytest.mark.long
def test_values_that_compress_to_nothing_do_not_overflow_a_stripe() -> None:
    """Two gigabytes and more in one stripe of ORC."""
    form = opened(("orc", "zstd", {}))
    values = batch([{"value": bytes(1 << 20)}] * 100)
    file = write(form, [values] * 22)
    assert len(file.data) < 10_000_000
    assert sum(each.num_rows for each in form.read(file.data)) == 2_200


@settings(deadline=None)
@given(batches=BATCHES, cut=st.integers(0, 3))
def test_sizes_of_rows_cover_their_bytes(batches: list[pa.RecordBatch], cut: int) -> None:
    for each in batches:
        rows = each.slice(cut)
        sizes = row_sizes(rows).tolist()
        assert len(sizes) == rows.num_rows
        for size, row in zip(sizes, rows.to_pylist(), strict=True):
            inside = [
                pair["name"].encode() + (pair["value"] or b"") for pair in row["headers"] or ()
            ]
            texts = [row["value"] or b"", row["key"] or b"", (row["id"] or "").encode()]
            assert size >= sum(map(len, inside + texts))
