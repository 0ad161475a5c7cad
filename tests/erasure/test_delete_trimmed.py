"""Erased events below the start, in a journal that holds the start: their bytes go too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.archive_look import AT, FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation
from tidelog.coordination.audit import Why
from tidelog.erasure import rewrite as erase
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.event_search import FileSearch, matcher_of, search_generation
from tidelog.erasure.proof import Proof
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model.archive import ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash

WHY = Why("ada", "asked for")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        values = [b'{"at": %d}' % (FIRST_S + number) for number in range(10)]
        events = [Event(each, key=b"k%d" % n, id=f"id-{n}") for n, each in enumerate(values)]
        made.append("t", events, partition=0)
        compile_topic(made.context, made.topic("t"), CompilePolicy.everything())
        yield made


def prove(home: Home) -> Proof:
    return home.prove_erased("t", ids=["id-2"])


def offsets(home: Home) -> list[int | None]:
    return [event.offset for event in home.read("t", 0, 5)]


@pytest.mark.parametrize("by", ["id", "key"])
def test_trimmed_event_is_erased_from_the_journal_that_holds_the_start(home: Home, by: str) -> None:
    drive(home, an_archive(home, parser=AT))
    home.trim("t", ToOffsets({0: 5}))
    if by == "id":
        assert delete_events(home.context, home.amender("t", WHY), ["id-2"]).archived == 1
    else:
        assert delete_key(home.context, home.amender("t", WHY), b"k2").archived == 1
    assert not prove(home).is_erased
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home).traces == []
    assert offsets(home) == [5, 6, 7, 8, 9]


def test_trimmed_event_is_found_in_a_file_that_an_erasure_has_half_changed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(home, an_archive(home, parser=AT))
    home.delete("t", ["id-7"], why="asked for")
    with monkeypatch.context() as patch:  # files are replaced, no row is
        patch.setattr(erase.PartitionRewriter, "_count_row", Mock(side_effect=Crash))
        with pytest.raises(Crash):
            purge(home.context, home.topic("t"), grace_ms=0)
    home.trim("t", ToOffsets({0: 5}))
    assert delete_events(home.context, home.amender("t", WHY), ["id-2"]).archived == 1
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home).traces == []


def test_delete_finds_nothing_in_a_generation_that_a_killed_drop_was_deleting(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    drive(home, archive)
    archive, number = begin_backfill(home.context, archive.name, ArchiveFormat(parser=AT))
    pipeline = open_pipeline(home.context, archive, LocalWorkers(1), number)
    Driver(home.context, pipeline, DriverOptions()).run()
    search = partial(search_generation, home.context, archive, number, {"t/0": None})
    sought = matcher_of(["id-2"], None)
    assert len(search(FileSearch(sought))) == 1
    call, left = 0, list(home.store.list(f"{archive.folder(number)}/"))
    while left:
        call += 1
        faults = Faults(crash_after_call=call)
        dying = replace(
            home.context,
            store=FaultyStore(home.store, faults),
            catalog=FaultyCatalog(home.catalog, faults),
        )
        with suppress(Crash):
            drop_generation(dying, archive.name, number, force=True)
        left = list(home.store.list(f"{archive.folder(number)}/"))
        assert len(search(FileSearch(sought))) == (1 if left else 0)
    drop_generation(home.context, archive.name, number, force=True)
    assert search(FileSearch(sought)) == {}


def test_trimmed_event_without_an_archive_is_proven_erased_after_a_compile(home: Home) -> None:
    home.trim("t", ToOffsets({0: 5}))
    assert delete_events(home.context, home.amender("t", WHY), ["id-2"]).missing == ("id-2",)
    (trace,) = [each for each in prove(home).traces if "/journals/" in each.object]
    assert "not compiled yet" in trace.what
    assert "tidelog compile t --amended" in trace.do
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home).traces == []


@pytest.mark.parametrize("first", ["trim", "delete"])
def test_scribe_compiles_journals_with_erased_events_below_the_start(
    home: Home, first: str
) -> None:
    drive(home, an_archive(home, parser=AT))
    eraser = ArchiveEraser(home.context)
    if first == "delete":  # its row goes with the trim, so that no compile is due
        delete_events(home.context, home.amender("t", WHY), ["id-2"])
        eraser.turn()
    home.trim("t", ToOffsets({0: 5}))
    if first == "trim":
        delete_events(home.context, home.amender("t", WHY), ["id-2"])
    eraser.turn()
    assert eraser.troubles == []
    sweep_home(home.context, 0)
    assert prove(home).traces == []
    objects = [info.key for info in home.store.list("topics/")]
    eraser.turn()
    assert [info.key for info in home.store.list("topics/")] == objects, "compiled once"
