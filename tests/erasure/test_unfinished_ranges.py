"""What an erasure says about ranges under way whose driver died: which command finishes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import ErasureWatch, Event, Home, UnavailableError
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.verify_remedies import intent_remedy
from tidelog.coordination.pipeline_rows import replay_pipeline
from tidelog.erasure import unfinished_ranges
from tidelog.erasure.unfinished_ranges import finish_remedy
from tidelog.maintenance import erase as whole_erasure
from tidelog.model.archive import Archive
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.local import LocalStore
from tidelog.testing.scheduler import Crash

REPLAY = "run `tidelog archive dead daily --replay`"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(unfinished_ranges, "_WAIT_S", 0)
    monkeypatch.setattr(whole_erasure, "WAIT_MS", 0)
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"no JSON", b"ada", "one"), Event(b"no JSON", b"bob", "two")])
        yield made


def dies(*_: object) -> None:
    raise Crash


def replay_that_dies(home: Home, archive: Archive, generation: int | None = None) -> None:
    how = ReplayOptions(generation, parser="timestamp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "copy", dies)
        with pytest.raises(Crash):
            replay(home.context, archive, how, LocalWorkers())


def dead_archive(home: Home, name: str = "daily", source: str = "topic:t") -> Archive:
    archive = an_archive(home, name, source=source, parser="json:at")
    drive(home, archive)
    return archive


@pytest.mark.parametrize("erased", ["daily", "raw"])
def test_erasure_says_that_a_replay_that_died_is_finished_by_another(
    home: Home, erased: str
) -> None:
    drive(home, an_archive(home, "raw"))
    archive = dead_archive(home, source="archive:raw")
    home.delete_topic("t")
    replay_that_dies(home, archive)
    done = home.archives.get(erased).erase("one", prove=False)
    assert done.is_waiting
    (left,) = (each for each in done.left if "under way" in each)
    assert left == (
        "archive `daily`: a range of generation 1 is under way that may hold such events: "
        f"{REPLAY}, then `tidelog archive erase {erased} --prove`"
    )
    home.archives.get("daily").replay()
    done = home.archives.get("raw").erase("one", prove=False)
    assert not done.is_waiting


def test_delete_of_a_topic_and_update_say_so_too(home: Home) -> None:
    archive = dead_archive(home)
    replay_that_dies(home, archive)
    with pytest.raises(UnavailableError, match=re.escape(REPLAY)):
        home.update("t", "one", b"{}", archives=True)
    home.delete("t", ["one"])
    with pytest.raises(UnavailableError, match=re.escape(REPLAY)):
        home.delete_topic("t")
    home.archives.get("daily").replay()
    home.delete_topic("t")


class _NoWait(ErasureWatch):
    """Fails the test if the erasure waits."""

    def waiting(self, archive: str) -> None:
        pytest.fail(f"waits for a range of archive `{archive}`")


def test_erasure_with_a_wait_of_0_does_not_wait(home: Home) -> None:
    drive(home, an_archive(home, "raw"))
    replay_that_dies(home, dead_archive(home, source="archive:raw"))
    assert not home.erase("t", ["one"], wait=0, watch=_NoWait()).is_erased
    deleted = home.delete("t", ["one"])
    assert not home.purge_and_prove(
        "t", ["one"], deleted=deleted, wait=0, watch=_NoWait()
    ).is_erased


def test_archive_erasure_with_a_wait_of_0_does_not_wait(home: Home) -> None:
    drive(home, an_archive(home, "raw"))
    archive = dead_archive(home, source="archive:raw")
    home.delete_topic("t")
    replay_that_dies(home, archive)
    assert not home.archives.get("raw").erase("two", wait=0, watch=_NoWait()).is_erased


def test_replay_of_a_generation_that_is_built_is_named_with_it(home: Home) -> None:
    dead_archive(home)
    home.archives.get("daily").backfill()
    info = home.archives.get("daily").info
    command = "`tidelog archive dead daily --generation 2 --replay`"
    assert finish_remedy(info, replay_pipeline(info.pipeline(2))) == f"run {command}"
    assert finish_remedy(info, replay_pipeline(info.pipeline(1))) == REPLAY
    assert finish_remedy(info, info.pipeline(1)) == "run `tidelog archive run daily`"
    assert "finish it with `tidelog archive backfill daily`" in finish_remedy(
        info, info.pipeline(2)
    )
    assert intent_remedy(info, 2, is_replay=True) == f"the next {command} finishes it"
    replay_that_dies(home, info, generation=2)
    home.delete("t", ["one"])
    (trace,) = (
        each for each in home.prove_erased("t", ids=["one"]).traces if "under way" in each.what
    )
    assert command in trace.do


def test_range_of_a_generation_that_is_kept_or_ended_needs_another_command(home: Home) -> None:
    dead_archive(home)
    daily = home.archives.get("daily")
    daily.backfill()
    daily.promote()
    info = daily.reload()
    assert "tidelog archive rollback daily" in finish_remedy(info, info.pipeline(1))
    daily.drop(1)
    assert finish_remedy(daily.reload(), info.pipeline(1)) == "run `tidelog sweep`"
    daily.delete()
    ended = home.archives.get("daily").info
    assert finish_remedy(ended, ended.pipeline(2)) == "run `tidelog archive delete daily`"
