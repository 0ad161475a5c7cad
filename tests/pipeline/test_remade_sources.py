"""A Kinesis stream or a Scylla table that is deleted and created again is another sequence.

No archive mixes the two: the first one ends, a new archive accounts for the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.kinesis.test_archive import an_archive, counted, put
from tests.connectors.kinesis.test_source import Stream
from tests.servers.cassandra import Cassandra
from tests.servers.moto import KEYS, Moto
from tests.servers.scylla_play import BASE, Play, Row
from tests.support.waiting import until
from tidelog import Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.kinesis.client import Kinesis
from tidelog.connectors.scylla.session import close_sessions
from tidelog.errors import NotFoundError
from tidelog.home import World, create_home
from tidelog.model.archive import Account, Archive
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.gaps import RemadeError
from tidelog.pipeline.tasks import LocalWorkers, Task, TaskOutcome
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        yield made
    close_sessions()


@pytest.fixture
def wide_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets planned ranges reach a minute ahead, so that they take records of a later second."""
    time_ms = Kinesis.time_ms
    monkeypatch.setattr(Kinesis, "time_ms", lambda *args: time_ms(*args) + 60_000)


class LateWorkers(LocalWorkers):
    """Workers that begin after something else has happened."""

    def __init__(self, first: Callable[[], None]) -> None:
        super().__init__()
        self._first: Callable[[], None] | None = first

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        if tasks and self._first is not None:
            self._first()
            self._first = None
        yield from super().run(tasks)


def drive(home: Home, archive: Archive, workers: LocalWorkers | None = None, **how: Any) -> int:
    pipeline = open_pipeline(home.context, archive, workers or LocalWorkers())
    return Driver(home.context, pipeline, DriverOptions(**how)).run()


def accounts(home: Home, archive: Archive) -> list[Account]:
    return verify_archive(home.context, archive, ArchiveVerifyOptions()).accounts


def archived(home: Home, archive: Archive) -> int:
    found = accounts(home, archive)
    assert all(each.adds_up for each in found)
    return sum(each.archived for each in found)


def make_again(stream: Stream, numbers: range, shards: int = 1) -> None:
    """Deletes a stream, and puts other records into a new one of its name."""
    stream.client.delete_stream(StreamName=stream.name)
    until(lambda: stream.name not in stream.client.list_streams(Limit=1000)["StreamNames"])
    time.sleep(0.01)  # the time of its creation is another one
    stream.client.create_stream(StreamName=stream.name, ShardCount=shards)
    put(stream, numbers)


@pytest.mark.server
@pytest.mark.usefixtures("wide_plans")
@pytest.mark.parametrize("is_late", [False, True], ids=["before the plan", "after the plan"])
def test_stream_created_again_is_not_read_into_the_same_archive(
    home: Home, moto_server: Moto, is_late: bool
) -> None:
    stream = Stream(moto_server.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    assert drive(home, archive) == 10
    if is_late:
        put(stream, range(10, 20))  # these are lost with the stream
        workers = LateWorkers(lambda: make_again(stream, range(100, 130)))
        with pytest.raises((RemadeError, NotFoundError), match="was deleted and made again"):
            drive(home, archive, workers)
    else:
        make_again(stream, range(100, 130))
    for _ in range(2):
        with pytest.raises(RemadeError, match="create a new archive"):
            drive(home, archive)
    assert drive(home, archive, accept_loss=True) == 0
    assert drive(home, archive) == 0, "it has ended"
    assert set(counted(home, archive)) == set(range(10))
    (account,) = accounts(home, archive)
    assert (account.archived, [gap.reason for gap in account.gaps]) == (10, ["remade"])
    after = an_archive(home, stream.url(), "after")
    assert drive(home, after) == 30
    assert archived(home, after) == 30


@pytest.mark.server
@pytest.mark.usefixtures("wide_plans")
def test_archive_that_has_nothing_yet_begins_in_the_stream_that_was_created_again(
    home: Home, moto_server: Moto
) -> None:
    stream = Stream(moto_server.endpoint)
    archive = an_archive(home, stream.url())
    put(stream, range(10))
    with pytest.raises((RemadeError, NotFoundError), match="was deleted and made again"):
        drive(home, archive, LateWorkers(lambda: make_again(stream, range(100, 130))))
    assert not counted(home, archive)
    assert drive(home, archive, accept_loss=True) == 30
    assert set(counted(home, archive)) == set(range(100, 130))
    assert archived(home, archive) == 30


def make_table_again(play: Play, dropped: Sequence[str], time_ms: int, count: int) -> None:
    made = {"orders": BASE, "orders_scylla_cdc_log": play._log_table(86_400)}
    for name in dropped:
        play.session.execute(f"DROP TABLE {name}")
        play.session.execute(made[name])
    play._inserts.clear()  # they were prepared for the table before
    for number in range(count):
        play.write(time_ms + number, Row("insert", f"r{number % 9}", number, {"state": "again"}))


@pytest.mark.server
@pytest.mark.parametrize("is_late", [False, True], ids=["before the plan", "after the plan"])
@pytest.mark.parametrize("dropped", [("orders",), ("orders", "orders_scylla_cdc_log")], ids=len)
def test_table_created_again_is_not_read_into_the_same_archive(
    home: Home, cassandra_server: Cassandra, dropped: Sequence[str], is_late: bool
) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 3_600_000)
    archive = an_archive(home, play.url(lag="2s", groups=1))
    play.write(now_ms - 1_800_000, Row("insert", "r1", 1, {"state": "new"}))
    assert drive(home, archive) == 1

    def again() -> None:
        make_table_again(play, dropped, now_ms - 10_000, 20)

    if is_late:
        written_ms = int(time.time() * 1000)  # behind what was read, as that ends two seconds ago
        play.write(written_ms, Row("insert", "r1", 2, {"state": "new"}))
        until(lambda: time.time() * 1000 > written_ms + 2_500)
        with pytest.raises((RemadeError, NotFoundError), match="was deleted and made again"):
            drive(home, archive, LateWorkers(again))
    else:
        again()
    with pytest.raises(RemadeError, match="create a new archive"):
        drive(home, archive)
    assert drive(home, archive, accept_loss=True) == 0
    assert drive(home, archive) == 0, "it has ended"
    (account,) = accounts(home, archive)
    assert (account.archived, [gap.reason for gap in account.gaps]) == (1, ["remade"])
    after = an_archive(home, play.url(lag="2s", groups=1), "after")
    assert drive(home, after) >= 20
    assert archived(home, after) >= 20
    play.close()
