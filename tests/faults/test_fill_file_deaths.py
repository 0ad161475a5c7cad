"""A backfill, promote or rollback of files may die after any call: no line is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_fill_deaths import dies
from tests.support.file_logs import Logs, lines, log_folder, text
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, promote, rollback
from tidelog.model import limits
from tidelog.model.archive import ArchiveFormat


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    with log_folder(tmp_path) as made:
        yield made


def deaths(calls: int) -> list[Any]:
    """Every call that may be the last; all but some of them in long runs only."""
    long = pytest.mark.long
    return [pytest.param(n, marks=long if n % 60 else ()) for n in range(1, calls)]


RUN, FILL, PROMOTE, ROLLBACK = 90, 150, 150, 300


def prepared(logs: Logs) -> None:
    """Three files: one was archived and deleted, one was rotated, and one is written to."""
    logs.path.write_text(text(0, 10))
    logs.create()
    logs.run()
    logs.rotate(100, 130)
    logs.run()
    Path(f"{logs.path}.1").unlink()
    logs.rotate(200, 205)
    logs.run()


ALL = (text(0, 10), text(100, 130), text(200, 205))


def test_work_that_dies_has_as_many_calls_as_are_tried(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(logs)
    begin_backfill(logs.home.context, "x", ArchiveFormat())
    assert not dies(logs.home, monkeypatch, FILL, lambda: logs.run(2))
    assert not dies(logs.home, monkeypatch, PROMOTE, lambda: promote(logs.home.context, "x"))
    logs.rotate(300, 305)
    logs.run()
    assert not dies(logs.home, monkeypatch, ROLLBACK, lambda: rollback(logs.home.context, "x"))
    logs.rotate(400, 405)
    assert not dies(logs.home, monkeypatch, RUN, logs.run)


@pytest.mark.parametrize("call", deaths(RUN))
def test_run_after_a_rotation_that_dies_after_any_call_is_finished_by_the_next(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(logs)
    logs.path.rename(f"{logs.path}.0")
    Path(f"{logs.path}.1").rename(f"{logs.path}.2")
    Path(f"{logs.path}.0").rename(f"{logs.path}.1")
    logs.path.write_text(text(300, 305))
    dies(logs.home, monkeypatch, call, logs.run)
    logs.run(take_over=True)
    logs.compress(Path(f"{logs.path}.2"))
    logs.run()
    assert logs.held() == lines(*ALL, text(300, 305))


@pytest.mark.parametrize("call", deaths(FILL))
def test_fill_of_files_that_dies_after_any_call_resumes(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(logs)
    begin_backfill(logs.home.context, "x", ArchiveFormat())
    dies(logs.home, monkeypatch, call, lambda: logs.run(2))
    logs.rotate(300, 305)
    logs.run()
    logs.run(2, take_over=True)
    promote(logs.home.context, "x")
    assert logs.held(2) == lines(*ALL, text(300, 305))


@pytest.mark.parametrize("call", deaths(PROMOTE))
def test_promote_of_files_that_dies_after_any_call_is_finished_by_the_next(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(logs)
    logs.build()
    dies(logs.home, monkeypatch, call, lambda: promote(logs.home.context, "x"))
    monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    logs.rotate(300, 305)
    logs.run(take_over=True)
    assert logs.held() == lines(*ALL, text(300, 305))
    if find_archive(logs.home.context, "x").generation == 1:
        promote(logs.home.context, "x")
    logs.rotate(400, 405)
    logs.run()
    assert logs.held(2) == lines(*ALL, text(300, 305), text(400, 405))


@pytest.mark.parametrize("call", deaths(ROLLBACK))
def test_rollback_of_files_that_dies_after_any_call_is_finished_by_the_next(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    prepared(logs)
    logs.replace()
    logs.rotate(300, 305)
    logs.run()
    dies(logs.home, monkeypatch, call, lambda: rollback(logs.home.context, "x"))
    monkeypatch.setattr(limits, "PROMOTION_MS", -1)
    logs.rotate(400, 405)
    logs.run(take_over=True)
    if find_archive(logs.home.context, "x").generation == 2:
        rollback(logs.home.context, "x")
    logs.run()
    assert find_archive(logs.home.context, "x").generation == 1
    assert logs.held(1) == lines(*ALL, text(300, 305), text(400, 405))
