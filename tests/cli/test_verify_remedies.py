"""Problems that ``verify`` and ``archive verify`` find: each is brought about, its remedy ends it.

Commands are those that are printed, word by word; only Spark is left out of them. A remedy in words
is done as it says.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tidelog as library
from tests.support.cli_run import Run
from tidelog import Event
from tidelog.catalog.base import ABSENT, Put
from tidelog.model import layout
from tidelog.model.pipeline import Intent
from tidelog.model.topic import encode_row

DATA = Path("tidelog-data")
ROWS = DATA / "catalog.sqlite"


@dataclass
class Place:
    """A home in the current folder, with a topic and an archive of it."""

    tidelog: Run
    folder: Path

    def run(self, *words: str) -> None:
        done = self.tidelog(*words)
        assert done.code == 0, (words, done.err)

    def follow(self, commands: list[str], begins: str) -> None:
        """Run the command that was printed, or the only one that begins so."""
        (command,) = {each for each in commands if each == begins} or {
            each for each in commands if each.startswith(begins)
        }
        words = shlex.split(command)
        self.run(*words, *(["--no-spark"] if words[1] in ("backfill", "run") else []))

    def send(self, count: int = 10, first: int = 0) -> None:
        value = b'{"at": 1794700800}'
        with library.open() as home:
            home.append("t", [Event(value, id=f"e{first + n}") for n in range(count)])

    def objects(self, pattern: str) -> list[Path]:
        found = [
            each for each in (self.folder / DATA).rglob(pattern) if ".tidelog" not in str(each)
        ]
        assert found
        return sorted(found)


@pytest.fixture
def place(tidelog: Run, tmp_path: Path) -> Place:
    found = Place(tidelog, tmp_path)
    found.run("topic", "create", "t")
    return found


def commands_in(text: str) -> list[str]:
    return re.findall(r"`tidelog ([^`]+)`", text)


# Archives.


@pytest.fixture
def archived(place: Place) -> Place:
    parser = ("--kind", "partition", "--parser", "json:at")
    place.run("archive", "create", "daily", "--source", "topic:t", *parser)
    place.send()
    place.send(3, first=10)
    place.run("archive", "run", "daily", "--no-spark")
    assert archive_problems(place) == []
    return place


def archive_report(place: Place, *more: str) -> dict[str, Any]:
    done = place.tidelog("archive", "verify", "daily", "--deep", "--json", *more)
    (report,) = done.rows()
    assert done.code == int(report["problem_count"] > 0)
    return dict(report)


def archive_problems(place: Place) -> list[dict[str, str]]:
    return list(archive_report(place)["problems"])


def data_file(place: Place) -> Path:
    return place.objects("archives/daily/g1/**/*.parquet")[0]


def lose_file(place: Place) -> None:
    data_file(place).unlink()


def shorten_file(place: Place) -> None:
    file = data_file(place)
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-7])


def damage_file(place: Place) -> None:
    file = data_file(place)
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 0xFF
    file.write_bytes(data)


def lose_manifest(place: Place) -> None:
    with library.open() as home:
        pipeline = home.archives.get("daily").info.pipeline()
    for each in place.objects(f"*{pipeline}*/**/*"):
        if each.is_file() and "manifest" in str(each):
            each.unlink()


DAMAGES = {
    "missing": lose_file,
    "size": shorten_file,
    "contents": damage_file,
    "manifest": lose_manifest,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_archive_is_whole_after_the_backfill_and_the_promote_that_verify_names(
    archived: Place, kind: str
) -> None:
    DAMAGES[kind](archived)
    found = [each for each in archive_problems(archived) if each["kind"] == kind]
    assert found
    commands = commands_in(found[0]["do"])
    archived.follow(commands, "archive backfill daily")
    archived.follow(commands, "archive promote daily")
    assert archive_report(archived, "--generation", "2")["problems"] == []
    left = archive_problems(archived)
    assert {each["where"].partition(":")[0] for each in left} == {"generation 1"}
    archived.follow(commands_in(left[0]["do"]), "archive drop daily 1")
    report = archive_report(archived)
    assert report["problems"] == []
    assert report["written"] == 13


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_that_the_source_cannot_fill_is_left_out_by_the_commands_that_verify_names(
    archived: Place, kind: str
) -> None:
    DAMAGES[kind](archived)
    archived.send(5, first=20)
    archived.run("archive", "run", "daily", "--no-spark")
    archived.send(2, first=30)
    archived.run("archive", "run", "daily", "--no-spark")
    archived.run("trim", "t", "--offset", "0:18")
    found = [each for each in archive_problems(archived) if each["kind"] == kind]
    commands = commands_in(found[0]["do"])
    refused = archived.tidelog("archive", "backfill", "daily", "--no-spark")
    assert refused.code == 1
    assert "`tidelog archive backfill daily --accept-loss`" in refused.err
    archived.follow(commands, "archive backfill daily --accept-loss")
    assert archived.tidelog("archive", "promote", "daily").code == 2
    archived.follow(commands, "archive promote daily --force")
    report = archive_report(archived, "--generation", "2")
    assert (report["problems"], report["written"]) == ([], 7)
    (account,) = report["accounts"]
    assert (account["archived"], account["in_gaps"], account["adds_up"]) == (7, 13, True)
    archived.send(1, first=40)
    archived.run("archive", "run", "daily", "--no-spark")
    assert archive_report(archived, "--generation", "2")["written"] == 8


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_archive_of_an_archive_is_made_again_from_it(place: Place, kind: str) -> None:
    """A source that is no topic may lack events: what files hold beside it is compared."""
    place.run("archive", "create", "raw", "--source", "topic:t")
    parser = ("--kind", "partition", "--parser", "json:at")
    place.run("archive", "create", "daily", "--source", "archive:raw", *parser)
    for first in (0, 10):
        place.send(first=first)
        for name in ("raw", "daily"):
            place.run("archive", "run", name, "--no-spark")
    DAMAGES[kind](place)
    found = [each for each in archive_problems(place) if each["kind"] == kind]
    commands = commands_in(found[0]["do"])
    place.follow(commands, "archive backfill daily --accept-loss")
    place.follow(commands, "archive promote daily")
    report = archive_report(place, "--generation", "2")
    assert (report["problems"], report["written"]) == ([], 20)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_archive_is_whole_after_a_restore_from_a_copy(archived: Place, kind: str) -> None:
    copy = archived.folder / "copy"
    shutil.copytree(archived.folder / DATA, copy)
    DAMAGES[kind](archived)
    assert "restore it from a copy" in archive_problems(archived)[0]["do"]
    for each in copy.rglob("*"):
        there = archived.folder / DATA / each.relative_to(copy)
        if each.is_file() and (not there.exists() or there.suffix == ".parquet"):
            there.unlink(missing_ok=True)
            shutil.copy(each, there)
    assert archive_problems(archived) == []


def test_damage_of_a_generation_that_is_not_live_ends_when_it_is_dropped(archived: Place) -> None:
    archived.run("archive", "backfill", "daily", "--no-spark")
    archived.run("archive", "promote", "daily")
    lose_file(archived)
    found = archive_report(archived, "--generation", "1")["problems"]
    archived.follow(commands_in(found[0]["do"]), "archive drop daily 1")
    assert archive_problems(archived) == []
    refused = archived.tidelog("archive", "verify", "daily", "--generation", "1")
    assert "generation" in refused.err


def test_stray_file_is_no_problem_once_it_is_moved_out(archived: Place) -> None:
    stray = data_file(archived).with_name("mine.parquet")
    stray.write_bytes(b"mine")
    (found,) = archive_problems(archived)
    assert found["kind"] == "stray"
    assert found["do"].startswith("move it out of the folder")
    shutil.move(
        archived.folder / DATA / "objects" / found["where"], archived.folder / "mine.parquet"
    )
    assert archive_problems(archived) == []


@pytest.mark.parametrize("is_gone", [True, False])
def test_marker_is_right_once_the_bytes_that_verify_names_are_in_its_place(
    archived: Place, is_gone: bool
) -> None:
    archived.run("archive", "finalize", "daily", "--delay", "0s")
    archived.run("archive", "finalize", "daily", "--delay", "0s")
    (marker,) = archived.objects("_SUCCESS")
    marker.chmod(0o644)
    if is_gone:
        marker.unlink()
    else:
        marker.write_bytes(b"{}")
    (found,) = archive_problems(archived)
    assert found["do"] == "put an object with these bytes in its place"
    marker.write_text(found["what"][found["what"].index("{") :])
    assert archive_problems(archived) == []


def test_range_that_a_driver_left_is_finished_by_the_command_of_its_note(archived: Place) -> None:
    archived.send(4, first=20)
    with library.open() as home:
        where = layout.pipeline_partition(home.archives.get("daily").info.pipeline(), "t/0")
        intent = Intent("13", "17", (), began_ms=1, incarnation=home.topic("t").incarnation)
        put = Put("intent", encode_row(intent), ABSENT)
        home.catalog.write(where, put, write_id=home.context.ids.new())
    (note,) = [each for each in archive_report(archived)["notes"] if each["kind"] == "intent"]
    archived.follow(commands_in(note["do"]), "archive run daily")
    report = archive_report(archived)
    assert (report["notes"], report["problems"], report["written"]) == ([], [], 17)


def test_topic_that_was_made_again_is_no_problem_after_the_command_that_verify_names(
    archived: Place,
) -> None:
    archived.run("topic", "delete", "t", "--yes")
    archived.run("topic", "create", "t")
    archived.send(2)
    (found,) = archive_report(archived, "--source")["problems"]
    assert found["kind"] == "source"
    archived.follow(commands_in(found["do"]), "archive run daily --accept-loss")
    report = archive_report(archived, "--source")
    assert (report["problems"], report["written"]) == ([], 13)


def test_source_that_did_not_answer_is_no_problem_once_it_does(place: Place) -> None:
    lines = place.folder / "lines"
    lines.mkdir()
    (lines / "one.jsonl").write_bytes(b'{"at": 1794700800}\n')
    place.run("archive", "create", "daily", "--source", f"file://{lines}/")
    place.run("archive", "run", "daily", "--no-spark")
    shutil.move(lines, place.folder / "away")
    (found,) = archive_report(place, "--source")["problems"]
    assert found["do"] == "make the source answer, then verify again"
    shutil.move(place.folder / "away", lines)
    assert archive_report(place, "--source")["problems"] == []


def test_lost_dead_letters_are_there_again_after_the_backfill_that_verify_names(
    archived: Place,
) -> None:
    with library.open() as home:
        home.append("t", [Event(b"no json", id="bad")])
        letters = f"{home.archives.get('daily').info.dead}/**/*"
    archived.run("archive", "run", "daily", "--no-spark")
    for each in archived.objects(letters):
        if each.is_file():
            each.unlink()
    found = archive_problems(archived)
    assert {each["kind"] for each in found} == {"missing"}
    archived.follow(commands_in(found[0]["do"]), "archive backfill daily")
    archived.follow(commands_in(found[0]["do"]), "archive promote daily")
    report = archive_report(archived, "--generation", "2")
    assert (report["problems"], report["dead"]) == ([], 1)


# Topics.


def sweep(place: Place) -> None:
    """The sweep that is named, after its grace."""
    place.run("sweep", "--grace", "0s")


def findings(place: Place) -> list[str]:
    """Errors and warnings of topics, and errors of the home."""
    done = place.tidelog("verify", "--json")
    found: list[str] = []
    for row in done.rows():
        for each in row["findings"]:
            is_plain = isinstance(each, str)
            if is_plain or each["severity"] != "note":
                found.append(each if is_plain else f"{each['where']}: {each['what']}")
    return found


def values(place: Place, topic: str = "t") -> list[str | None]:
    with library.open() as home:
        return sorted(event.id or "" for event in home.read(topic))


def copy_catalog(place: Place) -> Path:
    copy = place.folder / "copy.sqlite"
    with closing(sqlite3.connect(ROWS)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def restore(place: Place, copy: Path) -> None:
    for each in (place.folder / DATA).glob("catalog.sqlite*"):
        each.unlink()
    shutil.copy(copy, ROWS)


def lose_commits(place: Place) -> None:
    copy = copy_catalog(place)
    for number in range(4):
        place.send(5, first=10 + 5 * number)
    restore(place, copy)


def lose_commit(place: Place) -> None:
    copy = copy_catalog(place)
    place.send(5, first=10)
    restore(place, copy)


@pytest.mark.parametrize("lose", [lose_commit, lose_commits])
@pytest.mark.parametrize("command", ["topic recover t", "sweep --accept-loss t"])
def test_lost_commits_are_no_finding_after_either_command_that_verify_names(
    place: Place, lose: Callable[[Place], None], command: str
) -> None:
    place.send()
    lose(place)
    found = findings(place)
    assert found
    place.follow(commands_in(" ".join(found)), command)
    assert findings(place) == []
    is_kept = command.startswith("topic recover")
    assert (len(values(place)) > 10) == is_kept


@pytest.mark.parametrize("command", ["topic recover NAME --incarnation", "sweep --accept-loss"])
def test_topic_without_a_registry_row_is_no_finding_after_either_command_that_verify_names(
    place: Place, command: str
) -> None:
    copy = copy_catalog(place)
    place.run("topic", "create", "u")
    with library.open() as home:
        home.append("u", [Event(b"1", id="one"), Event(b"2", id="two")])
    restore(place, copy)
    (found,) = findings(place)
    commands = [each.replace("NAME", "u") for each in commands_in(found)]
    place.follow(commands, command.replace("NAME", "u"))
    assert findings(place) == []
    if command.startswith("topic recover"):
        assert values(place, "u") == ["one", "two"]


def lose(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("is_journal", [False, True], ids=["segment", "journal"])
@pytest.mark.parametrize("harm", [lose, shorten, damage])
def test_object_of_a_topic_is_no_finding_once_it_is_restored_from_a_copy(
    place: Place, harm: Callable[[Path], None], is_journal: bool
) -> None:
    place.send()
    if is_journal:
        place.run("compile", "t", "--min-events", "1")
        sweep(place)
    (path,) = [each for each in place.objects("topics/*/**/*") if each.is_file()]
    copy = place.folder / "copy"
    shutil.copy(path, copy)
    path.chmod(0o644)
    harm(path)
    found = findings(place)
    assert found
    assert all("restore it from a copy" in each for each in found), found
    shutil.copy(copy, path)
    assert findings(place) == []
    assert len(values(place)) == 10


# Erasures.


def traces(place: Place) -> list[str]:
    done = place.tidelog("verify", "t", "--erased", "e1", "--json")
    (row,) = done.rows()
    assert done.code == int(not row["erased"])
    return [each["do"] for each in row["traces"]]


def test_deleted_event_is_gone_after_the_compile_and_the_sweep_that_verify_names(
    place: Place,
) -> None:
    place.send()
    place.run("delete", "t", "e1")
    (remedy,) = set(traces(place))
    assert commands_in(remedy) == ["compile t --amended", "sweep"]
    place.follow(commands_in(remedy), "compile t")
    (remedy,) = set(traces(place))
    assert "sweep" in commands_in(remedy)
    sweep(place)
    assert traces(place) == []


def test_deleted_event_is_gone_from_archives_after_the_delete_that_verify_names(
    archived: Place,
) -> None:
    archived.run("delete", "t", "e1")
    archived.run("compile", "t", "--amended")
    sweep(archived)
    (remedy,) = set(traces(archived))
    (command,) = commands_in(remedy)
    archived.follow([command.replace("ID", "e1")], "delete t e1 --prove")
    assert traces(archived) == []
    assert archive_problems(archived) == []
