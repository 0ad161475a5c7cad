"""A home's own calls maintain all of it: topics, archives and pipelines, as the commands do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.account import read_account
from tidelog.archive.archive import committed_files
from tidelog.errors import CorruptError, InternalError, TidelogError, contained
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.scribe import ScribeOptions
from tidelog.model import layout
from tidelog.model.archive import Archive

EAGER = ScribeOptions(policy=CompilePolicy.everything(), grace_ms=0, sweep_every_ms=0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"secret %d" % n, id=f"e{n}") for n in range(10)])
        yield made


def leftovers(home: Home, archive: Archive) -> str:
    """What an attempt of an earlier driver has staged."""
    key = f"{layout.staging(archive.pipeline(), 't/0', 0, home.context.ids.new())}/0"
    home.store.put(key, b"half a file")
    return key


def holds(home: Home, archive: Archive, text: bytes) -> bool:
    """Whether a data file of an archive has these bytes among its values."""
    for _, file in committed_files(home.context, archive):
        values = pq.read_table(home.store.url.removeprefix("file://") + "/" + file.target)
        if text in values.column("value").to_pylist():
            return True
    return False


def test_sweep_of_a_home_covers_archives(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    key = leftovers(home, archive)
    report = home.sweep(0)
    assert key not in {info.key for info in home.store.list("staging/")}
    assert report.objects_deleted >= 1
    assert report.pipelines >= 1


def test_scribe_turn_of_a_home_covers_archives(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    key = leftovers(home, archive)
    home.delete("t", ["e3"], why="asked")
    assert holds(home, archive, b"secret 3")
    turn = home.scribe_once(EAGER)
    assert turn is not None
    assert (turn.erased, turn.troubles) == (1, ())
    assert not holds(home, archive, b"secret 3")
    assert key not in {info.key for info in home.store.list("staging/")}
    account = read_account(home.context, archive.pipeline(), "t/0")
    assert account is not None
    assert (account.erased, account.adds_up) == (1, True)


def test_error_of_an_archive_is_a_trouble_of_the_turn(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    home.delete("t", ["e3"], why="asked")
    (file,) = [file for _, file in committed_files(home.context, archive)]
    home.store.delete([file.target])
    home.store.put(file.target, b"damaged")
    turn = home.scribe_once(EAGER)
    assert turn is not None
    assert [type(each.error) for each in turn.troubles] == [CorruptError]
    assert turn.swept is not None


@pytest.mark.parametrize(
    "broken",
    [
        "tidelog.erasure.rewrite.erase_from_archive",
        "tidelog.maintenance.turn.finish_archive",
        "tidelog.maintenance.pipeline_sweep._sweep_archive",
    ],
)
def test_foreign_exception_of_an_archive_does_not_stop_the_others(
    home: Home, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    archives = [an_archive(home, name) for name in ("a", "b")]
    for archive in archives:
        drive(home, archive)
    key = leftovers(home, archives[1])
    home.delete("t", ["e3"], why="asked")
    fail_for(monkeypatch, broken, "a")
    turn = home.scribe_once(EAGER)
    assert turn is not None
    assert [type(each.error) for each in turn.troubles] == [InternalError]
    assert "archive `a`: unexpected OverflowError" in str(turn.troubles[0].error)
    assert not holds(home, archives[1], b"secret 3")
    assert key not in {info.key for info in home.store.list("staging/")}


@pytest.mark.parametrize(
    "broken",
    ["tidelog.maintenance.turn.settled_offsets", "tidelog.journal.scribe.compile_partition"],
)
def test_foreign_exception_of_a_topic_does_not_stop_the_others(
    home: Home, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    home.create_topic("bad", 1)
    home.append("bad", [Event(b"x", id="one")])
    archive = an_archive(home)
    drive(home, archive)
    home.delete("bad", ["one"], why="asked")
    home.delete("t", ["e3"], why="asked")
    fail_for(monkeypatch, broken, "bad")
    turn = home.scribe_once(EAGER)
    assert turn is not None
    assert [type(each.error) for each in turn.troubles] == [InternalError]
    assert "topic `bad`" in str(turn.troubles[0].error)
    assert not holds(home, archive, b"secret 3")


def fail_for(monkeypatch: pytest.MonkeyPatch, broken: str, name: str) -> None:
    """Let a function raise what is no error of Tidelog, for the topic or archive of a name."""
    module, _, function = broken.rpartition(".")
    whole = getattr(importlib.import_module(module), function)

    def failing(first: Any, second: Any, *rest: Any) -> Any:
        if second.name == name:
            raise OverflowError("date value out of range")
        return whole(first, second, *rest)

    monkeypatch.setattr(broken, failing)


def test_contained_reports_every_exception_and_no_end_of_the_process() -> None:
    errors: list[TidelogError] = []
    for exc in (OverflowError("x"), CorruptError("object `y`: z"), OSError("full")):
        with contained("part `a`", errors.append):
            raise exc
    assert [each.kind for each in errors] == ["internal", "corrupt", "unavailable"]
    with pytest.raises(KeyboardInterrupt), contained("part `a`", errors.append):
        raise KeyboardInterrupt
