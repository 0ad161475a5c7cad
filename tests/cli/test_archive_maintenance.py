"""``archive status``, ``finalize`` and ``register`` as a person runs them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

import tidelog as library
from tests.log.test_targets import answering
from tests.support.cli_run import Run
from tests.support.iceberg_rest import serving
from tidelog import Event
from tidelog.catalog.base import Put
from tidelog.model import layout
from tidelog.model.pipeline import Aside
from tidelog.model.topic import encode_row

DAY_S = 86_400
NOW_S = int(time.time()) // DAY_S * DAY_S  # the beginning of today


def day(back: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(NOW_S - back * DAY_S))


def send(days_back: list[int]) -> None:
    values = [{"at": NOW_S - back * DAY_S} for back in days_back]
    with library.open() as home:
        home.append("t", [Event(json.dumps(each).encode()) for each in values], partition=0)


def made(tidelog: Run, *more: str) -> None:
    with library.open() as home:
        home.create_topic("t", partitions=2)
    parser = ("--kind", "partition", "--parser", "json:at")
    done = tidelog("archive", "create", "daily", "--source", "topic:t", *parser, *more)
    assert done.code == 0, done.err
    assert re.search(r"^kind +partitioned$", done.out.decode(), re.MULTILINE)


def run(tidelog: Run) -> None:
    done = tidelog("archive", "run", "daily", "--no-spark")
    assert done.code == 0, done.err


def folders(tmp_path: Path) -> set[str]:
    return {path.parent.name for path in tmp_path.rglob("_SUCCESS")}


def test_finalize_marks_reopens_and_tells(tidelog: Run, tmp_path: Path) -> None:
    made(tidelog)
    send([1, 2, 2, 3])
    run(tidelog)
    dry = tidelog("archive", "finalize", "daily", "--delay", "0s", "--dry-run", "--json").rows()
    assert [row["folder"] for row in dry[:-1]] == [f"t/dt={day(back)}" for back in (3, 2, 1)]
    assert folders(tmp_path) == set()
    with answering() as server:
        done = tidelog("archive", "finalize", "daily", "--delay", "0s", "--notify", server.url)
        assert done.code == 0
        assert f"t/dt={day(2)}".encode() in done.out
        assert len(server.requests) == 3
    assert folders(tmp_path) == {f"dt={day(back)}" for back in (1, 2, 3)}
    marker = next(tmp_path.rglob(f"dt={day(2)}/_SUCCESS"))
    assert json.loads(marker.read_text())["events"] == 2
    shown = tidelog("archive", "status", "daily", "--json").rows()[0]
    assert shown["watermark"].startswith(day(0)[:8])
    send([2])
    run(tidelog)
    late = tidelog("archive", "finalize", "daily", "--json").rows()
    assert [(row["event"], row["folder"]) for row in late[:-1]] == [("reopened", f"t/dt={day(2)}")]
    assert folders(tmp_path) == {f"dt={day(back)}" for back in (1, 3)}
    tidelog("archive", "finalize", "daily", "--delay", "0s")
    assert json.loads(marker.read_text())["events"] == 3


def test_finalize_says_who_could_not_be_told(tidelog: Run, tmp_path: Path) -> None:
    made(tidelog)
    send([2])
    run(tidelog)
    with answering(500) as server:
        done = tidelog("archive", "finalize", "daily", "--delay", "0s", "--notify", server.url)
    assert done.code == 1
    assert "not notified: webhook" in done.err
    assert folders(tmp_path) == {f"dt={day(2)}"}  # that it is final holds nevertheless
    assert tidelog("archive", "finalize", "daily", "--notify", "nonsense:").code == 2
    assert tidelog("archive", "finalize", "daily", "--delay", "soon").code == 2
    assert tidelog("archive", "finalize", "nope").code == 1


def test_status_of_one_and_of_all(tidelog: Run) -> None:
    made(tidelog)
    send([0, 0, 1])
    run(tidelog)
    send([0])
    rows = tidelog("archive", "status", "daily", "--json").rows()
    assert [(r["partition"], r["position"], r["end"], r["lag"], r["events"]) for r in rows] == [
        ("t/0", "3", "4", 1, 3),
        ("t/1", "0", "0", 0, 0),
    ]
    assert rows == tidelog("archive", "status", "--all", "--json").rows() or rows[0]["lag_s"] >= 0
    people = tidelog("archive", "status", "daily").out.decode()
    first, second, _ = people.split("\n", 2)  # before its tables, so that --all says whose they are
    assert first == "daily: 3 events read, 0 dead letters, 1 behind, no driver at work"
    assert second == "Generation 1: 2 files written so far"
    assert "lost" not in people, "a column for problems that no partition has"
    assert all(len(line) <= 120 for line in people.splitlines() if not line.startswith("Files: "))
    assert tidelog("archive", "status").code == 2
    assert tidelog("archive", "status", "daily", "--all").code == 2
    assert tidelog("archive", "status", "daily", "--check", "--prometheus").code == 2
    assert tidelog("archive", "status", "nope").code == 1


def test_status_lists_ranges_that_were_set_aside(tidelog: Run) -> None:
    made(tidelog)
    send([0])
    run(tidelog)
    assert tidelog("archive", "status", "daily", "--json").rows()[0]["aside"] == []
    with library.open() as home:
        own = home.archives.get("daily").info.pipeline()
        gone = Aside("t/0", "5", "9", 4, ("archives/daily/_aside/x/a.parquet",), 1_794_700_800_000)
        change = Put(layout.aside_row("x"), encode_row(gone))
        where = layout.pipeline_partition(own, "t/0")
        home.catalog.write(where, change, write_id=home.context.ids.new())
    rows = tidelog("archive", "status", "daily", "--json").rows()
    (shown,) = rows[0]["aside"]
    assert (shown["start"], shown["end"], shown["events"]) == ("5", "9", 4)
    assert shown["files"] == ["archives/daily/_aside/x/a.parquet"]
    assert shown["at"].startswith("2026-11-15T")
    assert rows[1]["aside"] == []
    people = tidelog("archive", "status", "daily").out.decode()
    assert "t/0: 5 to 9 was set aside at 2026-11-15T" in people
    assert "4 events in archives/daily/_aside/x/a.parquet" in people
    assert "1 file written so far, 1 set aside\n" in people


def test_check_ends_with_0_when_all_is_well_and_with_1_when_not(tidelog: Run) -> None:
    assert tidelog("archive", "status", "--all", "--check").code == 0
    made(tidelog)
    send([1])
    run(tidelog)
    well = tidelog("archive", "status", "daily", "--check")
    assert (well.code, well.out) == (0, b"archive `daily`: is healthy\n")
    send([1, 1])
    bad = tidelog("archive", "status", "--all", "--check", "--max-lag", "1")
    assert bad.code == 1
    lines = bad.out.decode().splitlines()
    assert len(lines) == 2
    assert "no driver is running" in lines[0]
    assert "2 events wait (limit 1)" in lines[1]
    relaxed = tidelog("archive", "status", "daily", "--check", "--no-driver")
    assert relaxed.code == 0
    (told,) = tidelog("archive", "status", "daily", "--check", "--json").rows()
    assert (told["archive"], told["healthy"], len(told["troubles"])) == ("daily", False, 1)


def test_a_parser_that_does_not_fit_is_reported_once(tidelog: Run) -> None:
    made(tidelog)
    with library.open() as home:
        for partition in (0, 1):
            events = [Event(b'{"at": "2026-11-15T10:00:00Z"}') for _ in range(200 + partition)]
            home.append("t", events, partition=partition)
    done = tidelog("archive", "run", "daily", "--no-spark")
    assert done.code != 0
    assert done.err.count("are dead letters") == 1
    assert re.search("^t/0 and t/1 fail for the same reason:$|^t/1 and t/0 fail", done.err, re.M)
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(line) < 300, line
    assert "use the parser iso8601" in line
    assert "`tidelog archive backfill daily --parser PARSER`" in line
    checked = tidelog("archive", "status", "daily", "--check", "--no-driver").out.decode()
    assert checked.count("are dead letters") == 1
    assert "(the same in t/1)" in checked
    shown = tidelog("archive", "status", "daily").out.decode()
    assert shown.count("are dead letters") == 1


def test_metrics_are_printed(tidelog: Run) -> None:
    made(tidelog)
    send([1])
    done = tidelog("archive", "status", "--all", "--prometheus")
    assert b'tidelog_archive_lag_events{archive="daily",partition="t/0"} 1\n' in done.out
    assert done.code == 0


def test_register_and_keep(tidelog: Run, tmp_path: Path) -> None:
    made(tidelog)
    send([1, 2, 3])
    run(tidelog)
    (done,) = tidelog("archive", "register", "daily", "--as", "delta", "--keep", "--json").rows()
    assert (done["files_added"], done["events_added"], done["files_now"]) == (3, 3, 3)
    assert list(tmp_path.rglob("_delta_log"))
    send([1])
    run(tidelog)
    rows = tidelog("archive", "register", "daily", "--json").rows()
    assert sum(row["events_added"] for row in rows) in (0, 1)  # 0 where the run has registered it
    delta = ("archive", "register", "daily", "--as", "delta")
    assert b"Nothing was added" in tidelog(*delta).out
    assert b"Erasures and promotes still do" in tidelog(*delta, "--no-keep").out
    assert len(tidelog("archive", "register", "daily", "--json").rows()) == 1
    assert tidelog(*delta, "--forget", "--keep").code == 2
    assert b"Drop the table" in tidelog(*delta, "--forget").out
    assert "has no table `delta`" in tidelog(*delta, "--forget").err
    assert "say which with --as" in tidelog("archive", "register", "daily").err
    with serving() as server:
        where = ("--catalog", server.url, "--table", "lake.daily")
        (row,) = tidelog("archive", "register", "daily", "--as", "iceberg", *where, "--json").rows()
        assert row["events_added"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--as", "hive"],
        ["--as", "iceberg"],
        ["--as", "iceberg", "--catalog", "x"],
        ["--as", "delta", "--table", "a.b"],
        ["--as", "iceberg", "--catalog", "x", "--table", "b"],
        ["--as", "iceberg", "--catalog", "http://me:secret@h", "--table", "a.b"],
    ],
)
def test_what_cannot_be_registered_is_refused(tidelog: Run, wrong: list[str]) -> None:
    made(tidelog)
    done = tidelog("archive", "register", "daily", *wrong)
    assert done.code == 2
    assert "secret@" not in done.err


def test_files_that_are_not_parquet_are_no_table(tidelog: Run) -> None:
    made(tidelog, "--format", "jsonlines")
    done = tidelog("archive", "register", "daily", "--as", "delta")
    assert done.code == 2
    assert "tables are made of parquet" in done.err
