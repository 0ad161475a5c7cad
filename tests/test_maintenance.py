"""A home's own calls maintain all of it: topics, archives and pipelines, as the commands do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.pipeline.looking import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.errors import CorruptError
from tidelog.journal.policy import Policy
from tidelog.journal.scribe import Scribing
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.pipeline.account import read_account
from tidelog.pipeline.archive import committed_files

EAGER = Scribing(policy=Policy.everything(), grace_ms=0, sweep_every_ms=0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"secret %d" % n, id=f"e{n}") for n in range(10)])
        yield made


def leftovers(home: Home, archive: Archive) -> str:
    """What an attempt of an earlier driver has staged."""
    key = f"{layout.staging(archive.pipeline(), 0, home.log.ids.new())}/0"
    home.store.put(key, b"half a file")
    return key


def holds(home: Home, archive: Archive, text: bytes) -> bool:
    """Whether a data file of an archive has these bytes among its values."""
    for _, file in committed_files(home, archive):
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
    account = read_account(home.log, archive.pipeline(), "t/0")
    assert account is not None
    assert (account.erased, account.adds_up) == (1, True)


def test_error_of_an_archive_is_a_trouble_of_the_turn(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    home.delete("t", ["e3"], why="asked")
    (file,) = [file for _, file in committed_files(home, archive)]
    home.store.delete([file.target])
    home.store.put(file.target, b"damaged")
    turn = home.scribe_once(EAGER)
    assert turn is not None
    assert [type(each.error) for each in turn.troubles] == [CorruptError]
    assert turn.swept is not None
