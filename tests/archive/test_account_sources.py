"""The account adds up for every kind of source, also where the archive numbers events itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.connectors.kinesis.test_archive import an_archive, drive, put
from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS
from tests.support.kinesis_server import FakeKinesis, running_kinesis
from tidelog import Home
from tidelog.archive.account import read_account
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.coordination.pipeline_rows import read_listed
from tidelog.erasure.rewrite import erase_from_archive
from tidelog.errors import TidelogError
from tidelog.home import World, create_home
from tidelog.model.archive import Account, Archive
from tidelog.settings import Settings


@pytest.fixture
def fake() -> Iterator[FakeKinesis]:
    with running_kinesis() as service:
        yield service


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        yield made


def accounts(home: Home, archive: Archive) -> list[Account]:
    """What verify counts, which is what the rows say, without a problem."""
    found = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
    assert found.problems == []
    for each in found.accounts:
        assert each.adds_up, each.problem
        assert read_account(home.context, archive.pipeline(), each.partition) == each
    return found.accounts


def test_kinesis_is_numbered_by_the_archive(home: Home, fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    drive(home, archive)
    put(stream, range(10, 15))
    drive(home, archive)
    (found,) = accounts(home, archive)
    assert found.is_numbered
    assert (found.span, found.archived, found.absent) == (15, 15, 0)
    assert found.begin is not None
    assert found.begin.reason == "earliest"


def test_chain_of_a_numbered_archive_with_erased_events_adds_up(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    drive(home, archive)
    put(stream, range(10, 20))
    drive(home, archive)
    partition = f"{stream.name}/0"
    erase_from_archive(home.context, archive, 1, {partition: [3, 9, 12]})
    (found,) = accounts(home, archive)
    assert (found.span, found.archived, found.erased) == (20, 17, 3)
    chain = an_archive(home, "archive:a", name="b")
    drive(home, chain)
    (found,) = accounts(home, chain)
    assert (found.span, found.archived, found.erased) == (20, 17, 3)


def test_files_are_counted_by_row(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "one.txt").write_text("".join(f"line {n}\n" for n in range(20)))
    archive = an_archive(home, f"file:{folder}?format=lines")
    drive(home, archive)
    (folder / "two.txt").write_text("".join(f"line {n}\n" for n in range(5)))
    drive(home, archive, start="latest")
    found = accounts(home, archive)
    assert sorted(each.archived for each in found) == [5, 20]
    assert {each.begin.reason for each in found if each.begin} == {"earliest"}


def test_create_lists_what_it_can_beside_a_damaged_file(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"value": [b"%d" % n for n in range(20)]}), folder / "good.parquet")
    (folder / "bad.parquet").write_bytes(b"not a file of that format")
    archive = an_archive(home, f"file:{folder}?format=parquet")
    seen = read_listed(home.context, archive.pipeline())
    assert [name for name, each in seen.items() if each.end] == [
        name for name in seen if "good" in name
    ]
    with pytest.raises(TidelogError, match="bad"):
        drive(home, archive)
    found = verify_archive(home.context, archive, ArchiveVerifyOptions()).accounts
    assert [each.archived for each in found if "good" in each.partition] == [20]
