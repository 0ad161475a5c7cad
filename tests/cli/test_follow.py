"""What follows all archives and pumps of a home in one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.archive.test_archive import an_archive
from tests.support.cli_run import start
from tests.support.up_run import SECONDS_MAX, archived, eventually, is_gone, tidelog
from tidelog import Event, Home
from tidelog.archive.delete import end_archive
from tidelog.coordination.jobs import SupervisedPart
from tidelog.maintenance.follower import Follower
from tidelog.pipeline.tasks import LocalWorkers

_START_S = 250.0  # of a session on a busy machine


@contextlib.contextmanager
def following(home: Home) -> Iterator[dict[str, SupervisedPart]]:
    """The newest report of each part."""
    stop, parts = threading.Event(), {}

    def report(part: SupervisedPart) -> None:
        parts[part.name] = part

    follower = Follower(home.context, LocalWorkers(1), report, stop)
    thread = threading.Thread(target=follower.run)
    thread.start()
    try:
        yield parts
    finally:
        stop.set()
        thread.join()


def test_a_promoted_generation_is_gone_over_to(home: Home, place: Path) -> None:
    home.create_topic("orders")
    tidelog(place, *("archive", "create", "raw", "--source", "topic:orders", "--max-age", "100ms"))
    home.append("orders", [Event(b"one"), Event(b"two")])
    with following(home) as parts:
        eventually("it follows", lambda: archived(home, "raw") == 2)
        tidelog(place, "archive", "backfill", "raw", "--no-spark", "--format", "jsonlines")
        tidelog(place, "archive", "promote", "raw")
        assert home.archives.get("raw").info.generation == 2
        home.append("orders", [Event(b"three")])
        eventually("the new generation is followed", lambda: archived(home, "raw") == 3)
        eventually("and said so", lambda: parts["archive raw"].state == "running")


def test_archive_tells_that_its_events_become_dead_letters(home: Home, place: Path) -> None:
    home.create_topic("orders")
    create = ("archive", "create", "daily", "--source", "topic:orders", "--max-age", "100ms")
    tidelog(place, *create, "--parser", "iso8601:at")
    home.append("orders", [Event(b"{}"), Event(b"{}")])
    with following(home) as parts:
        eventually("it follows", lambda: "archive daily" in parts)
        eventually("it tells", lambda: "became dead letters" in parts["archive daily"].error)
        told = parts["archive daily"]
        assert (told.state, told.error.partition(":")[2]) == (
            "running",
            " see why with `tidelog archive dead daily`",
        )
        home.append("orders", [Event(b'{"at": "2026-11-01T00:00:00Z"}')])
        eventually("it works again", lambda: not parts["archive daily"].error)


def test_a_deleted_pump_is_left(home: Home, place: Path) -> None:
    home.create_topic("orders")
    home.create_topic("copy")
    pumping = ("pump", "topic:orders", "--topic", "copy", "--name", "copier", "--no-spark")
    tidelog(place, *pumping)
    with following(home) as parts:
        eventually(
            "it runs",
            lambda: parts.get("pump copier", SupervisedPart("", "", 0)).state == "running",
        )
        home.append("orders", [Event(b"one")])
        eventually("it pumps", lambda: len(list(home.read("copy"))) == 1)
    tidelog(place, "pipeline", "delete", "copier", "--yes")
    with following(home) as parts:
        home.append("orders", [Event(b"two")])
        eventually("it looks", lambda: "notifications" in parts)
        time.sleep(2.5)
        assert "pump copier" not in parts
        assert len(list(home.read("copy"))) == 1
    assert parts["notifications"].state == "stopped"


def test_ended_archive_is_left_and_not_followed_again(home: Home) -> None:
    home.create_topic("orders")
    for name in ("new", "old"):
        an_archive(home, name, "topic:orders", max_age_ms=100)
    home.append("orders", [Event(b"one"), Event(b"two")])
    with following(home) as parts:
        eventually("both follow", lambda: archived(home, "new") == archived(home, "old") == 2)
        end_archive(home.context, "old")
        eventually("it stops", lambda: parts["archive old"].state == "stopped")
        home.append("orders", [Event(b"three")])
        eventually("the other goes on", lambda: archived(home, "new") == 3)
    with following(home) as parts:
        home.append("orders", [Event(b"four")])
        eventually("the other is followed", lambda: archived(home, "new") == 4)
        assert "archive old" not in parts
    assert archived(home, "old") == 2


def test_fields_that_a_pump_was_begun_with_are_kept(home: Home, place: Path) -> None:
    home.create_topic("clicks")
    home.create_topic("keyed", 3)
    pumping = ("pump", "topic:clicks", "--topic", "keyed", "--name", "by-user", "--no-spark")
    tidelog(place, *pumping, "--key-field", "user", "--id-field", "id")
    home.append("clicks", [Event(b'{"user": "ann", "id": "c1"}')])
    with following(home):
        eventually("it pumps", lambda: _events(home, "keyed", 3))
    [event] = _events(home, "keyed", 3)
    assert (event.key, event.id) == (b"ann", "c1")


def _events(home: Home, topic: str, partitions: int) -> list[Event]:
    return [event for partition in range(partitions) for event in home.read(topic, partition)]


def test_a_restore_is_not_followed(home: Home, place: Path) -> None:
    home.create_topic("orders")
    home.create_topic("again")
    home.append("orders", [Event(b"one")])
    tidelog(place, *("archive", "create", "raw", "--source", "topic:orders"))
    tidelog(place, "archive", "run", "raw", "--no-spark")
    tidelog(place, "archive", "restore", "raw", "--to", "topic:again", "--no-spark")
    with following(home) as parts:
        eventually("it follows the archive", lambda: "archive raw" in parts)
        assert not [name for name in parts if name.startswith("pump")]


@pytest.mark.timeout(600)
@pytest.mark.spark
def test_many_archives_share_one_spark_session_that_starts_late_and_is_replaced(
    home: Home, place: Path, tmp_path: Path
) -> None:
    """By default, on Spark: it starts when there is work, and a killed one is replaced."""
    for name in ("one", "two", "three"):
        home.create_topic(name)
        home.append(name, [Event(b"%d" % n) for n in range(100)])
        tidelog(place, *("archive", "create", name, "--source", f"topic:{name}"))
    process = start("--home", str(place), "follow", "--json", cwd=tmp_path)
    try:
        assert process.stdout is not None
        running: set[str] = set()
        while len(running) < 3:
            told = json.loads(process.stdout.readline())
            if told["state"] == "running" and told["part"].startswith("archive"):
                running.add(told["part"])
        assert _javas(process.pid) == [], "nothing is due yet"
        for name in ("one", "two", "three"):
            assert home.archives.get(name).flush(timeout_s=_START_S) == []
            assert archived(home, name) == 100
        [java] = _javas(process.pid)
        os.kill(java, signal.SIGKILL)
        home.append("two", [Event(b"%d" % n) for n in range(100)])
        assert home.archives.get("two").flush(timeout_s=_START_S) == []
        assert archived(home, "two") == 200
        javas = _javas(process.pid)
        assert len(javas) == 1
        assert javas != [java]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0
        eventually("its Java ends", lambda: all(map(is_gone, javas)))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _javas(pid: int) -> list[int]:
    """The Java processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                name = (folder / "comm").read_text().strip()
                if int(fields[1]) == pid and name == "java":
                    found.append(int(folder.name))
    return found
