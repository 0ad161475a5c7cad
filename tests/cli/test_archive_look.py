"""``archive find``, ``cat``, ``verify`` and ``dead`` as a person runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidelog as library
from tests.support.archive_look import AT, AT_OR_WHEN, fill, value
from tests.support.cli_run import Run
from tidelog.archive.archive import committed_files
from tidelog.cli.commands.archive import archive
from tidelog.cli.commands.archive_look import cat, dead, find, verify

for command in (find, cat, verify, dead):
    archive.add_command(command)

TIDELOG = """
from tidelog.cli.commands.archive import archive
from tidelog.cli.commands.archive_look import cat
from tidelog.cli.main import main
archive.add_command(cat)
main()
"""


@pytest.fixture
def run(tidelog: Run) -> Run:
    """Runs commands beside a topic of 100 events and an archive of it, of which some are dead."""
    with library.open() as home:
        home.create_topic("t", 2)
        fill(home, range(60))
        fill(home, range(40), partition=1)
    args = ("--source", "topic:t", "--kind", "partition", "--parser", AT)
    assert tidelog("archive", "create", "daily", *args).code == 0
    assert tidelog("archive", "run", "daily", "--no-spark").code == 0
    return tidelog


def test_every_command_shows_examples(run: Run) -> None:
    for name in ("find", "cat", "verify", "dead"):
        shown = run("archive", name, "--help").out.decode()
        assert f"tidelog archive {name} " in shown
        assert "Examples" in shown


def test_find(run: Run) -> None:
    done = run("archive", "find", "daily", "t/0", "8", "--event", "--json")
    (found,) = done.rows()
    assert done.code == 0
    assert (found["status"], found["dead"], found["partition"]) == ("archived", False, "t/0")
    assert found["first_offset"] <= 8 <= found["last_offset"]
    assert found["file"].startswith("archives/daily/g1/t/dt=2026-11-1")
    assert (found["event"]["offset"], found["event"]["value"]) == (8, value(8).decode())
    (buried,) = run("archive", "find", "daily", "0", "7", "--event", "--json").rows()
    assert (buried["status"], buried["dead"]) == ("dead", True)
    assert buried["event"]["error"] == "no JSON"
    waiting = run("archive", "find", "daily", "t/0", "60")
    assert waiting.code == 1
    assert b"not archived yet (committed up to 60)" in waiting.out
    there = run("archive", "find", "daily", "0", "8").out
    assert (there.count(b"dt=2026-11-15"), b"says" in there, b"why" in there) == (1, False, False)
    assert (
        b"why           a dead letter: no JSON"
        in run("archive", "find", "daily", "0", "7", "--event").out
    )
    for args, message in (
        (("daily", "5", "0"), "it has t/0, t/1"),
        (("daily", "t/00", "0"), "did you mean `t/0`"),
        (("nope", "0", "0"), "not found"),
        (("daily", "0", "8", "--generation", "4"), "no generation 4"),
    ):
        refused = run("archive", "find", *args)
        assert refused.code in (1, 2)
        assert message in refused.err


def test_cat(run: Run, tmp_path: Path) -> None:
    rows = run("archive", "cat", "daily").rows()
    assert len(rows) == sum(n % 7 > 0 and n % 3 > 0 for part in (60, 40) for n in range(part))
    printed = {(row["partition"], row["offset"]): row for row in rows}
    consumed = run("consume", "t", "--name", "c", "--json").rows()
    assert all(printed.get((e["partition"], e["offset"]), e) == e for e in consumed)
    few = run("archive", "cat", "daily", "--partition", "1", "--start", "10", "--end", "20").rows()
    assert sorted(row["offset"] for row in few) == [10, 11, 13, 16, 17, 19]
    assert len(run("archive", "cat", "daily", "--limit", "3").rows()) == 3
    with library.open() as home:
        files = [file for _, file in committed_files(home.context, home.archives.get("daily").info)]
        root = home.store.url.removeprefix("file://")
    for file in files:
        one = run("archive", "cat", "daily", file.target)
        assert len(one.rows()) == file.events
        assert run("archive", "cat", "--file", f"{root}/{file.target}").out == one.out
        assert ("error" in one.rows()[0]) == (file.kind == "dead")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give the name of an archive, or --file"),
        (["daily", "--file", "x.parquet"], "give the name of an archive, or --file"),
        (["--file", "x.parquet", "--partition", "0"], "goes without --partition"),
        (["--file", "x.parquet"], "is not there"),
        (["daily", "--format", "orc"], "an archive knows its own"),
        (["daily", "--start", "5"], "say which"),
        (["daily", "no-such-file"], "archive manifest daily"),
        (["daily", "--limit", "-1"], "--limit"),
    ],
)
def test_cat_refuses(run: Run, args: list[str], message: str) -> None:
    refused = run("archive", "cat", *args)
    assert refused.code in (1, 2)
    assert message in refused.err
    assert refused.out == b""


def test_a_pipe_that_closes_ends_cat_quietly(run: Run) -> None:
    with library.open() as home:
        for first in range(0, 30_000, 10_000):
            fill(home, range(first, first + 10_000))
    assert run("archive", "create", "raw", "--source", "topic:t").code == 0
    assert run("archive", "run", "raw", "--no-spark").code == 0
    command = [sys.executable, "-c", TIDELOG, "archive", "cat", "raw"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["topic"] == "t"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_verify(run: Run, tmp_path: Path) -> None:
    done = run("archive", "verify", "daily", "--deep", "--source", "--json", terminal=True)
    assert done.code == 0
    (found,) = done.rows()
    assert (found["events"], found["problems"], found["notes"]) == (100, [], [])
    assert found["written"] + found["dead"] == 100
    stray = next(Path("tidelog-data/objects/archives/daily/g1/t").iterdir()) / "1_0_9.parquet"
    stray.write_bytes(b"x")
    shown = run("archive", "verify", "daily")
    assert shown.code == 1
    assert b"stray" in shown.out
    assert b"move it out of the folder" in shown.out
    failed = run("archive", "verify", "daily", "--json")
    assert failed.code == 1
    (problem,) = failed.rows()[0]["problems"]
    assert problem["kind"] == "stray"
    assert problem["where"].endswith("/1_0_9.parquet")
    assert run("archive", "verify", "daily", "--generation", "9").code == 1


def test_dead_letters_are_listed_with_their_reasons(run: Run) -> None:
    rows = run("archive", "dead", "daily", "--json").rows()
    assert [(r["partition"], r["offset"]) for r in rows] == [
        (f"t/{p}", n) for p, c in ((0, 60), (1, 40)) for n in range(c) if not (n % 7 and n % 3)
    ]
    assert rows[1] == {
        "partition": "t/0",
        "offset": 3,
        "timestamp": "1970-01-01T00:00:00.003Z",
        "reason": "no field at",
    }
    bad = run("archive", "dead", "daily", "--reason", "JSON", "--json").rows()
    assert all(row["offset"] % 7 == 0 for row in bad)
    assert len(run("archive", "dead", "daily", "--limit", "2", "--json").rows()) == 2
    whole = run("archive", "dead", "daily", "--events", "--limit", "2").rows()
    assert [(row["value"], row["error"]) for row in whole] == [
        ("nonsense 0", "no JSON"),
        (value(3).decode(), "no field at"),
    ]
    shown = run("archive", "dead", "daily").out.decode()
    assert shown.index("no field at") < shown.index("partition")
    assert f"20 of {len(rows)}; --limit {len(rows)} shows all\n" in shown
    assert run("archive", "dead", "daily", "--reason", "x.*(", "--json").rows() == []


def test_dead_letters_are_replayed(run: Run) -> None:
    before = len(run("archive", "dead", "daily", "--json").rows())
    done = run("archive", "dead", "daily", "--replay", "--json")
    assert done.code == 0
    assert done.rows()[-1] == {
        "archive": "daily",
        "tried": before,
        "replayed": 0,
        "dead": before,
        "data_files": 0,
    }
    again = ("archive", "dead", "daily", "--replay", "--parser", AT_OR_WHEN)
    (plan,) = run(*again, "--dry-run", "--json").rows()
    assert "reason       now  after" in run(*again, "--dry-run").out.decode()
    done = run(*again, "--json")
    assert done.rows()[-1]["replayed"] == plan["accepted"] > 0
    left = run("archive", "dead", "daily", "--json").rows()
    assert {row["offset"] % 7 for row in left} == {0}
    assert len(run("archive", "cat", "daily").rows()) == 100 - len(left)
    assert run("archive", "verify", "daily", "--deep", "--source").code == 0
    files = run("archive", "manifest", "daily", "--json").rows()
    assert sum(row["events"] for row in files if row["kind"] == "data") == 100 - len(left)
    assert sum(row["events"] for row in files if row["kind"] == "dead") == len(left)
    same = run("archive", "dead", "daily", "--replay").out
    assert (b"replayed" in same, b"New events" in same) == (True, False)
    assert f"New events are still read with `{AT}`" in run(*again).out.decode()
    parser = ("--parser", "timestamp")
    said = run("archive", "dead", "daily", "--replay", *parser).err
    assert re.match(r"\S+: \d+ events, 0 dead letters, \d+ data files?\n", said), said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--replay", "--limit", "3"], "goes without --limit"),
        (["--parser", "json:at"], "--replay"),
        (["--dry-run"], "--replay"),
        (["--replay", "--parser", "jsn:at"], "jsn"),
        (["--replay", "--time-zone", "Mars"], "Mars"),
        (["--replay", "--generation", "9"], "no generation 9"),
    ],
)
def test_dead_refuses(run: Run, args: list[str], message: str) -> None:
    refused = run("archive", "dead", "daily", *args)
    assert refused.code in (1, 2)
    assert message in refused.err
