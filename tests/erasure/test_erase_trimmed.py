"""Erased events below the start, in a journal that holds the start: their bytes go too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.archive_look import AT, FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.coordination.audit import Why
from tidelog.erasure import rewrite as erase
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.proof import Proof
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.purge import purge_once
from tidelog.maintenance.turn import ArchiveEraser
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
    purge_once(home.context, home.topic("t"), grace_ms=0)
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
            purge_once(home.context, home.topic("t"), grace_ms=0)
    home.trim("t", ToOffsets({0: 5}))
    assert delete_events(home.context, home.amender("t", WHY), ["id-2"]).archived == 1
    purge_once(home.context, home.topic("t"), grace_ms=0)
    assert prove(home).traces == []


def test_trimmed_event_without_an_archive_is_proven_erased_after_a_compile(home: Home) -> None:
    home.trim("t", ToOffsets({0: 5}))
    assert delete_events(home.context, home.amender("t", WHY), ["id-2"]).missing == ("id-2",)
    (trace,) = [each for each in prove(home).traces if "/journals/" in each.object]
    assert "not compiled yet" in trace.what
    assert "tidelog compile t --amended" in trace.do
    purge_once(home.context, home.topic("t"), grace_ms=0)
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
