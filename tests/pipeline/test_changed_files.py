"""A driver reads files of an archive again that change under it, and reports no damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.looking import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tidelog import Event, Home
from tidelog.errors import CorruptError, UnavailableError
from tidelog.log.archives import read_archive
from tidelog.model.archive import Archive
from tidelog.pipeline import workers
from tidelog.pipeline.erase import _Lane, erase_from_archive
from tidelog.pipeline.replay import Replaying, replay
from tidelog.pipeline.sweep import sweep_archives
from tidelog.pipeline.verify import Verifying, verify_archive
from tidelog.pipeline.workers import LocalWorkers
from tidelog.testing.scheduler import Crash

LINES = {"mode": "events"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def before_the_first_task(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    """Call ``change`` when the first range is planned, before it is read."""
    run_task, done = workers.run_task, []

    def changing(task: object) -> object:
        if not done:
            done.append(True)
            change()  # type: ignore[operator]
        return run_task(task)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "run_task", changing)


def chained(home: Home) -> tuple[Archive, Archive]:
    fill(home, range(1, 40))
    daily = an_archive(home, parser=AT)
    drive(home, daily)
    return daily, an_archive(home, "copy", "archive:daily")


def test_replay_during_a_read_of_its_archive_is_no_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)
    how = Replaying(parser=AT_OR_WHEN)
    before_the_first_task(monkeypatch, lambda: replay(home, daily, how, LocalWorkers()))
    assert drive(home, copy) == 39


def test_erasure_during_a_read_of_its_archive_is_no_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)

    def erase() -> None:
        erase_from_archive(home, daily, 1, {"t/0": [5]})

    before_the_first_task(monkeypatch, erase)
    assert drive(home, copy) == 38


def test_sweep_finishes_an_erasure_that_died_though_its_topic_is_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily, copy = chained(home)
    with monkeypatch.context() as patch:
        patch.setattr(_Lane, "_counted", _die)  # files are replaced, their range says nothing of it
        with pytest.raises(Crash):
            erase_from_archive(home, daily, 1, {"t/0": [5]})
    home.delete_topic("t", past_readers=True)
    with pytest.raises(UnavailableError, match="being changed by an erasure"):
        drive(home, copy)
    sweep_archives(home, 0)
    assert drive(home, copy) == 38
    assert verify_archive(home, daily, Verifying(deep=True)).problems == []


def test_topic_takes_no_erasure_with_it(home: Home) -> None:
    """Its audit is deleted with it, so archives erase before that what was deleted."""
    home.append("t", [Event(b"rubbish 1", id="gone-7"), Event(b"rubbish 2", id="stays-8")])
    raw = an_archive(home, "raw", format="jsonlines", codec="none", format_settings=LINES)
    drive(home, raw)
    home.delete("t", "gone-7")
    home.delete_topic("t")
    held = b"".join(home.store.get(info.key) for info in home.store.list(f"{raw.folder()}/"))
    assert b"stays-8" in held
    assert b"gone-7" not in held


def _die(*_: object) -> None:
    raise Crash


def test_damaged_file_is_still_reported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    daily, copy = chained(home)
    folder = f"{read_archive(home.log, daily.name).folder()}/"
    key = next(info.key for info in home.store.list(folder) if info.key.endswith(".parquet"))
    before_the_first_task(monkeypatch, lambda: home.store.delete([key]))
    with pytest.raises(CorruptError, match="is not there"):
        drive(home, copy)
