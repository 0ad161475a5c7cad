"""Every trouble of ``archive status --check``: it is brought about, and its remedy ends it.

The commands are those that the check prints, word by word; only Spark is left out of them. A loss
that was accepted is reported for a day: that is a trouble of its own, with a remedy of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

import tidelog as library
from tests.support.cli_run import TIDELOG, Run
from tests.support.waiting import until
from tidelog import Event
from tidelog.archive.delete import end_archive
from tidelog.catalog.base import ABSENT, Put
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.ownership import Member
from tidelog.coordination.pipeline_rows import change_archive
from tidelog.errors import UnavailableError
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Intent, Progress
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.failures import PipelineFailures

LATE = b'{"at": 1794700800}'


@dataclass
class Place:
    """A home with a topic and an archive, in the current folder."""

    tidelog: Run
    folder: Path

    def run(self, *words: str) -> None:
        done = self.tidelog(*words)
        assert done.code == 0, (words, done.err)

    def drive(self, *more: str) -> None:
        self.run("archive", "run", "daily", "--no-spark", *more)

    def send(self, count: int = 10, value: bytes = LATE) -> None:
        with library.open() as home:
            home.append("t", [Event(value) for _ in range(count)])

    def drivers(self) -> int:
        return int(self.tidelog("archive", "status", "daily", "--json").rows()[0]["drivers"])

    def check(self, *more: str) -> list[str]:
        done = self.tidelog("archive", "status", "daily", "--check", "--json", *more)
        (row,) = done.rows()
        assert done.code == int(not row["healthy"])
        return list(row["troubles"])


@pytest.fixture
def place(tidelog: Run, tmp_path: Path) -> Place:
    found = Place(tidelog, tmp_path)
    found.run("topic", "create", "t")
    parser = ("--kind", "partition", "--parser", "json:at")
    found.run("archive", "create", "daily", "--source", "topic:t", *parser)
    return found


# What brings each trouble about.


def not_driven(place: Place) -> None:
    place.send()


def deleted(place: Place) -> None:
    place.send()
    place.drive()
    place.run("topic", "delete", "t", "--yes")


def deleted_unread(place: Place) -> None:
    place.send()
    place.drive()
    place.send()
    place.run("topic", "delete", "t", "--yes", "--past-readers")


def remade(place: Place) -> None:
    deleted(place)
    place.run("topic", "create", "t")


def lost(place: Place) -> None:
    place.send()
    place.drive()
    place.send()
    with library.open() as home:
        home.trim("t", ToOffsets({0: 15}), past_readers=True)


def lost_and_accepted(place: Place) -> None:
    lost(place)
    place.drive("--accept-loss")


def silent(place: Place) -> None:
    """A driver of another machine is a member, and says nothing for years."""
    place.send()
    place.drive()
    with library.open() as home:
        where = layout.pipeline_members(home.archives.get("daily").info.pipeline())
        gone = Put(layout.member_row("other"), encode_row(Member(1, "", 1)), ABSENT)
        home.catalog.write(where, gone, write_id=home.context.ids.new())


def stuck(place: Place) -> None:
    place.send()
    place.drive()
    place.send()
    with library.open() as home:
        where = layout.pipeline_partition(home.archives.get("daily").info.pipeline(), "t/0")
        topic = home.topic("t")
        intent = Intent("10", "20", (), began_ms=1, incarnation=topic.incarnation)
        put = Put("intent", encode_row(intent), ABSENT)
        home.catalog.write(where, put, write_id=home.context.ids.new())


def failing(place: Place) -> None:
    place.send()
    place.drive()
    place.send()
    with library.open() as home:
        failures = PipelineFailures(home.context, home.archives.get("daily").info.pipeline())
        error = UnavailableError("broker: away: try again")
        failures.add([(SourcePartition("t", "0"), error)])


def dead(place: Place) -> None:
    """Letters of a parser that has learned more since."""
    place.send(90)
    place.send(5, json.dumps({"when": 1794700800}).encode())
    place.drive()


def ending(place: Place) -> None:
    place.send()
    place.drive()
    with library.open() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidelog.archive.delete.freeze_heads", _die)
        with contextlib.suppress(KeyboardInterrupt):
            end_archive(home.context, "daily")


def removing(place: Place) -> None:
    place.send()
    place.drive()
    with library.open() as home:
        end_archive(home.context, "daily")

        def edit(found: Archive) -> Archive:
            ended = msgspec.structs.replace(found.ended, removing=True)
            return msgspec.structs.replace(found, ended=ended)

        change_archive(home.context, "daily", edit)


def _die(*_: object) -> None:
    raise KeyboardInterrupt


@dataclass(frozen=True)
class Case:
    """A trouble: how it comes about, what the check says, and which command of it helps."""

    bring: Callable[[Place], None]
    says: str
    command: str  # how the command begins that is run
    more: tuple[str, ...] = ()  # of the check
    before: tuple[str, ...] = ()  # a command that the remedy names in words
    extra: tuple[str, ...] = ()  # that it names in words, for the command


CASES = {
    "no driver is running": Case(not_driven, "no driver is running", "archive run daily --follow"),
    "many wait": Case(
        not_driven,
        "10 events wait (limit 5)",
        "archive run daily",
        ("--max-lag", "5", "--no-driver"),
    ),
    "one waits for long": Case(
        not_driven,
        "the oldest event that waits is",
        "archive run daily",
        ("--max-lag-seconds", "0", "--no-driver"),
    ),
    "topic deleted": Case(deleted, "its topic `t` was deleted", "archive delete daily"),
    "topic deleted, created again": Case(
        deleted,
        "or create the topic again",
        "archive run daily --accept-loss",
        before=("topic", "create", "t"),
    ),
    "topic deleted unread": Case(
        deleted_unread, "10 of its events were not archived", "archive delete daily"
    ),
    "topic deleted unread, created again": Case(
        deleted_unread,
        "10 of its events were not archived",
        "archive run daily --accept-loss",
        before=("topic", "create", "t"),
    ),
    "source remade": Case(remade, "deleted and made again", "archive run daily --accept-loss"),
    "source remade, ended": Case(remade, "deleted and made again", "archive delete daily"),
    "source lost": Case(
        lost, "the source holds nothing before 15", "archive run daily --accept-loss"
    ),
    "loss accepted": Case(
        lost_and_accepted,
        "1 range was lost",
        "archive status daily --check --since 0s",
    ),
    "silent": Case(silent, "1 of its drivers died", "archive run daily --follow"),
    "stuck": Case(stuck, "a range is in progress for", "archive run daily", ("--no-driver",)),
    "failing": Case(failing, "has failed for", "archive run daily"),
    "dead letters": Case(
        dead,
        "5 dead letters",
        "archive dead daily --replay",
        extra=("--parser", "json:when"),
    ),
    "end not complete": Case(ending, "its end is not complete", "archive delete daily"),
}


@pytest.mark.parametrize("name", CASES)
def test_remedy_that_the_check_prints_ends_the_trouble(place: Place, name: str) -> None:
    case = CASES[name]
    case.bring(place)
    said = [each for each in place.check(*case.more) if case.says in each]
    assert said, place.check(*case.more)
    if case.before:
        place.run(*case.before)
    commands = re.findall(r"`tidelog ([^`]+)`", " ".join(place.check(*case.more)))
    command = next(each for each in commands if each.startswith(case.command))
    follow(place, [*shlex.split(command), *case.extra], case.more)
    left = place.check(*case.more)
    if case.command.startswith("archive run daily --accept-loss"):
        left = [each for each in left if "which was accepted" not in each]  # a case of its own
    if "status" not in case.command:
        assert left == []


def follow(place: Place, words: list[str], more: tuple[str, ...]) -> None:
    """Run a command; one that follows, until the check is clean."""
    if words[:2] == ["archive", "delete"]:
        words.append("--yes")
    if words[:2] == ["archive", "run"]:
        words.append("--no-spark")
    if "--follow" not in words:
        place.run(*words)
        return
    driver = subprocess.Popen([*TIDELOG, *words], cwd=place.folder, stdout=subprocess.DEVNULL)
    try:
        until(lambda: place.drivers() == 1)  # a flush before that is not for it
        until(lambda: place.tidelog("archive", "flush", "daily").code == 0)
        until(lambda: place.check(*more) == [], why=lambda: str(place.check(*more)))
    finally:
        driver.send_signal(signal.SIGTERM)
        driver.wait(60)


def test_outage_that_a_driver_reports_ends_when_the_source_answers(place: Place) -> None:
    place.send()
    place.drive()
    with library.open() as home:
        pipeline = home.archives.get("daily").info.pipeline()
        PipelineFailures(home.context, pipeline).add_whole(
            UnavailableError("broker: away: try again")
        )
        where = layout.pipeline_members(pipeline)
        beats = Member(1_000, "", home.context.clock.now_ms())
        change = Put(layout.member_row("other"), encode_row(beats), ABSENT)
        home.catalog.write(where, change, write_id=home.context.ids.new())
    assert any("its driver has not reached the source" in each for each in place.check())
    place.drive("--take-over")
    assert place.check() == []


def test_account_that_does_not_add_up_is_named_by_verify_and_ends_with_the_right_row(
    place: Place,
) -> None:
    """No command ends this one: the check names the command that says what is wrong."""
    place.send()
    place.drive()
    with library.open() as home:
        where = layout.pipeline_partition(home.archives.get("daily").info.pipeline(), "t/0")
        right = home.catalog.get(where, "head")
        assert right is not None
        head = decode_row(right.value, Progress, "head")
        totals = msgspec.structs.replace(head.totals, absent=head.totals.absent + 3)
        wrong = encode_row(msgspec.structs.replace(head, totals=totals))
        home.catalog.write(where, Put("head", wrong), write_id=home.context.ids.new())
    (said,) = [each for each in place.check() if "does not add up" in each]
    (command,) = re.findall(r"`tidelog ([^`]+)`", said)
    verified = place.tidelog(*shlex.split(command), "--deep")
    assert verified.code == 1
    with library.open() as home:
        home.catalog.write(where, Put("head", right.value), write_id=home.context.ids.new())
    assert place.check() == []


def test_removal_that_is_not_complete_is_finished_by_the_command_it_names(place: Place) -> None:
    removing(place)
    refused = place.tidelog("archive", "status", "daily", "--check")
    (command,) = re.findall(r"`tidelog ([^`]+)`", refused.err)
    place.run(*shlex.split(command), "--yes")
    assert place.tidelog("archive", "status", "--all", "--check").code == 0


def test_source_that_cannot_be_reached_is_healthy_once_it_is_back(
    tidelog: Run, tmp_path: Path
) -> None:
    place = Place(tidelog, tmp_path)
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "one.jsonl").write_bytes(LATE + b"\n")
    place.run("archive", "create", "daily", "--source", f"file://{lines}/")
    place.drive()
    shutil.move(lines, tmp_path / "away")
    assert any("its source cannot be reached" in each for each in place.check())
    shutil.move(tmp_path / "away", lines)
    place.drive()
    assert place.check() == []


def test_detached_archive_is_a_trouble_until_it_is_ended(
    tidelog: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.chdir(first)
    place = Place(tidelog, first)
    home = ("--home", str(first / "home"))
    place.run(*home, "init")
    place.run(*home, "topic", "create", "t")
    outside = f"file://{tmp_path}/else/daily"
    place.run(*home, "archive", "create", "daily", "--source", "topic:t", "--to", outside)
    shutil.copytree(first / "home", tmp_path / "copy")
    copy = ("--home", str(tmp_path / "copy"))
    check = (*copy, "archive", "status", "daily", "--check")
    said = tidelog(*check)
    assert said.code == 1
    assert b"`tidelog home adopt`" in said.out
    place.run(*copy, "home", "adopt")
    said = tidelog(*check)
    assert said.code == 1
    assert b"takes no events here, its folder belongs to home" in said.out
    dropped = tidelog(*copy, "archive", "drop", "daily", "2")
    assert "end it with `tidelog archive delete daily`" in dropped.err
    refused = tidelog(*copy, "archive", "delete", "daily", "--delete-files", "--yes")
    assert "its files are changed and deleted there" in refused.err
    (command,) = re.findall(rb"`tidelog (archive delete [^`]+)`", said.out)
    place.run(*copy, *shlex.split(command.decode()), "--yes")
    assert tidelog(*check).code == 0
    assert tidelog(*home, "archive", "status", "daily", "--check").code == 0
    place.run(*home, "archive", "run", "daily", "--no-spark")
