"""A row with a field that no topic accepts is a dead letter, in files of every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.codec.formats.files import write
from tests.pipeline.test_refused import buried, finished
from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Home
from tidelog.codec.event_batch import EVENT_SCHEMA, batch_of, whole_ms, with_position
from tidelog.codec.formats import FormatSettings, open_format
from tidelog.codec.formats.parquet import sidecar_name
from tidelog.connectors.sink import RecordRefusedError
from tidelog.errors import InvalidError
from tidelog.model.event import from_iso
from tidelog.model.limits import HEADERS_MAX, ID_BYTES_MAX, OWN_HEADERS_MAX, TIMESTAMP_MS_END
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers

ROWS, BAD = 9, 4
OTHERS = [b"%d" % row for row in range(ROWS) if row != BAD]
FIELDS: dict[str, tuple[str, Any]] = {
    "time before 1970": ("timestamp", -1),
    "time after 9999": ("timestamp", TIMESTAMP_MS_END),
    "first time of all": ("timestamp", -(1 << 63) // 1000 + 1),
    "empty id": ("id", ""),
    "long id": ("id", "i" * (ID_BYTES_MAX + 1)),
    "many headers": ("headers", [("h", b"")] * (HEADERS_MAX + OWN_HEADERS_MAX + 1)),
}
ZONED = {unit: pa.timestamp(unit, "UTC") for unit in ("s", "ms", "us", "ns")}
COLUMNS: dict[str, tuple[pa.DataType, Any, Any]] = {  # type, a good value, and a bad one
    "seconds": (ZONED["s"], 5, -1),
    "milliseconds": (ZONED["ms"], 5, TIMESTAMP_MS_END),
    "milliseconds, far": (ZONED["ms"], 5, (1 << 63) - 1),
    "microseconds": (ZONED["us"], 5_000, -1),
    "microseconds, far": (ZONED["us"], 5_000, TIMESTAMP_MS_END * 1000),
    "nanoseconds": (ZONED["ns"], 5_000_000, -1),
    "number": (pa.int64(), 5, -1),
    "number, far": (pa.int64(), 5, (1 << 63) - 1),
    "small number": (pa.int32(), 5, -(1 << 31)),
    "number without sign": (pa.uint64(), 5, (1 << 64) - 1),
    "days": (pa.date32(), 5, -1),
    "days, far": (pa.date32(), 5, (1 << 31) - 1),
    "days in milliseconds": (pa.date64(), 86_400_000, -86_400_000),
    "text": (pa.string(), "2026-11-16T00:00:00Z", "yesterday"),
    "text, old": (pa.string(), "2026-11-16T00:00:00Z", "1969-12-31T23:59:59Z"),
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("to", 1)
        yield made


def check(home: Home, path: Path, options: str = "") -> None:
    """The archive has all rows, and exactly one of them is a dead letter."""
    where = finished(path) if path.parent.name != "t" else path.parent
    archive = an_archive(home, "a", f"file:{where}{options}")
    assert drive(home, archive) == ROWS
    ((offset, reason),) = buried(home, archive)
    assert offset == BAD
    assert reason


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("form", ["parquet", "orc", "avro", "sequence", "jsonlines"])
def test_row_with_a_bad_field_is_a_dead_letter(
    home: Home, tmp_path: Path, form: str, field: str
) -> None:
    name, value = FIELDS[field]
    if form == "jsonlines" and name == "timestamp":
        value = {-1: "1969-12-31T23:59:59Z", TIMESTAMP_MS_END: "+10000-01-01T00:00:00Z"}.get(
            value, -1
        )
    columns = {each: [None] * ROWS for each in EVENT_SCHEMA.names[3:]}
    columns |= {"timestamp": [5] * ROWS, "value": [b"%d" % row for row in range(ROWS)]}
    columns[name] = [value if row == BAD else columns[name][row] for row in range(ROWS)]
    path = tmp_path / f"a.{form}"
    if form == "jsonlines":
        shown = [[each, None] for each, _ in value] if name == "headers" else value
        lines = [
            {
                "topic": "t",
                "partition": 0,
                "offset": row,
                "timestamp": "2026-11-16T00:00:00Z",
                "id": None,
                "key": None,
                "value": str(row),
                "type": None,
                "headers": [],
                **({name: shown} if row == BAD else {}),
            }
            for row in range(ROWS)
        ]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        check(home, path, "?mode=events")
        return
    batch = with_position(batch_of(list(columns.values())), "t", 0, 0)
    made = write(open_format(form, None, FormatSettings()), [batch])
    if made.sidecar is not None:  # such files are read as a backup alone
        path = tmp_path / "t" / f"1_0_{0:020}.seq"
        path.parent.mkdir()
        path.with_name(sidecar_name(path.name)).write_bytes(made.sidecar)
    path.write_bytes(made.data)
    check(home, path, f"?format={form}")


@pytest.mark.parametrize("kind", COLUMNS)
def test_times_of_any_column_stop_only_their_row(home: Home, tmp_path: Path, kind: str) -> None:
    column, good, bad = COLUMNS[kind]
    values = [bad if row == BAD else good for row in range(ROWS)]
    if isinstance(good, int) and column != pa.uint64():
        plain = pa.array(values, pa.int32() if column in (pa.int32(), pa.date32()) else pa.int64())
        times = plain.cast(column) if column != plain.type else plain
    else:
        times = pa.array(values, column)
    table = pa.table({"value": [b"%d" % row for row in range(ROWS)], "timestamp": times})
    pq.write_table(table, tmp_path / "a.parquet")
    check(home, tmp_path / "a.parquet")


def test_text_of_bytes_that_are_not_utf8_stops_only_its_row(home: Home, tmp_path: Path) -> None:
    ids = [b"\xff" if row == BAD else b"i%d" % row for row in range(ROWS)]
    pq.write_table(pa.table({"value": [b"v"] * ROWS, "id": ids}), tmp_path / "a.parquet")
    check(home, tmp_path / "a.parquet")


def test_header_without_a_name_stops_only_its_row(home: Home, tmp_path: Path) -> None:
    kind = EVENT_SCHEMA.field("headers").type
    headers = [[{"name": None if row == BAD else "h", "value": b""}] for row in range(ROWS)]
    table = pa.table({"value": [b"v"] * ROWS, "headers": pa.array(headers, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    check(home, tmp_path / "a.parquet")


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_finer_times_are_cut_toward_the_past(home: Home, tmp_path: Path, unit: str) -> None:
    parts = {"us": 1000, "ns": 1_000_000}[unit]
    numbers = np.array([0, 1, parts - 1, parts, 86_400_000 * parts - 1], np.int64)
    table = pa.table({"value": [b"v"] * 5, "timestamp": pa.array(numbers).cast(ZONED[unit])})
    pq.write_table(table, tmp_path / "a.parquet")
    archive = an_archive(home, "a", f"file:{finished(tmp_path / 'a.parquet')}")
    assert drive(home, archive) == 5
    assert buried(home, archive) == []
    wanted = [0, 0, 0, 1, 86_399_999]
    assert whole_ms(table.column("timestamp")).cast(pa.int64()).to_pylist() == wanted
    home.append("to", table)
    assert [event.timestamp for event in home.read("to", 0)] == wanted


def test_times_before_1970_are_not_moved_into_it() -> None:
    numbers = pa.array([-1, -999, -1000, -1001, None, -(1 << 63), (1 << 63) - 1], pa.int64())
    found = whole_ms(numbers.cast(ZONED["us"])).cast(pa.int64()).to_pylist()
    assert found == [-1, -1, -1, -2, None, -9223372036854776, 9223372036854775]
    far = whole_ms(numbers.cast(ZONED["s"])).cast(pa.int64()).to_pylist()
    assert far[:5] == [-1000, -999_000, -1_000_000, -1_001_000, None]
    assert far[5] < 0
    assert far[6] >= TIMESTAMP_MS_END


def test_pump_copies_everything_before_a_time_out_of_range(home: Home, tmp_path: Path) -> None:
    times = pa.array([-1 if row == BAD else 5 for row in range(ROWS)], ZONED["ms"])
    table = pa.table({"value": [b"%d" % row for row in range(ROWS)], "timestamp": times})
    pq.write_table(table, tmp_path / "a.parquet")
    pump = open_pump(
        home.context, PumpOptions(f"file:{finished(tmp_path / 'a.parquet')}", "to"), LocalWorkers()
    )
    with pytest.raises(RecordRefusedError, match=f"offset {BAD}: event: its time -1 ms is outside"):
        Driver(home.context, pump, DriverOptions()).run()
    assert [event.value for event in home.read("to", 0)] == OTHERS[:BAD]


@pytest.mark.parametrize("text", ["2026-11-15T10:00:00Z", "2026-11-15T10:00:00", "2026-11-15"])
def test_time_with_a_nul_after_it_is_refused(text: str) -> None:
    assert from_iso(text) > 0
    for wrong in (f"{text}\0", f"{text}\0 1"):
        with pytest.raises(InvalidError, match="is not ISO 8601"):
            from_iso(wrong)
