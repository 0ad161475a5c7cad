"""Events that no topic accepts: they never keep their neighbours out of archives and topics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.archive.test_fill import backfill
from tests.erasure.test_delete_archived import dying
from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.dead_letters import dead_letters
from tidelog.archive.generations import drop_generation, promote
from tidelog.archive.restore import RestoreOptions, open_restore
from tidelog.codec.event_batch import batch_of, with_position
from tidelog.connectors.archive.dead_letters import CHANGED, split_refused
from tidelog.erasure.delete import delete_events
from tidelog.erasure.delete_archived import erase_archived
from tidelog.errors import InvalidError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.model.archive import ArchiveFormat
from tidelog.model.limits import HEADERS_MAX, ID_BYTES_MAX, OWN_HEADERS_MAX, TIMESTAMP_MS_END
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers

HEADERS = [["h", None]] * (HEADERS_MAX + OWN_HEADERS_MAX + 1)
ODD: dict[str, dict[str, Any]] = {
    "headers": {"headers": HEADERS},
    "empty id": {"id": ""},
    "long id": {"id": "i" * (ID_BYTES_MAX + 1)},
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("to", 1)
        yield made


def finished(path: Path) -> Path:
    """A file that nothing is added to."""
    then = time.time() - 3600
    os.utime(path, (then, then))
    return path


def event_file(path: Path, odd: dict[str, Any]) -> Path:
    line = {"topic": "x", "partition": 0, "offset": 0, "timestamp": "2026-01-01T00:00:00Z"}
    line |= {"id": None, "key": None, "value": "v", "type": None, "headers": []}
    lines = [{**line, "value": str(row), **(odd if row == 5 else {})} for row in range(10)]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return finished(path)


def restored(home: Home, archive: str) -> tuple[list[bytes | None], int]:
    """What a restore brings, and how many events it counts as dead."""
    reports: list[CycleReport] = []
    pipeline = open_restore(
        home.context, RestoreOptions(archive, "topic:to", partition="key"), LocalWorkers()
    )
    Driver(home.context, pipeline, DriverOptions(on_cycle=reports.append)).run()
    dead = sum(each.dead for report in reports for each in report.committed.values())
    return [event.value for event in home.read("to", 0)], dead


def buried(home: Home, archive: Any) -> list[tuple[int, str]]:
    rows = [row for batch in dead_letters(home.context, archive) for row in batch.to_pylist()]
    return [(row["offset"], row["error"]) for row in rows]


OTHERS = [b"%d" % row for row in range(10) if row != 5]


@pytest.mark.parametrize("kind", ODD)
def test_archive_keeps_what_no_topic_accepts_as_dead_letter(
    home: Home, tmp_path: Path, kind: str
) -> None:
    event_file(tmp_path / "a.jsonl", ODD[kind])
    archive = an_archive(home, "a", f"file:{tmp_path}/a.jsonl?mode=events")
    assert drive(home, archive) == 10
    ((offset, reason),) = buried(home, archive)
    assert offset == 5
    assert reason.startswith("event: ")
    assert restored(home, "a") == (OTHERS, 1)


def test_event_with_empty_id_can_be_erased(home: Home, tmp_path: Path) -> None:
    event_file(tmp_path / "a.jsonl", {"id": ""})
    archive = an_archive(home, "a", f"file:{tmp_path}/a.jsonl?mode=events")
    drive(home, archive)
    done = erase_archived(home.context, archive, home.reason("asked", "ada"), [""])
    assert (done.events, done.ids) == (1, frozenset({""}))
    assert buried(home, archive) == []
    assert restored(home, "a") == (OTHERS, 0)


def test_text_that_is_not_utf8_is_a_dead_letter(home: Home, tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xffb", None], pa.binary())
    ids = pa.Array.from_buffers(pa.string(), 3, raw.buffers(), raw.null_count)
    pq.write_table(pa.table({"value": [b"0", b"1", b"2"], "id": ids}), tmp_path / "a.parquet")
    archive = an_archive(home, "a", f"file:{finished(tmp_path / 'a.parquet')}")
    assert drive(home, archive) == 3
    (batch,) = dead_letters(home.context, archive)
    (row,) = batch.to_pylist()
    assert (row["offset"], row["id"]) == (1, "\\xffb")
    assert row["headers"] == [{"name": CHANGED, "value": row["error"].encode()}]
    assert restored(home, "a") == ([b"0", b"1", b"2"], 0), "the header says what was changed"


def test_times_outside_of_the_limits_are_not_accepted() -> None:
    times, header = [5, -1, TIMESTAMP_MS_END, 6], [("h", b"x")]
    rows = batch_of([times, [None, "", None, "i"], None, [b"v"] * 4, None, [header, None] * 2])
    kept, refused = split_refused(with_position(rows, "t", 0, 10))
    assert kept.column("offset").to_pylist() == [10, 13]
    assert refused is not None
    assert refused.column("offset").to_pylist() == [11, 12]
    assert refused.column("timestamp").cast(pa.int64()).to_pylist() == [0, TIMESTAMP_MS_END - 1]
    errors = refused.column("error").to_pylist()
    first, second = refused.column("headers").to_pylist()
    assert first == [{"name": CHANGED, "value": errors[0].encode()}]
    assert second == [{"name": "h", "value": b"x"}, {"name": CHANGED, "value": errors[1].encode()}]
    assert ["time -1 ms" in errors[0], f"time {TIMESTAMP_MS_END} ms" in errors[1]] == [True, True]


def test_pump_copies_everything_before_a_line_that_is_too_long(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n" + b"z" * (3 << 20) + b"\nfour\n")
    wanted = PumpOptions(f"file:{finished(path)}", "to")
    for _ in range(2):
        with pytest.raises(InvalidError, match=r"offset 2: event: has 3145728 bytes.*before this"):
            pump(home, wanted)
        assert [event.value for event in home.read("to", 0)] == [b"one", b"two"]


def test_first_record_that_is_refused_copies_nothing(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"z" * (3 << 20) + b"\ntwo\n")
    with pytest.raises(InvalidError, match="offset 0: event: has 3145728 bytes"):
        pump(home, PumpOptions(f"file:{finished(path)}", "to"))
    assert list(home.read("to", 0)) == []


@pytest.mark.long
def test_driver_that_dies_beside_a_refused_record_loses_nothing(home: Home, tmp_path: Path) -> None:
    """Dies after every call; the next driver copies what is before the record, once."""
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n" + b"z" * (2 << 20) + b"\nfour\n")
    source = f"file:{finished(path)}"
    for calls in count(1):
        home.create_topic(f"to-{calls}")
        wanted = PumpOptions(source, f"to-{calls}")
        with dying(home, calls) as ended:
            with pytest.raises(InvalidError, match="offset 2"):
                pump(home, wanted, take_over=True)
            ended.append(True)
        with pytest.raises(InvalidError, match="offset 2"):
            pump(home, wanted, take_over=True)
        values = [event.value for event in home.read(f"to-{calls}", 0)]
        assert values == [b"one", b"two"], calls
        if ended:
            print("CALLS", calls)
            break


def pump(home: Home, wanted: PumpOptions, take_over: bool = False) -> int:
    how = DriverOptions(take_over=take_over)
    return Driver(home.context, open_pump(home.context, wanted, LocalWorkers()), how).run()


@pytest.mark.parametrize("odd", ["", "i" * (ID_BYTES_MAX + 1)], ids=["empty", "long"])
def test_event_with_an_id_that_no_topic_accepts_is_proved_erased(
    home: Home, tmp_path: Path, odd: str
) -> None:
    home.create_topic("x", 1)
    events = [Event(b"%d" % row, id=f"e{row}") for row in range(10)]
    archive = an_archive(home, "a", "topic:x")
    home.append("x", events[:5])
    drive(home, archive)
    home.append("x", events[5:])
    home.trim("x", ToOffsets({0: 6}), past_readers=True)  # only the backup has the odd one
    drive(home, archive, accept_loss=True)
    home.trim("x", ToOffsets({0: 10}))
    (tmp_path / "x").mkdir()
    path = event_file(tmp_path / "x" / f"1_0_{0:020}.jsonl", {"id": odd})
    lines = [
        json.loads(line) | {"offset": at} for at, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    backfill(home, "a", ArchiveFormat(source=f"file:{tmp_path / 'x'}"))
    promote(home.context, "a")
    drop_generation(home.context, "a", 1, force=True)
    assert len(buried(home, home.archives.get("a").info)) == 1
    topic, reason = home.topic("x"), home.reason("asked", "ada")
    before = home.prove_erased(topic.name, ids=[odd])
    assert not before.is_erased
    assert not before.known
    deleted = delete_events(home.context, home.amender("x", reason), [odd])
    assert (deleted.events, deleted.archived, deleted.missing) == (0, 1, ())
    purge(home.context, topic, 0)
    purge(home.context, topic, 0)
    proof = home.prove_erased(topic.name, ids=[odd])
    assert (proof.traces, proof.known) == ([], True)
    assert buried(home, home.archives.get("a").info) == []
    assert delete_events(home.context, home.amender("x", reason), [odd]).missing == (odd,)
