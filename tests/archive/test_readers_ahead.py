"""Readers that are ahead of the archive they read: they wait for it, whatever a person accepts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tidelog import ArchiveHandle, Event, Home, PumpHandle
from tidelog.archive import generations
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import SourcePartition
from tidelog.errors import UnavailableError
from tidelog.home import World, create_home
from tidelog.model.pipeline import Progress
from tidelog.pipeline.driver import Driver
from tidelog.pipeline.gaps import RemadeError, remade_bounds
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t")
        yield made


def append(home: Home, start: int, end: int) -> None:
    home.append("t", [Event(b"%d" % each, id=f"e{each}") for each in range(start, end)])


def chain_ahead(home: Home, source: str) -> None:
    """Archive `chain` has 12 events, and `mid`, which it reads, has 5 of them."""
    for name, reads in (("raw", "topic:t"), ("mid", "topic:t"), ("chain", "archive:mid")):
        home.archives.create(name, source=reads)
    append(home, 0, 5)
    home.archives.get("mid").run()
    home.archives.get("chain").run()
    append(home, 5, 12)
    home.archives.get("raw").run()
    home.archives.get("chain").backfill(source=source)
    home.archives.get("chain").promote()


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promote cannot read the source, so it does not bring the rest."""

    def fail(_: Driver) -> int:
        raise UnavailableError("the source does not respond")

    class Unable(Driver):
        run = fail

    monkeypatch.setattr(generations, "Driver", Unable)


def go_back(day: ArchiveHandle, reader: ArchiveHandle | PumpHandle, home: Home) -> None:
    """A reader has 12 events of an archive; then a generation with 5 of them is promoted."""
    append(home, 0, 5)
    day.run()
    day.backfill()
    append(home, 5, 12)
    day.run()
    assert reader.run().events == 12
    day.promote(force=True)
    assert day.status().partitions[0].position == "5"


def values(archive: ArchiveHandle) -> list[bytes]:
    return [value for batch in archive.read() for value in batch.column("value").to_pylist()]


@pytest.mark.parametrize("source", ["archive:raw", "topic:t"])
@pytest.mark.parametrize("accept_loss", [False, True])
def test_archive_waits_until_its_source_has_reached_it(
    home: Home, source: str, accept_loss: bool
) -> None:
    chain_ahead(home, source)
    mid, chain = home.archives.get("mid"), home.archives.get("chain")
    for _ in range(2):
        assert chain.run(accept_loss=accept_loss).events == 0
    (status,) = chain.status().partitions
    assert (status.position, status.end, status.ahead) == ("12", "5", 7)
    assert (status.remade, status.ended, status.failure, status.waits) == ("", "", None, False)
    assert chain.check() == []
    report = chain.verify(source=True, deep=True)
    assert report.problems == []
    assert [each.what for each in report.notes if each.kind == "behind"] == [
        "`archive:mid` ends at 5, and 12 is committed"
    ]
    append(home, 12, 15)
    mid.run()
    assert chain.run().events == 3
    assert chain.status().partitions[0].ahead == 0
    assert values(chain) == [b"%d" % each for each in range(15)]
    assert not [each for each in chain.verify(source=True).notes if each.kind == "behind"]


@pytest.mark.parametrize("accept_loss", [False, True])
def test_backfill_is_not_ended_by_a_source_that_caught_up(home: Home, accept_loss: bool) -> None:
    mid = home.archives.create("mid", source="topic:t")
    chain = home.archives.create("chain", source="archive:mid")
    append(home, 0, 5)
    mid.run()
    chain.run()
    append(home, 5, 12)
    assert chain.backfill(source="topic:t").events == 12
    mid.run()  # so a backfill that begins now would read no further than 5
    assert chain.backfill(source="topic:t", accept_loss=accept_loss).events == 0
    chain.promote()
    append(home, 12, 15)
    mid.run()
    assert chain.run().events == 3
    assert values(chain) == [b"%d" % each for each in range(15)]


@pytest.mark.usefixtures("outage")
def test_archive_waits_after_a_forced_promote_of_its_source(home: Home) -> None:
    day = home.archives.create("day", source="topic:t")
    chain = home.archives.create("chain", source="archive:day")
    go_back(day, chain, home)
    assert chain.run(accept_loss=True).events == 0
    append(home, 12, 15)
    assert day.run().events == 10
    assert chain.run().events == 3
    assert values(chain) == [b"%d" % each for each in range(15)]


@pytest.mark.usefixtures("outage")
def test_pump_waits_until_the_archive_has_reached_it(home: Home) -> None:
    day = home.archives.create("day", source="topic:t")
    home.create_topic("copy")
    pump = home.pumps.create("p", source="archive:day", topic="copy")
    go_back(day, pump, home)
    assert pump.run(accept_loss=True).events == 0
    append(home, 12, 15)
    assert day.run().events == 10
    assert pump.run().events == 3
    assert [each.value for each in home.read("copy")] == [b"%d" % each for each in range(15)]


@pytest.mark.parametrize("accept_loss", [False, True])
def test_restore_of_a_generation_that_is_behind_adds_nothing(home: Home, accept_loss: bool) -> None:
    day = home.archives.create("day", source="topic:t")
    append(home, 0, 10)
    day.run()
    day.backfill()
    day.promote()
    append(home, 10, 20)
    day.run()
    home.create_topic("back")
    assert day.restore(to="topic:back").events == 20
    assert day.restore(to="topic:back", generation=1, accept_loss=accept_loss).events == 0
    append(home, 20, 30)
    day.run()
    assert day.restore(to="topic:back").events == 10
    assert sum(1 for _ in home.read("back")) == 30


def test_restore_of_files_without_incarnation_waits_too(home: Home, tmp_path: Path) -> None:
    """Files of a folder do not name a topic, but a restore belongs to one archive."""
    raw = home.archives.create("raw", source="topic:t")
    append(home, 0, 5)
    raw.run()
    files, copy = tmp_path / "o" / raw.info.folder(), tmp_path / "copy"
    shutil.copytree(files, copy)
    day = home.archives.create("day", source=f"file:{copy}")
    day.run()
    day.backfill()
    day.promote()
    append(home, 5, 12)
    raw.run()
    shutil.copytree(files, copy, dirs_exist_ok=True)
    assert day.run().events == 7
    home.create_topic("back")
    assert day.restore(to="topic:back").events == 12
    assert day.restore(to="topic:back", generation=1).events == 0


@pytest.mark.parametrize("known", [("old", "new"), ("", ""), ("", "new"), ("old", "")])
def test_archive_of_another_or_unknown_incarnation_is_not_waited_for(
    home: Home, known: tuple[str, str]
) -> None:
    chain_ahead(home, "topic:t")
    source, partition = source_at(home.context, "archive:mid"), SourcePartition("t", "0")
    (bounds,) = source.bounds([partition]).values()
    assert bounds.may_be_behind
    was, now = known
    bounds = replace(bounds, incarnation=now, may_be_behind=bool(now))
    source.bounds = lambda partitions: {partition: bounds}  # type: ignore[method-assign]
    head = Progress("12", 12, 1, incarnation=was)
    with pytest.raises(RemadeError, match="was deleted and made again"):
        remade_bounds(partition, head, bounds, source, accept_loss=False)
