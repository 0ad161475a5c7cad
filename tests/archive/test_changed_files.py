"""A driver reads files of an archive again that change under it, and reports no damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tidelog import Event, Home
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.audit import Why
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.erasure import delete_archived as archived
from tidelog.erasure.delete import delete_events
from tidelog.erasure.rewrite import PartitionRewriter, erase_from_archive
from tidelog.errors import CorruptError, UnavailableError
from tidelog.journal.amendment_writer import AmendmentWriter
from tidelog.log import topics
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.maintenance import erase as whole_erasure
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic
from tidelog.pipeline import tasks
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.testing.scheduler import Crash

LINES = {"mode": "events"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def before_the_first_task(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    """Call ``change`` when the first range is planned, before it is read."""
    run_task, done = tasks.run_task, []

    def changing(task: object) -> object:
        if not done:
            done.append(True)
            change()  # type: ignore[operator]
        return run_task(task)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks, "run_task", changing)


def chained(home: Home) -> tuple[Archive, Archive]:
    fill(home, range(1, 40))
    daily = an_archive(home, parser=AT)
    drive(home, daily)
    return daily, an_archive(home, "copy", "archive:daily")


def test_replay_during_a_read_of_its_archive_is_not_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)
    how = ReplayOptions(parser=AT_OR_WHEN)
    before_the_first_task(monkeypatch, lambda: replay(home.context, daily, how, LocalWorkers()))
    assert drive(home, copy) == 39


def test_erasure_during_a_read_of_its_archive_is_not_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)

    def erase() -> None:
        erase_from_archive(home.context, daily, 1, {"t/0": [5]})

    before_the_first_task(monkeypatch, erase)
    assert drive(home, copy) == 38


def test_sweep_finishes_an_erasure_that_died_though_its_topic_was_deleted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)
    with monkeypatch.context() as patch:
        patch.setattr(
            PartitionRewriter, "_count_row", _die
        )  # files are replaced, their range says nothing of it
        with pytest.raises(Crash):
            erase_from_archive(home.context, daily, 1, {"t/0": [5]})
    home.delete_topic("t", past_readers=True)
    with pytest.raises(UnavailableError, match="being changed by an erasure"):
        drive(home, copy)
    sweep_archives(home.context, 0)
    assert drive(home, copy) == 38
    assert verify_archive(home.context, daily, ArchiveVerifyOptions(deep=True)).problems == []


def check_erased(home: Home, raw: Archive) -> None:
    """Of the two events that an archive had, only the one that was not deleted is left."""
    assert b"stays-8" in held(home, raw)
    assert b"gone-7" not in held(home, raw)


def test_topic_takes_no_erasure_with_it(home: Home) -> None:
    """Its audit is deleted with it, so archives erase before that what was deleted."""
    raw = events_archive(home, "gone-7", "stays-8")
    home.delete("t", "gone-7")
    home.delete_topic("t")
    check_erased(home, raw)


def test_delete_that_returns_while_its_topic_is_deleted_reaches_archives(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns after the topic's delete has carried deletes, and before it closes heads."""
    raw = events_archive(home, "gone-7", "stays-8")
    after_the_first_look(monkeypatch, lambda: home.delete("t", "gone-7"))
    home.delete_topic("t")
    check_erased(home, raw)


def test_delete_of_trimmed_events_beside_a_delete_of_its_topic_reaches_archives(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after its record, when the heads are being closed: the record decides."""
    raw = events_archive(home, "gone-7", "stays-8")
    home.trim("t", ToOffsets({0: 2}))

    def delete() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(archived, "_enter", _die)
            with pytest.raises(Crash):
                delete_events(home.context, home.amender("t", Why("a test")), ["gone-7"])

    after_the_first_look(monkeypatch, delete)
    home.delete_topic("t")
    check_erased(home, raw)


@pytest.mark.parametrize(
    "step", ["_close_head", "_remove_objects", "_remove_audit", "_remove_rows", "remove_name"]
)
def test_delete_of_a_topic_that_dies_at_a_step_carries_deletes_when_repeated(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    raw = events_archive(home, "gone-7", "stays-8")
    with monkeypatch.context() as patch:
        patch.setattr(topics, step, _die)
        after_the_first_look(patch, lambda: home.delete("t", "gone-7"))
        with pytest.raises(Crash):
            home.delete_topic("t")
    home.delete_topic("t")
    check_erased(home, raw)


def test_event_of_a_delete_that_died_before_it_deleted_stays_in_archives(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = events_archive(home, "gone-7", "stays-8")
    with monkeypatch.context() as patch:
        patch.setattr(AmendmentWriter, "put", _die)
        with pytest.raises(Crash):
            home.delete("t", "gone-7")
    home.delete_topic("t")
    assert b"gone-7" in held(home, raw)


def after_the_first_look(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    """Call ``change`` after a delete of a topic has carried deletes the first time."""
    carry = whole_erasure.finish_deletes

    def changing(home: Home, topic: Topic) -> None:
        carry(home, topic)
        change()  # type: ignore[operator]

    monkeypatch.setattr(whole_erasure, "finish_deletes", changing)


def events_archive(home: Home, *ids: str) -> Archive:
    """An archive whose files show the ids of its events."""
    home.append("t", [Event(b"rubbish", id=each) for each in ids])
    raw = an_archive(home, "raw", format="jsonlines", codec="none", format_settings=LINES)
    drive(home, raw)
    return raw


def held(home: Home, archive: Archive) -> bytes:
    found = home.store.list(f"{archive.folder()}/")
    return b"".join(home.store.get(info.key) for info in found)


def _die(*_: object) -> None:
    raise Crash


def test_damaged_file_is_still_reported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    daily, copy = chained(home)
    folder = f"{read_archive(home.context, daily.name).folder()}/"
    key = next(info.key for info in home.store.list(folder) if info.key.endswith(".parquet"))
    before_the_first_task(monkeypatch, lambda: home.store.delete([key]))
    with pytest.raises(CorruptError, match="is not there"):
        drive(home, copy)
