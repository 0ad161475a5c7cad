"""An archive is ended or deleted: drivers stop, nothing alarms, and erasures still reach files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.archive.test_archive import an_archive, fill
from tests.archive.test_fill import drive, home, keys, listed, live, trim
from tests.faults.test_fill_deaths import deaths, dies
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.archive import delete as ending
from tidelog.archive.archive import create_archive, find_archive, open_pipeline, removed_archives
from tidelog.archive.delete import delete_archive, end_archive
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.archive.metrics import metrics_text
from tidelog.archive.restore import RestoreOptions, restore
from tidelog.archive.status import Limits, read_status, troubles
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    change_archive,
    list_archives,
    read_intent,
    read_progress,
)
from tidelog.errors import (
    AlreadyExistsError,
    FencedError,
    InvalidError,
    NotFoundError,
    TidelogError,
)
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers

__all__ = ["home"]


def prepared(home: Home, count: int = 80, **settings: object) -> Archive:
    fill(home, count)
    archive = an_archive(home, "daily", parser="json:at", **settings)
    drive(home, archive)
    return archive


def wrong(home: Home, name: str = "daily") -> list[str]:
    return troubles(read_status(home.context, home.archives.get(name).info), Limits())


def is_settled(home: Home) -> bool:
    ended = home.archives.get("daily").info.ended
    return ended is not None and ended.settled


def test_ended_archive_keeps_its_files_and_takes_no_events(home: Home) -> None:
    archive = prepared(home)
    end_archive(home.context, "daily")
    end_archive(home.context, "daily")  # again
    fill(home, 10, first=80)
    ended = home.archives.get("daily").info
    assert ended.state_name == "ended"
    assert live(home) == Counter(range(80))
    for refused in (
        lambda: drive(home, ended),
        lambda: begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp")),
        lambda: promote(home.context, "daily"),
        lambda: rollback(home.context, "daily"),
    ):
        with pytest.raises(InvalidError, match="archive `daily`: was ended at 20"):
            refused()
    with pytest.raises(InvalidError, match="--delete-files"):
        drop_generation(home.context, "daily", archive.generation)
    assert wrong(home) == []
    assert "daily" not in metrics_text(home.context, list_archives(home.context))


def test_ended_archive_of_a_deleted_topic_is_healthy(home: Home) -> None:
    prepared(home)
    home.delete_topic("t")
    assert any("tidelog archive delete daily" in each for each in wrong(home))
    end_archive(home.context, "daily")
    assert wrong(home) == []
    sweep_archives(home.context, grace_ms=0)
    assert listed(home, home.archives.get("daily").info) == Counter(range(80))


def test_ended_archive_does_not_hold_a_trim_or_a_delete_of_its_topic(home: Home) -> None:
    fill(home, 20)
    an_archive(home, "daily", parser="json:at")
    with pytest.raises(InvalidError, match=r"remove one that .*`tidelog archive delete daily`"):
        home.delete_topic("t")
    end_archive(home.context, "daily")
    home.trim("t", ToOffsets({0: 20}))
    assert list(home.read("t", start=20)) == []
    home.delete_topic("t")


def test_range_under_way_is_settled_by_the_end(home: Home) -> None:
    """A decided range is committed; no erasure waits for it."""
    fill(home, 40)
    archive = an_archive(home, "daily", parser="json:at")
    pipeline = open_pipeline(home.context, archive, LocalWorkers())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    sink = pipeline.sink
    publish = type(sink).publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sink), "publish", die)
        with pytest.raises(KeyboardInterrupt):
            Driver(home.context, pipeline, DriverOptions()).run()
    assert publish is type(sink).publish
    assert read_intent(home.context, archive.pipeline(), "t/0") is not None
    end_archive(home.context, "daily")
    assert read_intent(home.context, archive.pipeline(), "t/0") is None
    assert live(home) == Counter(range(40))


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_running_driver_stops_with_one_clear_line(home: Home, idle: bool, whole: bool) -> None:
    archive = prepared(home)
    stop, cycles, told = threading.Event(), threading.Event(), []
    how = DriverOptions(follow=True, stop=stop, on_look=lambda _: cycles.set())

    def follow() -> None:
        try:
            Driver(home.context, open_pipeline(home.context, archive, LocalWorkers()), how).run()
        except TidelogError as exc:
            told.append(exc)

    thread = threading.Thread(target=follow)
    thread.start()
    until(cycles.is_set)
    (delete_archive if whole else end_archive)(home.context, "daily")
    if not idle:
        fill(home, 10, first=80)
    until(lambda: not thread.is_alive())
    assert [type(each) for each in told] == [FencedError]
    line = "generation 1 was removed" if whole else "was ended at"
    assert line in str(told[0])
    assert "stop this driver" in str(told[0])
    if not whole:
        assert live(home) == Counter(range(80))


def test_driver_that_slept_over_the_end_commits_nothing(home: Home) -> None:
    archive = prepared(home)
    slept = open_pipeline(home.context, archive, LocalWorkers())  # as it was before the end
    end_archive(home.context, "daily")
    fill(home, 10, first=80)
    with pytest.raises(FencedError, match="was ended"):
        Driver(home.context, slept, DriverOptions(take_over=True)).run()
    assert live(home) == Counter(range(80))
    head = read_progress(home.context, archive.pipeline(), "t/0")
    assert head is not None
    assert head.position == "80"


def test_erasure_and_proof_reach_the_files_of_an_ended_archive(home: Home) -> None:
    home.append("t", [Event(b'{"at": 1794700800, "n": 1}', id=f"e{n}") for n in range(20)])
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    end_archive(home.context, "daily")
    home.delete("t", ids=["e7"], why="test")
    assert not home.prove_erased("t", ids=["e7"]).is_erased
    purge(home.context, home.topic("t"), grace_ms=0)
    assert home.prove_erased("t", ids=["e7"]).is_erased
    assert sum(listed(home, archive).values()) == 19


def test_end_beside_an_erasure_loses_neither(home: Home) -> None:
    home.append("t", [Event(b'{"at": 1794700800, "n": 1}', id=f"e{n}") for n in range(60)])
    archive = an_archive(home, "daily", parser="json:at")
    drive(home, archive)
    for number in range(0, 60, 10):
        home.delete("t", ids=[f"e{number}"], why="test")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(purge, home.context, home.topic("t"), 0)
        two = pool.submit(end_archive, home.context, "daily")
        one.result(), two.result()
    assert is_settled(home)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert home.prove_erased("t", ids=[f"e{n}" for n in range(0, 60, 10)]).is_erased
    assert sum(listed(home, archive).values()) == 54


@pytest.mark.parametrize("work", [end_archive, delete_archive])
def test_two_at_once_do_it_once(home: Home, work: Callable[[Context, str], object]) -> None:
    prepared(home)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(work, home.context, "daily") for _ in range(2)]
        errors = [each.exception() for each in done]
    assert None in errors
    assert all(each is None or isinstance(each, NotFoundError) for each in errors)
    if work is end_archive:
        assert is_settled(home)
    else:
        assert keys(home, "archives/") == ["archives/daily/_owner"]


@pytest.mark.parametrize("call", deaths(60))
def test_end_that_dies_after_any_call_is_finished_by_a_sweep(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    archive = prepared(home)
    dies(home, monkeypatch, call, lambda: end_archive(home.context, "daily"))
    if home.archives.get("daily").info.ended is None:
        fill(home, 10, first=80)
        assert drive(home, archive, take_over=True) == 10, "nothing has changed"
        return
    if not is_settled(home):
        assert any("its end is not complete" in each for each in wrong(home))
    sweep_archives(home.context, grace_ms=0)
    assert is_settled(home)
    assert wrong(home) == []
    assert live(home) == Counter(range(80))


@pytest.mark.parametrize("call", deaths(120))
def test_delete_that_dies_after_any_call_is_finished_by_a_sweep(
    home: Home, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(home)
    with monkeypatch.context() as patch:
        patch.setattr(ending, "files_at", lambda context, _: context.store)
        dies(home, monkeypatch, call, lambda: delete_archive(home.context, "daily"))
    found = [each for each in list_archives(home.context) if each.name == "daily"]
    if found and (found[0].ended is None or not found[0].ended.removing):
        assert listed(home, found[0]) == Counter(range(80)), "it is whole until that is decided"
        delete_archive(home.context, "daily")
    elif found:
        with pytest.raises(NotFoundError, match="its files are being deleted: run `tidelog"):
            find_archive(home.context, "daily")
    sweep_archives(home.context, grace_ms=0)
    assert list(list_archives(home.context)) == []
    assert keys(home, "archives/") == ["archives/daily/_owner"]
    assert keys(home, "dead/") == keys(home, "staging/") == keys(home, "pipelines/") == []


def test_archive_of_the_same_name_gets_folders_of_its_own(home: Home) -> None:
    home.append("t", [Event(b"rubbish")])
    first = prepared(home, dead_share_max=1.0)
    with pytest.raises(AlreadyExistsError):
        an_archive(home, "daily", parser="json:at")
    end_archive(home.context, "daily")
    with pytest.raises(AlreadyExistsError, match=r"was ended.*--delete-files"):
        an_archive(home, "daily", parser="json:at")
    delete_archive(home.context, "daily")
    with pytest.raises(NotFoundError):
        delete_archive(home.context, "daily")
    again = an_archive(home, "daily", parser="json:at", dead_share_max=1.0)
    drive(home, again)
    assert again.root == "archives/daily~2"
    # A driver of the first one slept, and copies now.
    home.store.put("archives/daily/g1/t/dt=2026-11-15/1_0_0.parquet", b"late")
    home.store.put(f"{first.dead}/t/1_0_0.parquet", b"late")
    assert live(home) == Counter(range(80))
    sweep_archives(home.context, grace_ms=0)
    assert keys(home, "archives/daily/") == ["archives/daily/_owner"]
    assert keys(home, f"{first.dead}/") == []
    assert len(keys(home, f"{again.dead}/")) == 1
    assert live(home) == Counter(range(80))
    delete_archive(home.context, "daily")
    assert sorted(each.number for each in removed_archives(home.context)) == [1, 2]


def test_late_copy_of_a_deleted_archive_outside_is_in_the_proof(home: Home, tmp_path: Path) -> None:
    home.append("t", [Event(b'{"at": 1794700800, "who": "person-41"}', id="person-41-erased")])
    wanted = Archive(
        name="daily",
        incarnation=home.context.ids.new(),
        source="topic:t",
        kind="backup",
        store=f"file://{tmp_path}/else",
        root="daily",
        created_ms=0,
        formats={1: ArchiveFormat(format="jsonlines", codec="none")},
    )
    archive = create_archive(home.context, wanted)
    drive(home, archive)
    (file,) = (tmp_path / "else/daily/g1").rglob("1_*")
    data = file.read_bytes()
    delete_archive(home.context, "daily")
    home.delete("t", ids=["person-41-erased"], why="test")
    purge(home.context, home.topic("t"), grace_ms=0)
    assert home.prove_erased("t", ids=["person-41-erased"]).is_erased
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    assert not home.prove_erased("t", ids=["person-41-erased"]).is_erased
    sweep_archives(home.context, grace_ms=0)
    assert home.prove_erased("t", ids=["person-41-erased"]).is_erased


def test_files_that_others_are_made_from_are_not_deleted(home: Home) -> None:
    fill(home, 30)
    drive(home, an_archive(home, "daily"))
    made = an_archive(home, "second", "archive:daily")
    drive(home, made)
    with pytest.raises(InvalidError, match="archive `second` is made from it"):
        delete_archive(home.context, "daily")
    assert home.archives.get("daily").info.ended is None, "nothing has changed"
    end_archive(home.context, "daily")
    fill(home, 10, first=30)
    assert drive(home, made) == 0
    assert wrong(home, "second") == [], "a chain goes on reading what is there"
    home.create_topic("back", 1)
    restore(home.context, RestoreOptions("daily", "topic:back"), LocalWorkers())
    assert sum(1 for _ in home.read("back")) == 30, "an ended archive can be restored"
    delete_archive(home.context, "second")
    with pytest.raises(InvalidError, match=r"pipeline `restore.*reads it"):
        delete_archive(home.context, "daily")


def test_tables_of_iceberg_are_dropped_before_the_files(home: Home) -> None:
    prepared(home)
    table = "iceberg:sqlite:///lake.db#lake.daily"
    change_archive(
        home.context, "daily", lambda each: msgspec.structs.replace(each, tables=(table,))
    )
    with pytest.raises(InvalidError, match=r"--table lake.daily --forget`, and delete again"):
        delete_archive(home.context, "daily")
    assert live(home) == Counter(range(80))


def test_promote_under_way_is_withdrawn_by_the_end(home: Home) -> None:
    prepared(home)
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat(parser="timestamp"))
    drive(home, built, generation)
    end_archive(home.context, "daily")
    with pytest.raises(InvalidError):
        promote(home.context, "daily")
    assert home.archives.get("daily").info.generation == 1
    drop_generation(home.context, "daily", generation, force=True)
    trim(home, 80)
    assert live(home) == Counter(range(80))
