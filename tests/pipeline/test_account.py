"""Every offset of a source partition is accounted for, from a recorded beginning."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.fakes import LinesSink, ListSource
from tests.pipeline.looking import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tidelog import Event, Home
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.errors import UnavailableError, UnknownOutcomeError
from tidelog.log.archives import read_manifests, read_progress
from tidelog.log.base import Log, LogSettings
from tidelog.log.trim import ToOffsets
from tidelog.model.account import Account
from tidelog.model.archive import Archive
from tidelog.model.pipeline import Begin, Gap, Manifest
from tidelog.pipeline.account import read_account
from tidelog.pipeline.base import Pipeline
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.erase import erase_from_archives
from tidelog.pipeline.replay import Replaying, replay
from tidelog.pipeline.workers import LocalWorkers
from tidelog.sources.base import SourcePartition
from tidelog.store.memory import MemoryStore

T0 = SourcePartition("t", "0")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        fill(made, range(100))
        yield made


@pytest.fixture
def log() -> Log:
    return Log(
        MemoryStore(SystemClock()),
        MemoryCatalog(),
        SystemClock(),
        RandomIds(),
        random.Random(1),
        LogSettings(lease_ttl_ms=300),
    )


def account(home: Home, archive: Archive, partition: str = "t/0") -> Account:
    found = read_account(home.log, archive.pipeline(), partition)
    assert found is not None
    assert found.adds_up, found.problem
    return found


def range_sum(manifest: Manifest) -> int:
    """What a manifest counts, in all."""
    files = sum(file.events + file.erased for file in manifest.files if file.kind != "sidecar")
    skipped = sum(gap.offsets for gap in manifest.lost)
    return files + manifest.dropped + manifest.deleted + manifest.absent + skipped


def drive_list(log: Log, source: ListSource, **how: object) -> int:
    pipeline = Pipeline("a", "inc", source, LinesSink(log.store), LocalWorkers(2))
    return Driver(log, pipeline, Driving(**how)).run()  # type: ignore[arg-type]


def appear(source: ListSource, name: str, count: int) -> SourcePartition:
    """A partition that the source did not have before."""
    partition = SourcePartition("t", name)
    source.events[partition] = {n: f"{name}:{n}" for n in range(count)}
    source.ends[partition], source.firsts[partition] = count, 0
    return partition


def test_partition_that_appears_later_begins_at_its_first_event(log: Log) -> None:
    source = ListSource(1, 60)
    assert drive_list(log, source, start="latest") == 0
    later = appear(source, "1", 100)
    assert drive_list(log, source, start="latest") == 100
    head = read_progress(log, "inc", later.text)
    assert head is not None
    assert head.begin is not None
    assert (head.begin.position, head.begin.reason) == ("0", "earliest")
    first = read_progress(log, "inc", "t/0")
    assert first is not None
    assert first.begin is not None
    assert (first.begin.position, first.begin.reason) == ("60", "latest")


def test_partition_that_appears_while_a_driver_follows_begins_at_its_first_event(log: Log) -> None:
    source = ListSource(1, 60)
    pipeline = Pipeline("a", "inc", source, LinesSink(log.store), LocalWorkers(2))
    driver = Driver(log, pipeline, Driving(start="latest"))
    assert driver.run() == 0
    appear(source, "1", 100)
    assert driver.run() == 100


def test_latest_means_the_ends_that_create_saw(home: Home) -> None:
    archive = an_archive(home, "daily")
    fill(home, range(100, 120))
    assert drive(home, archive, start="latest") == 20
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("100", "latest")
    assert (found.span, found.archived) == (20, 20)


def test_topic_made_again_since_create_begins_at_its_first_event(home: Home) -> None:
    archive = an_archive(home, "daily")
    home.delete_topic("t", past_readers=True)
    home.create_topic("t", 2)
    fill(home, range(30))
    assert drive(home, archive, start="latest") == 30
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("0", "earliest")


def test_begin_behind_a_trim_is_told_apart_from_the_first_event(home: Home) -> None:
    home.trim("t", ToOffsets({0: 40}))
    archive = an_archive(home, "daily")
    drive(home, archive)
    found = account(home, archive)
    assert found.begin is not None
    assert (found.begin.position, found.begin.reason) == ("40", "retention")
    assert (found.span, found.archived) == (60, 60)


def test_accepted_loss_is_a_gap_with_its_reason(home: Home) -> None:
    archive = an_archive(home, "daily")
    drive(home, archive)
    fill(home, range(100, 150))
    home.trim("t", ToOffsets({0: 130}), past_readers=True)
    drive(home, archive, accept_loss=True)
    found = account(home, archive)
    assert found.gaps == (Gap("100", "130", "retention", 30),)
    assert (found.span, found.archived, found.skipped) == (150, 120, 30)
    for manifest in read_manifests(home.log, archive.pipeline(), "t/0"):
        assert range_sum(manifest) == int(manifest.end) - int(manifest.start)


def test_events_deleted_before_they_were_read_count_as_erased(home: Home) -> None:
    home.append("t", [Event(b"x", id=name) for name in ("a", "b", "c")], partition=0)
    home.delete("t", ["a", "c"], why="asked")
    archive = an_archive(home, "daily")
    drive(home, archive)
    found = account(home, archive)
    assert (found.span, found.archived, found.erased, found.absent) == (103, 101, 2, 0)


def test_offsets_without_events_count_as_never_there(log: Log) -> None:
    source = ListSource(1, 70)
    drive_list(log, source)
    found = read_account(log, "inc", "t/0")
    assert found is not None
    assert found.adds_up, found.problem
    assert (found.span, found.archived, found.absent) == (70, 60, 10)


def test_erasures_and_replays_keep_the_sums_right(home: Home) -> None:
    archive = an_archive(home, "daily", parser=AT)
    drive(home, archive)
    before = account(home, archive)
    assert before.dead
    topic = home.topic("t")
    erase_from_archives(home, topic, {0: [1, 50, 99]})
    erased = account(home, archive)
    assert erased.erased == 3
    replay(home, archive, Replaying(parser=AT_OR_WHEN), LocalWorkers(1))
    replayed = account(home, archive)
    assert (replayed.erased, replayed.dead, replayed.archived) == (3, 15, 82)
    erase_from_archives(home, topic, {0: [1, 50, 51, 98, 99]})
    again = account(home, archive)
    assert (again.erased, again.dead, again.archived) == (5, 14, 81), "51 is data now, 98 is dead"


def test_chain_carries_gaps_of_its_archive(home: Home) -> None:
    first = an_archive(home, "first")
    drive(home, first)
    fill(home, range(100, 150))
    home.trim("t", ToOffsets({0: 130}), past_readers=True)
    drive(home, first, accept_loss=True)
    erase_from_archives(home, home.topic("t"), {0: [3, 140]})
    second = an_archive(home, "second", source="archive:first")
    drive(home, second)
    found = account(home, second)
    assert found.gaps == (Gap("100", "130", "upstream", 30),)
    assert (found.span, found.archived, found.erased, found.absent) == (150, 118, 2, 0)


class DeafCatalog(MemoryCatalog):
    """A catalog that never writes a head, and whose replies are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, partition: str, *changes: object, write_id: str) -> None:
        if any(getattr(change, "row", "") == "head" for change in changes):
            self.writes += 1
            raise UnknownOutcomeError("the reply was lost")
        super().write(partition, *changes, write_id=write_id)  # type: ignore[arg-type]


def test_adoption_ends_when_replies_stay_lost(log: Log) -> None:
    deaf = DeafCatalog()
    slept: list[float] = []

    class Sleepless(SystemClock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    log = Log(log.store, deaf, Sleepless(), log.ids, log.random, log.settings)
    pipeline = Pipeline("a", "inc", ListSource(1, 10), LinesSink(log.store), LocalWorkers(1))
    with pytest.raises(UnavailableError, match="replies stay lost"):
        Cycle(log, pipeline, 1).adopt(T0, Begin("0", "earliest"))
    assert deaf.writes <= 20
    assert sum(slept) > 1
