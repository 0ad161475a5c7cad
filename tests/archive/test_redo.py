"""A redo writes a part of an archive again, and copies the rest byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest

from tests.archive.test_fill import drive, listed, live, trim
from tests.connectors.kinesis.test_source import Stream
from tests.faults.test_fill_deaths import deaths, dies
from tests.servers.moto import KEYS
from tests.support.kinesis_server import running_kinesis
from tidelog import ArchiveHandle, Event, Home, InvalidError, NotFoundError
from tidelog.archive.archive import FormatOptions, archive_format
from tidelog.archive.generations import begin_backfill
from tidelog.codec.parsers import FolderPaths, FolderSettings
from tidelog.connectors.archive import sink
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import counting_files
from tidelog.home import World, create_home
from tidelog.maintenance.erase import purge
from tidelog.model.archive import RedoPart
from tidelog.model.pipeline import FileEntry
from tidelog.pipeline.pipeline import CycleReport
from tidelog.settings import Settings

DAY_MS = 86_400_000
FIRST_MS = 20_000 * DAY_MS  # 2024-10-04
DAYS = ("2024-10-04", "2024-10-05", "2024-10-06")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 1)
        yield made


def event(number: int) -> Event:
    """One of three days by ``at``, of the last one by ``by``."""
    value = {"n": number, "at": FIRST_MS + number % 3 * DAY_MS, "by": FIRST_MS + 2 * DAY_MS}
    return Event(json.dumps(value).encode(), id=f"id-{number}")


def append(home: Home, numbers: Sequence[int], topic: str = "t") -> None:
    home.append(topic, [event(n) for n in numbers])


def archived(home: Home, commits: int = 3, each: int = 12, **options: Any) -> ArchiveHandle:
    options.setdefault("parser", "json:at")
    archive = home.archives.create("daily", source="topic:t", **options)
    for number in range(commits):
        append(home, range(number * each, (number + 1) * each))
        archive.run()
    return archive


def files(home: Home, archive: ArchiveHandle, generation: int) -> list[FileEntry]:
    pipeline = archive.reload().pipeline(generation)
    return [file for _, file in counting_files(home.context, pipeline, "t/0")]


def in_day(home: Home, archive: ArchiveHandle, day: str, topic: str = "t") -> Counter[int]:
    """The numbers in the live folder of a day, as a reader that lists it finds them."""
    folder = (
        f"{home.store.url.removeprefix('file://')}/{archive.reload().folder()}/{topic}/dt={day}"
    )
    rows = duckdb.sql(f"SELECT value FROM read_parquet('{folder}/*.parquet')").fetchall()
    return Counter(json.loads(value)["n"] for (value,) in rows)


def dead(archive: ArchiveHandle) -> int:
    return sum(batch.num_rows for batch in archive.dead_letters())


def test_chosen_date_is_parsed_again_and_the_rest_is_copied(home: Home) -> None:
    archive = archived(home)
    trim(home, 36)  # the files are all there is
    before = {f.crc for f in files(home, archive, 1) if f"dt={DAYS[0]}" not in f.target}
    plan = archive.plan_redo(dates=[DAYS[0]], parser="json:by")
    assert (plan.files, plan.events, plan.copied_files) == (3, 12, 6)
    done = archive.redo(dates=[DAYS[0]], parser="json:by")
    assert done.generation == 2
    assert live(home) == Counter(range(36)), "readers of the live one are served"
    archive.promote()
    assert live(home) == Counter(range(36))
    assert in_day(home, archive, DAYS[1]) == Counter(range(1, 36, 3))
    assert in_day(home, archive, DAYS[2]) == Counter([*range(0, 36, 3), *range(2, 36, 3)])
    assert before <= {f.crc for f in files(home, archive, 2)}, "the same bytes"
    assert archive.reload().format_of().redo is None
    (manifest,) = read_manifests(home.context, archive.info.pipeline(), "t/0")
    assert (manifest.read, manifest.filled) == (36, 1), "small commits are joined"
    append(home, range(36, 40))
    assert archive.run().events == 4, "the driver goes on from the source"
    assert live(home) == Counter(range(40))
    archive.redo(dates=[DAYS[1]])
    archive.promote()
    assert live(home) == Counter(range(40)), "copies may be among what a redo wrote"
    archive.rollback(2)
    assert live(home) == Counter(range(40))


def test_chosen_partitions_are_parsed_again_and_others_are_copied(home: Home) -> None:
    home.create_topic("two", 2)
    archive = home.archives.create("daily", source="topic:two", parser="json:at")
    for number, partition in ((1, 0), (2, 1), (4, 1)):
        home.append("two", [event(number)], partition=partition)
    archive.run()
    assert archive.plan_redo(topics=["two"], dates=[DAYS[1]]).events == 2
    assert archive.plan_redo(partitions=["1"], dates=[DAYS[1]]).events == 1
    archive.redo(partitions=["two/1"], parser="json:by")
    archive.promote()
    assert live(home) == Counter([1, 2, 4])
    assert in_day(home, archive, DAYS[1], "two") == Counter([1])


def test_dead_letters_are_copied_and_replayed_ones_are_parsed_again(home: Home) -> None:
    archive = home.archives.create("daily", source="topic:t", parser="json:at", dead_share=1.0)
    append(home, range(3))
    home.append("t", [Event(json.dumps({"n": 3, "by": FIRST_MS}).encode()), Event(b"rubbish")])
    archive.run()
    archive.redo(dates=[DAYS[0]])
    archive.promote()
    assert live(home) == Counter(range(3))
    assert dead(archive) == 2
    archive.replay(parser="json:by")
    archive.redo(dates=[DAYS[1]], parser="json:by")
    archive.promote()
    assert live(home) == Counter(range(4))
    assert dead(archive) == 1


class Doubling:
    """Adds the number twice to the value; wrongly once, before it was fixed."""

    changes_values = True
    factor = 2

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._settings = settings

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        found = [json.loads(each) for each in batch.column("value").to_pylist()]
        values = [json.dumps({**each, "twice": each["n"] * self.factor}) for each in found]
        paths = pa.array([self._settings.name_of(each["at"]) for each in found])
        nothing = pa.nulls(len(found), pa.string())
        times = pa.nulls(len(found), pa.int64())
        return FolderPaths(
            paths.dictionary_encode(), nothing, times, pa.array([v.encode() for v in values])
        )


def test_output_is_made_again_from_the_source_while_that_has_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubling, "factor", 1)
    archive = archived(home, parser="tests.archive.test_redo:Doubling")
    monkeypatch.setattr(Doubling, "factor", 2)
    home.update("t", "id-3", event(3).value)  # which no journal has yet
    archive.redo(dates=[DAYS[0]])
    archive.promote()
    assert live(home) == Counter(range(36))
    values = [v for batch in archive.read() for v in batch.column("value").to_pylist()]
    for value in map(json.loads, values):
        assert value["twice"] == value["n"] * (2 if value["n"] % 3 == 0 else 1)
    trim(home, 20)
    with pytest.raises(InvalidError, match="cannot read that"):
        archive.redo(dates=[DAYS[1]])


@pytest.mark.parametrize(
    "options",
    [
        {"parser": "tests.archive.test_redo:Doubling"},
        {"schema": "n INT", "keep_value": False},
    ],
)
def test_events_that_the_source_still_has_are_made_again_beside_trimmed_ones(
    home: Home, options: dict[str, Any]
) -> None:
    archive = archived(home, commits=1, each=1, **options)  # of the first day
    append(home, [3, 1, 4])
    archive.run()
    trim(home, 2)  # the first commit, and an event of the second one that is not chosen
    archive.redo(dates=[DAYS[1]])
    archive.promote()
    check_numbers(archive, [0, 3, 1, 4])
    manifests = list(read_manifests(home.context, archive.reload().pipeline(), "t/0"))
    assert [each.as_is for each in manifests] == [False], "made again, not carried over"
    with pytest.raises(InvalidError, match="its source no longer has"):
        archive.redo(dates=[DAYS[0]])


@pytest.mark.parametrize("part", [RedoPart(dates=(DAYS[0],)), RedoPart(partitions=("t/0",))])
def test_what_is_archived_during_a_redo_is_made_again_from_the_source_too(
    home: Home, part: RedoPart
) -> None:
    archive = archived(home, commits=1, parser="tests.archive.test_redo:Doubling")
    made = msgspec.structs.replace(archive.info.format_of(), redo=part)
    built, generation = begin_backfill(home.context, "daily", made)

    def go_on(report: CycleReport) -> None:
        if report.committed and not list(home.read("t", 0, 12)):
            append(home, range(12, 24))
            archive.run()

    assert drive(home, built, generation, on_cycle=go_on) == 24
    assert listed(home, archive.reload(), generation) == Counter(range(24))


@pytest.mark.parametrize("call", deaths(60))
def test_redo_that_dies_after_any_write_resumes(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    archive = archived(home, commits=1)
    made = archive_format(FormatOptions(parser="json:by"), archive.info.format_of())
    made = msgspec.structs.replace(made, redo=RedoPart(dates=(DAYS[0],)))
    built, generation = begin_backfill(home.context, "daily", made)
    dies(home, monkeypatch, call, lambda: drive(home, built, generation))
    assert live(home) == Counter(range(12))
    drive(home, built, generation, take_over=True)
    archive.promote()
    assert live(home) == Counter(range(12))
    assert in_day(home, archive, DAYS[2]) == Counter([*range(0, 12, 3), *range(2, 12, 3)])


def test_event_that_is_erased_while_files_are_copied_is_in_no_generation(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archived(home, commits=1)
    copy_files, times = sink.copy_files, []

    def copy(*args: Any) -> Any:
        made = copy_files(*args)
        if not times:  # after the first copies
            home.delete("t", ["id-1"], why="asked")
            purge(home.context, home.topic("t"), grace_ms=0, wait_ms=0)
        times.append(len(made))
        return made

    monkeypatch.setattr(sink, "copy_files", copy)
    archive.redo(dates=[DAYS[0]])
    assert len(times) == 2, "the range was planned again"
    archive.promote()
    left = Counter(range(12)) - Counter([1])
    assert live(home) == left
    assert listed(home, archive.reload(), 1) == left
    home.delete("t", ["id-5"], why="asked")
    purge(home.context, home.topic("t"), grace_ms=0)
    archive.redo(dates=[DAYS[0]])
    archive.promote()
    assert live(home) == left - Counter([5])


@pytest.mark.parametrize(
    "options",
    [
        {"format": "jsonlines"},  # with sidecars
        {"schema": "n INT", "keep_value": False},  # its files hold no events
        {"format": "avro", "granularity": "hour"},
    ],
)
def test_files_of_every_kind_are_copied(home: Home, options: dict[str, Any]) -> None:
    archive = archived(home, commits=2, each=6, **options)
    archive.redo(dates=[DAYS[0]], parser="json:by")
    archive.promote()
    check_numbers(archive, range(12))
    days = Counter(file.path.split("dt=")[1][:10] for file in archive.files())
    assert set(days) == set(DAYS[1:])


def test_archive_of_files_is_redone_from_its_own_files(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [(event(n).value or b"") + b"\n" for n in range(7)]
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_bytes(b"".join(lines[:6]))
    archive = home.archives.create("daily", source=f"file:{folder}", parser="json:at")
    archive.run()
    (folder / "a.jsonl").unlink()
    archive.redo(dates=[DAYS[0]], parser="json:by")
    archive.promote()
    check_numbers(archive, [*range(6), *range(6)])
    with (folder / "b.jsonl").open("ab") as more:
        more.write(lines[6])
    assert archive.run().events == 1, "the file is recognized"
    check_numbers(archive, [*range(6), *range(7)])


def test_events_that_the_archive_numbers_keep_their_numbers(tmp_path: Path) -> None:
    """Kinesis has no offsets: readers of the archive have positions at the ends of its commits."""
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    world = World(environ=KEYS)
    with running_kinesis() as service, create_home(settings, world=world)[0] as home:
        stream = Stream(service.endpoint)
        archive = home.archives.create("daily", source=stream.url(), parser="json:at")
        for first in (0, 6):
            stream.put([("k", event(n).value or b"") for n in range(first, first + 6)])
            archive.run()
        chain = home.archives.create("chain", source="archive:daily")
        chain.run()
        archive.redo(dates=[DAYS[0]], parser="json:by")
        archive.promote()
        check_numbers(archive, range(12))
        stream.put([("k", event(12).value or b"")])
        assert (archive.run().events, chain.run().events) == (1, 1)
        check_numbers(archive, range(13))
        check_numbers(chain, range(13))


def check_numbers(archive: ArchiveHandle, numbers: Sequence[int]) -> None:
    """Check every file, and that they hold the events with these numbers."""
    assert list(archive.verify(deep=True).problems) == []
    rows = [row for batch in archive.read() for row in batch.to_pylist()]
    found = [row["n"] if "n" in row else json.loads(row["value"])["n"] for row in rows]
    assert sorted(found) == sorted(numbers)


@pytest.mark.parametrize(
    ("part", "how", "problem"),
    [
        ({}, {}, "give dates, topics or partitions"),
        ({"dates": ["yesterday"]}, {}, "give year, month and day"),
        ({"dates": ["2020-01-01"]}, {}, "none of its files belong to 2020-01-01"),
        ({"dates": [DAYS[0]]}, {"parser": "tests.archive.test_redo:Doubling"}, "the output of a"),
        ({"dates": [DAYS[0]]}, {"parser": "offset:10"}, "keep their format and their folders"),
    ],
)
def test_part_that_cannot_be_written_again_is_refused(
    home: Home, part: dict[str, Any], how: dict[str, Any], problem: str
) -> None:
    archive = archived(home, commits=1, time_zone="Europe/Berlin")
    with pytest.raises(InvalidError, match=problem):
        archive.redo(**part, **how)
    with pytest.raises(NotFoundError, match="has nothing of a topic `u`"):
        archive.redo(topics=["u"])
    assert archive.reload().building is None
