"""What the writer of a format accepts, every reader accepts; anything else is a dead letter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.codec.formats.files import batch, opened, write
from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.read import ReadRequest, archived_rows, file_rows, read_rows
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.codec.event_json import plain_rows, row_lines
from tidelog.codec.formats.base import OwnColumns
from tidelog.codec.formats.typed import ColumnarFormat
from tidelog.maintenance.erase import purge

EXTREMES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127, 128],
    "smallint": [-(2**15), 2**15 - 1, 2**15],
    "int": [-(2**31), 2**31 - 1, 2**31],
    "bigint": [-(2**63), 2**63 - 1, 2**63],
    "float": [3.4028234e38, -3.4028234e38, 1e-45, 1e39, -0.0],
    "double": [1.7976931348623157e308, 5e-324, -0.0, 2**53 + 1],
    "decimal(38, 10)": ["9999999999999999999999999999.9999999999", "-1e-10", "1e28"],
    "decimal(1, 0)": [9, -9, 10],
    "string": ["", "\x00", "\U0010ffff", "x" * 100_000],
    "binary": ["", "AA==", "/" * 100_000],
    "date": ["0001-01-01", "1582-10-10", "1969-12-31", "9999-12-31"],
    "timestamp": [
        "0001-01-01T00:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "1582-10-10T00:00:00.000001Z",
        "1677-09-21T00:12:43.145224Z",  # before the first nanosecond
        "1677-09-21T00:12:43.145225Z",
        "1900-01-01T00:00:00.999999Z",
        "1969-12-31T23:59:59.999999Z",
        "1969-12-31T23:59:59.000001Z",
        "2262-04-11T23:47:16.854775Z",
        "2262-04-11T23:47:16.854776Z",  # after the last nanosecond
        "9999-12-31T00:00:00Z",
        "9999-12-31T23:59:59.999999999Z",
        "9999-12-31T23:59:59-14:00",
        -62_135_596_801,
        253_402_300_800,
    ],
}
SCHEMA = ", ".join(
    f"c{n} {kind}, l{n} array<{kind}>, m{n} map<string, {kind}>, s{n} struct<x: {kind}>"
    for n, kind in enumerate(EXTREMES)
)
VALUES = [
    json.dumps(shape).encode()
    for n, values in enumerate(EXTREMES.values())
    for value in values
    for shape in (
        {f"c{n}": value},
        {f"l{n}": [value, None], f"m{n}": {"k": value}, f"s{n}": {"x": value}},
    )
]
LAST_MS = 253_402_300_799_999  # the last time that an event can have
FORMATS = [(name, keep) for name in ("parquet", "orc", "avro") for keep in (True, False)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        values = [b'{"c0": true}', *VALUES]
        made.append("t", [Event(each, id=f"e{n}") for n, each in enumerate(values)])
        made.append("t", [Event(b"{}", id="far", timestamp=LAST_MS)])
        yield made


@pytest.mark.parametrize(("format", "keep"), FORMATS)
def test_archive_with_extreme_values_is_read_verified_and_erased_from(
    home: Home, format: str, keep: bool
) -> None:
    archive = an_archive(home, format=format, format_settings=settings(keep))
    drive(home, archive)
    before = printed(archived_rows(home.context, archive, ReadRequest()))
    assert len(VALUES) // 2 < len(before) < len(VALUES)
    assert before[-1]["timestamp"] == "9999-12-31T23:59:59.999Z"
    topic = home.topic("t")
    home.delete("t", ["e0"])
    purge(home.context, topic, 0)
    assert printed(archived_rows(home.context, archive, ReadRequest())) == before[1:]
    assert verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True)).problems == []
    assert home.prove_erased(topic.name, ids=["e0"]).traces == []


@pytest.mark.parametrize(("format", "keep"), FORMATS)
def test_file_gives_back_every_value_that_its_writer_took(
    tmp_path: Path, format: str, keep: bool
) -> None:
    form = opened((format, "none", settings(keep)))
    assert isinstance(form, ColumnarFormat)
    events = batch([{"value": each, "timestamp": LAST_MS} for each in VALUES])
    fitted, misfits = form.columns.fit(events)
    made = write(form, [events])
    assert misfits is not None
    assert made.misfits is not None
    assert made.misfits.num_rows == misfits.num_rows
    read = list(read_rows(format, made.data))
    if isinstance(form, OwnColumns) and not keep:
        read = list(form.read_columns(made.data))
        assert plain(read) == plain([fitted])
    if format == "parquet":
        assert plain(read) == plain([fitted])
    assert sum(each.num_rows for each in read) == fitted.num_rows
    path = tmp_path / f"x.{format}"
    path.write_bytes(made.data)
    assert len(printed(file_rows(str(path)))) == fitted.num_rows


def test_orc_takes_the_times_that_its_reader_holds() -> None:
    form = opened(("orc", "none", settings(False)))
    assert isinstance(form, ColumnarFormat)
    at = f"c{list(EXTREMES).index('timestamp')}"
    values = [json.dumps({at: each}).encode() for each in EXTREMES["timestamp"]]
    _, misfits = form.columns.fit(batch([{"value": each} for each in values]))
    assert misfits is not None
    refused = [json.loads(each)[at] for each in misfits.column("value").to_pylist()]
    held = [each for each in EXTREMES["timestamp"] if each not in refused]
    assert held == [
        "1677-09-21T00:12:43.145225Z",
        "1900-01-01T00:00:00.999999Z",
        "1969-12-31T23:59:59.999999Z",
        "1969-12-31T23:59:59.000001Z",
        "2262-04-11T23:47:16.854775Z",
    ]
    assert "is not a time in the years 1677 to 2262 of UTC" in misfits.column("error")[0].as_py()


def settings(keep: bool) -> dict[str, Any]:
    return {"schema": SCHEMA} if keep else {"schema": SCHEMA, "keep_value": False}


def plain(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The rows with times as numbers."""
    return [row for each in batches for row in plain_rows(each, lambda count, _: count)]


def printed(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Rows as JSON, as ``archive cat`` prints them."""
    return [json.loads(line) for rows in batches for line in row_lines(rows).splitlines()]
