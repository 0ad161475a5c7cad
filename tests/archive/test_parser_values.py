"""Parsers that also change the payload: files hold their values, dead letters the events' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.archive_look import FIRST_S, a_home
from tidelog import Event, Home, ToOffsets
from tidelog.api.archives import ArchiveHandle
from tidelog.codec.parsers import FolderPaths, FolderSettings
from tidelog.coordination.commits import read_manifests
from tidelog.errors import InvalidError

UNWRAP = "tests.archive.test_parser_values:Unwrap"


class Unwrap:
    """The payload is inside of an envelope, whose time names the folder."""

    changes_values = True

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._settings = settings

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        rows = [self._row(value) for value in batch.column("value").to_pylist()]
        paths = pa.array([path for path, _, _ in rows], pa.string()).dictionary_encode()
        times = pa.nulls(len(rows), pa.int64())
        errors = pa.array([error for _, _, error in rows], pa.string())
        return FolderPaths(
            paths, errors, times, pa.array([value for _, value, _ in rows], pa.binary())
        )

    def _row(self, value: bytes) -> tuple[str | None, bytes | None, str | None]:
        try:
            found = json.loads(value)
        except ValueError:
            return None, None, "no JSON"
        return self._settings.name_of(found["at"] * 1000), found["payload"].encode(), None


class Silent(Unwrap):
    changes_values = False


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t")
        made.append("t", [Event(wrapped(n), id=f"id-{n}") for n in range(6)])
        yield made


def wrapped(number: int, days: int | None = None) -> bytes:
    day = number % 3 if days is None else days
    return json.dumps({"at": FIRST_S + day * 86_400, "payload": f"p{number}"}).encode()


def values(archive: ArchiveHandle) -> list[bytes]:
    return sorted(v for batch in archive.read() for v in batch.column("value").to_pylist())


def plain(count: int) -> list[bytes]:
    return [b"p%d" % number for number in range(count)]


@pytest.mark.parametrize("parser", [UNWRAP, f"split:payload|{UNWRAP}", f"topics:t={UNWRAP}"])
def test_files_hold_the_payload_in_the_folders_of_the_envelope(home: Home, parser: str) -> None:
    archive = home.archives.create("daily", source="topic:t", parser=parser)
    archive.run()
    assert values(archive) == plain(6)
    folders = {file.path.split("/")[-2] for file in archive.files()}
    assert folders == {f"dt=2026-11-{15 + day}" for day in range(3)}
    assert archive.verify(deep=True, source=True).problem_count == 0
    assert "what the parser returns" in archive.restore_limit()
    (told,) = home.update_archives("t", ["id-1"])
    assert told.unchanged.startswith("its files hold the output of a parser")


def test_dead_letters_keep_the_event_and_are_replayed_as_it_was(home: Home) -> None:
    home.append("t", [Event(b"no json", id="bad")])
    archive = home.archives.create("daily", source="topic:t", parser=UNWRAP)
    archive.run()
    (letter,) = [v for batch in archive.dead_letters() for v in batch.column("value").to_pylist()]
    assert letter == b"no json"
    home.update("t", "bad", wrapped(6), archives=False)
    assert archive.replay().replayed == 0  # the letter is what it was


def test_schema_refuses_the_payload_and_the_dead_letter_has_the_envelope(home: Home) -> None:
    archive = home.archives.create(
        "daily", source="topic:t", parser=UNWRAP, schema="a BIGINT", dead_share=1.0
    )
    archive.run()
    letters = [v for batch in archive.dead_letters() for v in batch.column("value").to_pylist()]
    assert sorted(letters) == sorted(wrapped(number) for number in range(6))


def test_parser_that_does_not_say_so_makes_dead_letters(home: Home) -> None:
    silent = UNWRAP.replace("Unwrap", "Silent")
    archive = home.archives.create("daily", source="topic:t", parser=silent, dead_share=1.0)
    assert archive.run().dead == 6
    (error,) = {e for batch in archive.dead_letters() for e in batch.column("error").to_pylist()}
    assert "has no attribute changes_values" in error


def test_generation_from_files_never_changes_them_again(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:t", parser=UNWRAP)
    archive.run()
    home.trim("t", ToOffsets({0: 3}))
    with pytest.raises(InvalidError, match="a parser that changes values cannot read that"):
        archive.backfill(granularity="hour")
    archive.drop(2)
    archive.backfill(parser="timestamp")
    archive.promote()
    assert values(archive) == sorted([*plain(3), *(wrapped(number) for number in range(3, 6))])


def test_later_generations_know_which_ranges_hold_output(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:t", parser=UNWRAP, dead_share=1.0)
    archive.run()
    home.trim("t", ToOffsets({0: 3}))
    archive.backfill(parser="timestamp")
    archive.promote()
    mixed = values(archive)
    with pytest.raises(InvalidError, match="of an earlier generation made of them"):
        archive.backfill(parser=UNWRAP)
    archive.drop(3)
    archive.backfill(parser="offset:4")
    archive.promote()
    assert values(archive) == mixed
    manifests = read_manifests(home.context, archive.reload().pipeline(), "t/0")
    assert [(each.start, each.end, each.as_is) for each in manifests] == [
        ("0", "3", True),
        ("3", "6", False),
    ]


@pytest.mark.parametrize("dropped", [False, True])
def test_update_leaves_output_alone_that_an_archive_read_from_another(
    home: Home, dropped: bool
) -> None:
    above = home.archives.create("above", source="topic:t", parser=UNWRAP)
    above.run()
    below = home.archives.create("below", source="archive:above", parser="timestamp")
    below.run()
    if dropped:
        above.backfill(parser="timestamp")
        above.promote()
        above.drop(1)
    home.update("t", "id-1", wrapped(9), archives=True)
    assert values(below) == plain(6)
    told = {each.archive: each.unchanged for each in home.update_archives("t", ["id-1"])}
    assert told["below"].startswith("its files were made from archive `above`")
    assert bool(told["above"]) != dropped


def test_update_leaves_output_alone_that_a_backfill_carried_over(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:t", parser=UNWRAP)
    archive.run()
    raw = home.archives.create("raw", source="topic:t", start="latest")
    home.append("t", [Event(wrapped(n), id=f"id-{n}") for n in range(6, 9)])
    raw.run()
    archive.run()
    archive.backfill(source="archive:raw", parser="timestamp")
    archive.promote()
    archive.drop(1)
    carried = [*plain(6), *(wrapped(number) for number in range(6, 9))]
    assert values(archive) == sorted(carried)
    home.update("t", "id-1", wrapped(1, 5), archives=True)
    home.update("t", "id-7", wrapped(7, 5), archives=True)
    carried[7] = wrapped(7, 5)
    assert values(archive) == sorted(carried)
    told = {each.archive: each.unchanged for each in home.update_archives("t", ["id-1"])}
    assert told["daily"].startswith("some files hold the output")


def test_replay_does_not_mix_output_with_events(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:t", parser="json:missing", dead_share=1.0)
    archive.run()
    with pytest.raises(InvalidError, match="changes values, and the archive's files hold events"):
        archive.replay(parser=UNWRAP)
    assert archive.replay(parser="json:at").replayed == 6
