"""Parsers of what an event is known by: its own time, and its offset."""

from __future__ import annotations

import pyarrow as pa

from tests.codec.parsers.layouts import NOON_MS, batch, laid, rows_of
from tidelog.codec.parsers import FolderSettings, open_parser


def test_the_events_own_time_whatever_its_value() -> None:
    assert laid("timestamp", [b"\xff", None, b"{}"]) == ["dt=2026-11-15"] * 3
    layout = open_parser("timestamp", FolderSettings()).lay_out(batch([b"", b""]))
    assert layout.times.to_pylist() == [NOON_MS, NOON_MS + 1_000]


def test_a_source_without_times_makes_dead_letters_not_1970() -> None:
    times = pa.array([-1, NOON_MS, 253_402_300_800_000]).cast(pa.timestamp("ms", "UTC"))
    events = batch([b""] * 3)
    events = events.set_column(events.schema.get_field_index("timestamp"), "timestamp", times)
    assert rows_of(open_parser("timestamp", FolderSettings()).lay_out(events)) == [
        "!time is outside of the years 1970 to 9999: -1",
        "dt=2026-11-15",
        "!time is outside of the years 1970 to 9999: 253402300800000",
    ]


def test_offsets_fall_into_buckets() -> None:
    parser = open_parser("offset:10000", FolderSettings())
    assert rows_of(parser.lay_out(batch([]))) == []
    found = rows_of(parser.lay_out(batch([None, b"\xff", b"", b"x"], base=39_998)))
    assert found == ["offset=30000"] * 2 + ["offset=40000"] * 2
    assert rows_of(parser.lay_out(batch([b""], base=0))) == ["offset=0"]
    last = (1 << 63) - 2
    assert rows_of(parser.lay_out(batch([b""], base=last))) == [f"offset={last - last % 10_000}"]
    one = open_parser("offset:1", FolderSettings())
    assert rows_of(one.lay_out(batch([b"", b""], base=7))) == ["offset=7", "offset=8"]


def test_a_slice_of_a_batch_is_laid_out_as_itself() -> None:
    events = batch([b"a,1794744000", b"b,1794830400", None, b"c,1794916800"])
    for text in ("timestamp", "offset:2", "delimited:2|,"):
        parser = open_parser(text, FolderSettings(granularity="minute"))
        assert rows_of(parser.lay_out(events.slice(1, 2))) == rows_of(parser.lay_out(events))[1:3]
