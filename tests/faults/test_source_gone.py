"""Ranges that are under way when their source partition goes: committed, or withdrawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import AT, a_home, an_archive, drive, fill, value
from tidelog import Event, Home
from tidelog.archive.account import read_account
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.archive.sink import ArchiveSink
from tidelog.connectors.topic.source import TopicSource
from tidelog.coordination.pipeline_rows import read_intent, read_progress
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.maintenance import erase as whole_erasure
from tidelog.model.archive import Archive
from tidelog.pipeline.cycle import Cycle
from tidelog.testing.scheduler import Crash


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        yield made


def _die(*_: object, **__: object) -> None:
    raise Crash


def dies(home: Home, archive: Archive, target: type, step: str) -> None:
    """Run a driver that dies before a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, step, _die)
        with pytest.raises(Crash):
            drive(home, archive)


@pytest.mark.parametrize(
    ("target", "step"),
    [
        pytest.param(ArchiveSink, "publish", id="before-publish"),
        pytest.param(ArchiveSink, "discard", id="after-commit"),
        pytest.param(Cycle, "_finish", id="decided"),
    ],
)
def test_decided_range_is_committed_though_its_topic_is_gone(
    home: Home, target: type, step: str
) -> None:
    fill(home, range(1, 20))
    daily = an_archive(home, parser=AT)
    dies(home, daily, target, step)
    home.delete_topic("t", past_readers=True)
    with pytest.raises(NotFoundError, match="topic `t`: not found"):
        drive(home, daily)
    head = read_progress(home.context, daily.pipeline(1), "t/0")
    assert head is not None
    assert head.position == "19"
    assert verify_archive(home.context, daily, ArchiveVerifyOptions(deep=True)).problems == []
    assert archived(home, daily) == 19


def test_published_range_is_committed_though_its_topic_is_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are there, and the driver died before the commit."""
    fill(home, range(1, 20))
    daily = an_archive(home, parser=AT)
    publish = ArchiveSink.publish

    def dying(*args: object) -> None:
        publish(*args)  # type: ignore[arg-type]
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveSink, "publish", dying)
        with pytest.raises(Crash):
            drive(home, daily)
    home.delete_topic("t", past_readers=True)
    with pytest.raises(NotFoundError):
        drive(home, daily)
    assert verify_archive(home.context, daily, ArchiveVerifyOptions(deep=True)).problems == []
    assert archived(home, daily) == 19


def test_undecided_range_of_a_topic_that_is_gone_is_withdrawn(home: Home) -> None:
    fill(home, range(1, 20))
    daily = an_archive(home, parser=AT)
    dies(home, daily, Cycle, "_record")
    assert read_intent(home.context, daily.pipeline(1), "t/0") is not None
    home.delete_topic("t", past_readers=True)
    with pytest.raises(NotFoundError):
        drive(home, daily)
    assert read_intent(home.context, daily.pipeline(1), "t/0") is None
    assert archived(home, daily) == 0


def test_decided_range_is_committed_while_its_source_cannot_be_asked(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, range(1, 20))
    daily = an_archive(home, parser=AT)
    dies(home, daily, Cycle, "_finish")

    def unavailable(_: TopicSource) -> None:
        raise UnavailableError("source: cannot be reached: try again")

    with monkeypatch.context() as patch:
        patch.setattr(TopicSource, "partitions", unavailable)
        with pytest.raises(UnavailableError):
            drive(home, daily)
    assert archived(home, daily) == 19


def test_delete_of_a_topic_goes_on_once_its_archive_was_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decided range holds a deleted event: the driver commits it, the delete then erases it."""
    home.append("t", [Event(value(1), id="gone-7"), Event(value(2), id="stays-8")], partition=0)
    daily = an_archive(home, format="jsonlines", codec="none", format_settings={"mode": "events"})
    dies(home, daily, Cycle, "_finish")
    home.delete("t", "gone-7")
    with pytest.raises(
        UnavailableError, match="run `tidelog archive run daily`, then delete the topic again"
    ):
        home.delete_topic("t", past_readers=True)
    drive(home, daily)
    home.delete_topic("t")
    files = [home.store.get(info.key) for info in home.store.list(f"{daily.folder()}/")]
    assert b"stays-8" in b"".join(files)
    assert b"gone-7" not in b"".join(files)


def test_delete_of_a_topic_that_has_begun_goes_on_once_its_archive_was_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is deleted after the first look, so the topic's heads are closed by then."""
    home.append("t", [Event(value(1), id="gone-7"), Event(value(2), id="stays-8")], partition=0)
    daily = an_archive(home, format="jsonlines", codec="none", format_settings={"mode": "events"})
    dies(home, daily, Cycle, "_finish")
    with monkeypatch.context() as patch:
        patch.setattr(whole_erasure, "WAIT_MS", 0)
        patch.setattr(whole_erasure, "finish_deletes", lambda *_: home.delete("t", "gone-7"))
        with pytest.raises(
            UnavailableError, match="run `tidelog archive run daily`, then delete the topic again"
        ):
            home.delete_topic("t", past_readers=True)
    with pytest.raises(NotFoundError, match="is being deleted"):
        drive(home, daily)
    home.delete_topic("t")
    files = [home.store.get(info.key) for info in home.store.list(f"{daily.folder()}/")]
    assert b"stays-8" in b"".join(files)
    assert b"gone-7" not in b"".join(files)


def archived(home: Home, archive: Archive) -> int:
    """How many events the account shows, which must add up."""
    account = read_account(home.context, archive.pipeline(1), "t/0")
    assert account is not None
    assert account.adds_up
    return account.archived + account.dead
