"""Lines that are not what their file is said to hold: their neighbours are archived."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Home
from tidelog.archive.dead_letters import dead_letters
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.connectors.archive.dead_letters import CHANGED
from tidelog.connectors.files import row_files as rows
from tidelog.errors import InvalidError
from tidelog.model.archive import Archive
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers

EVENT = {"topic": "x", "partition": 0, "offset": 0, "timestamp": "2026-01-01T00:00:00Z"}
EVENT |= {"id": None, "key": None, "value": "good", "type": None, "headers": []}
GOOD = json.dumps(EVENT).encode()
WRONG = {
    "garbage": b"garbage",
    "surrogate": GOOD.replace(b"good", rb"\ud800"),
    "1969": GOOD.replace(b"2026", b"1969"),
    "year 10000": GOOD.replace(b"2026", b"10000"),
    "not UTF-8": b"\xff\xfe",
    "fields missing": b'{"value":"a"}',
    "number": GOOD.replace(b'"good"', b"5"),
    "two events": GOOD + b" " + GOOD,
    "half an event": GOOD[:40],
    "deep": b"[" * 5_000,
    "partition": GOOD.replace(b'"partition": 0', b'"partition": 99999999999'),
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("to", 1)
        yield made


def finished(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def buried(home: Home, archive: Archive) -> list[dict[str, Any]]:
    return [row for batch in dead_letters(home.context, archive) for row in batch.to_pylist()]


def values(home: Home) -> list[bytes | None]:
    return [event.value for event in home.read("to", 0)]


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_line_is_a_dead_letter_with_its_bytes(home: Home, tmp_path: Path, kind: str) -> None:
    path = finished(tmp_path / "a.jsonl", b"\n".join([GOOD, b"", WRONG[kind], GOOD, b""]))
    archive = an_archive(home, "a", f"file:{path}?mode=events")
    assert drive(home, archive) == 3
    (dead,) = buried(home, archive)
    assert (dead["offset"], dead["value"]) == (1, WRONG[kind])
    assert dead["error"].startswith("line is not an event as JSON: ")
    assert drive(home, archive) == 0


def test_wrong_lines_restore_as_they_were_beside_good_ones(home: Home, tmp_path: Path) -> None:
    path = finished(tmp_path / "a.jsonl", GOOD + b"\ngarbage\n" + GOOD + b"\n")
    drive(home, an_archive(home, "a", f"file:{path}?mode=events"))
    restore(home.context, RestoreOptions("a", "topic:to", partition="key"), LocalWorkers())
    assert values(home) == [b"good", b"garbage", b"good"]
    marked = [[name for name, _ in event.headers] for event in home.read("to", 0)]
    assert marked == [[], [CHANGED], []]


def test_pump_copies_everything_before_a_wrong_line(home: Home, tmp_path: Path) -> None:
    path = finished(tmp_path / "a.jsonl", GOOD + b"\n" + GOOD + b"\ngarbage\n" + GOOD + b"\n")
    pipeline = open_pump(
        home.context, PumpOptions(f"file:{path}?mode=events", "to"), LocalWorkers()
    )
    with pytest.raises(InvalidError, match="offset 2: line is not an event as JSON"):
        Driver(home.context, pipeline, DriverOptions()).run()
    assert values(home) == [b"good", b"good"]


def test_last_line_without_newline_says_what_to_do(home: Home, tmp_path: Path) -> None:
    path = finished(tmp_path / "a.jsonl", GOOD + b"\n" + GOOD[:20])
    with pytest.raises(InvalidError, match=r"last line, 2, has no newline.*put the whole file"):
        drive(home, an_archive(home, "a", f"file:{path}?mode=events"))


@pytest.mark.parametrize("first", [b"", b"one\ntwo\n"])
def test_lines_before_one_that_is_too_long_are_archived(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(rows, "EVENT_BYTES_CEILING", 100)
    monkeypatch.setattr(rows, "_READ_BYTES", 16)
    path = finished(tmp_path / "a.log", first + b"z" * 200 + b"\nlast\n")
    archive = an_archive(home, "a", f"file:{path}")
    for _ in range(2):
        with pytest.raises(InvalidError, match=r"line [13] has more than 100 bytes.*split"):
            drive(home, archive)
    finished(path, first + b"z\nz\nlast\n")  # split
    assert drive(home, archive) == 3
    restore(home.context, RestoreOptions("a", "topic:to", partition="key"), LocalWorkers())
    assert values(home) == [*first.split(), b"z", b"z", b"last"]
