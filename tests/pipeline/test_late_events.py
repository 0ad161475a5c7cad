"""A pump or stream of an archive goes back for events that came after it had passed their gap."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.archive_look import a_home
from tidelog import Event, Home
from tidelog.api.archives import ArchiveHandle
from tidelog.connectors.source import Bounds
from tidelog.errors import UnavailableError
from tidelog.model.pipeline import Gap, Manifest, Progress, Totals
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.gaps import late_head, late_spans


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        for name in ("t", "t2", "copy"):
            made.create_topic(name, 1)
        yield made


def append(home: Home, numbers: range) -> None:
    home.append("t", [Event(b"%d" % number) for number in numbers], partition=0)


def archive_with_a_gap(home: Home) -> ArchiveHandle:
    """Returns an archive of ten events that was moved past 5 to 8."""
    archive = home.archives.create("raw", source="topic:t")
    append(home, range(5))
    archive.run()
    append(home, range(5, 9))
    archive.seek("latest")
    append(home, range(9, 10))
    archive.run()
    return archive


def fill_gap(archive: ArchiveHandle) -> None:
    archive.backfill(codec="gzip")
    archive.promote()


def copied(home: Home) -> list[int]:
    return [int(event.value or b"") for event in home.read("copy")]


def test_pump_goes_back_for_events_of_a_promoted_generation(home: Home) -> None:
    archive = archive_with_a_gap(home)
    pump = home.pumps.create("p", source="archive:raw", topic="copy")
    handled: list[int] = []

    def stream() -> None:
        home.stream("archive:raw").run(
            lambda event: handled.append(int(event.value)), name="s", until_caught_up=True
        )

    stream()
    assert pump.run().events == 6
    fill_gap(archive)
    append(home, range(10, 11))
    archive.run()
    stream()
    assert pump.run().events == 5
    assert copied(home) == handled == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8, 10]
    (found,) = pump.status().partitions
    assert (found.position, found.totals.skipped, found.totals.lost) == ("11", 0, 0)
    assert pump.run().events == 0


def test_killed_pump_copies_late_events_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_with_a_gap(home)
    pump = home.pumps.create("p", source="archive:raw", topic="copy")
    pump.run()
    fill_gap(archive)
    finish = Cycle._finish

    def publish_and_die(self: Cycle, track: object, manifest: Manifest, *_: object) -> None:
        self._pipeline.sink.publish(manifest)
        raise UnavailableError("killed")

    monkeypatch.setattr(Cycle, "_finish", publish_and_die)
    with pytest.raises(UnavailableError, match="killed"):
        pump.run()
    monkeypatch.setattr(Cycle, "_finish", finish)
    assert pump.run().events == 4
    assert copied(home) == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8]


def test_archive_of_an_archive_keeps_the_gap_and_verify_says_what_to_do(home: Home) -> None:
    archive = archive_with_a_gap(home)
    chain = home.archives.create("chain", source="archive:raw")
    chain.run()
    pump = home.pumps.create("p", source="archive:chain", topic="copy")
    pump.run()
    fill_gap(archive)
    assert (chain.run().events, pump.run().events) == (0, 0)
    notes = [(note.what, note.do) for note in chain.verify(source=True).notes]
    what = "5 to 9 is a gap, and `archive:raw` has its events now"
    assert (what, "`tidelog archive backfill chain`, then promote the new generation") in notes
    fill_gap(chain)
    assert pump.run().events == 4
    assert copied(home) == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8]
    (kept,) = chain.verify(source=True).notes
    assert (kept.where, kept.do) == ("generation 1: t/0", "nothing: it is on record")


def test_promote_between_read_and_commit_hides_no_gap(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_with_a_gap(home)
    pump = home.pumps.create("p", source="archive:raw", topic="copy")
    record = Cycle._record

    def promote_first(self: Cycle, *given: Any) -> Manifest:
        monkeypatch.setattr(Cycle, "_record", record)
        fill_gap(archive)
        return record(self, *given)

    monkeypatch.setattr(Cycle, "_record", promote_first)
    pump.run()
    pump.run()
    assert sorted(copied(home)) == list(range(10))
    (found,) = pump.status().partitions
    assert (found.totals.skipped, found.totals.deleted) == (0, 0)


def test_pump_goes_back_for_events_of_a_file_that_a_folder_lacked(
    home: Home, tmp_path: Path
) -> None:
    made = home.archives.create("made", source="topic:t")
    for numbers in (range(5), range(5, 9), range(9, 10)):
        append(home, numbers)
        made.run()
    full, part = tmp_path / "full", tmp_path / "part"
    for folder in (full, part):
        shutil.copytree(tmp_path / "o/archives/made/g1", folder)
    next(part.glob("t/*_00000000000000000005*")).unlink()
    raw = home.archives.create("raw", source=f"file:{part}")
    pump = home.pumps.create("p", source="archive:raw", topic="copy")
    assert (raw.run().events, pump.run().events, pump.run().events) == (6, 6, 0)
    direct = home.pumps.create("d", source=f"file:{part}", topic="t2")
    assert (direct.run().events, direct.run().events) == (6, 0), "a folder has nothing late"
    raw.backfill(source=f"file:{full}", codec="gzip")
    raw.promote()
    assert pump.run().events == 4
    assert copied(home) == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8]
    (found,) = pump.status().partitions
    assert (found.totals.skipped, found.totals.absent, found.totals.lost) == (0, 0, 0)
    assert pump.run().events == 0


def upstream(*spans: tuple[int, int]) -> tuple[Gap, ...]:
    return tuple(Gap(str(start), str(end), "upstream", end - start) for start, end in spans)


def test_only_what_the_source_has_now_is_late() -> None:
    head = Progress("50", 0, 0, gaps=upstream((5, 20), (30, 40)))

    def late(*gaps: tuple[int, int], first: int = 0) -> list[tuple[int, int]]:
        return late_spans(head, Bounds(str(first), "60", gaps=upstream(*gaps)))

    assert late() == [(5, 20), (30, 40)]
    assert late((5, 20), (30, 40)) == []
    assert late((0, 7), (10, 12), (35, 60)) == [(7, 10), (12, 20), (30, 35)]
    assert late((0, 60)) == []
    assert late(first=15) == [(15, 20), (30, 40)]
    sought = Progress("50", 0, 0, gaps=(Gap("5", "20", "seek", 15),))
    assert late_spans(sought, Bounds("0", "60")) == []


def test_late_range_takes_its_part_out_of_the_gap() -> None:
    totals = Totals(commits=1, lost=1, skipped=15)
    head = Progress("50", 35, 3, gaps=upstream((5, 20)), totals=totals)
    lost = upstream((11, 12))
    done = Manifest("p", "t/0", "8", "14", 35, 5, 5, lost=lost)
    after = late_head(head, done, totals.plus(done, 1))
    assert (after.position, after.ordinal, after.epoch) == ("50", 40, 3)
    assert after.gaps == upstream((5, 8), (11, 12), (14, 20))
    assert (after.totals.skipped, after.totals.lost, after.totals.commits) == (10, 3, 2)
