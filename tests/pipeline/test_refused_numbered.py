"""Records that no topic accepts, in sources whose events the pipeline numbers itself.

A pump copies everything before such a record, once, and says where it is. An archive keeps the
record as a dead letter, and goes on behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.kinesis.test_source import Stream
from tests.servers.cassandra import Cassandra
from tests.servers.moto import KEYS
from tests.servers.scylla_play import Play, Row
from tests.support.archive_look import an_archive, drive
from tests.support.kinesis_aggregator import Message, aggregated, sealed
from tests.support.kinesis_server import running_kinesis
from tidelog import Home
from tidelog.archive.dead_letters import dead_letters
from tidelog.archive.status import read_status
from tidelog.connectors.kinesis import reader as kinesis_read
from tidelog.connectors.scylla.session import close_sessions
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.model.limits import HEADERS_MAX, OWN_HEADERS_MAX
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

LARGE = b"z" * 500_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), event_bytes_max=100_000)
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        made.create_topic("to", 1)
        yield made
    close_sessions()


@pytest.fixture
def stream() -> Iterator[Stream]:
    with running_kinesis() as service:
        yield Stream(service.endpoint)


def pump(home: Home, source: str) -> None:
    pipeline = open_pump(home.context, PumpOptions(source, "to"), LocalWorkers())
    Driver(home.context, pipeline, DriverOptions()).run()


def copied(home: Home) -> list[bytes | None]:
    return [event.value for event in home.read("to", 0)]


@pytest.mark.parametrize("chunk", [2, 20_000], ids=["small batches", "one batch"])
@pytest.mark.parametrize("bad", [1, 5, 9], ids=["second", "middle", "last"])
def test_pump_copies_every_record_of_a_stream_before_a_refused_one(
    home: Home, stream: Stream, monkeypatch: pytest.MonkeyPatch, bad: int, chunk: int
) -> None:
    monkeypatch.setattr(kinesis_read, "_CHUNK_EVENTS", chunk)
    values = [LARGE if number == bad else b"%d" % number for number in range(10)]
    stream.put([("k", value) for value in values])
    for _ in range(2):
        with pytest.raises(InvalidError, match=rf"offset {bad}: event: has 500"):
            pump(home, stream.url())
        assert copied(home) == values[:bad]


def test_pump_copies_what_is_before_a_record_with_a_refused_one_inside(
    home: Home, stream: Stream
) -> None:
    stream.put([("k", b"0"), ("k", b"1"), ("k", aggregated([("a", b"2"), ("b", LARGE)]))])
    for _ in range(2):
        with pytest.raises(InvalidError, match="offset 3: event: has 500"):
            pump(home, stream.url())
        assert copied(home) == [b"0", b"1"]


def test_archive_of_a_stream_goes_on_behind_a_refused_record(
    home: Home, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinesis_read, "_CHUNK_EVENTS", 2)
    message = Message(partition_key_table=["a"])
    record = message.records.add(partition_key_index=0, data=b"odd")
    for number in range(HEADERS_MAX + OWN_HEADERS_MAX + 1):
        record.tags.add(key=f"tag-{number}", value="x")
    odd = sealed(message.SerializeToString())
    stream.put([("k", b"0"), ("k", odd), ("k", b"2")])
    archive = an_archive(home, "a", stream.url())
    assert drive(home, archive) == 3
    (batch,) = dead_letters(home.context, archive)
    assert [(row["offset"], row["value"]) for row in batch.to_pylist()] == [(1, b"odd")]
    stream.put([("k", b"3")])
    assert drive(home, archive) == 1, "each record once"
    (account,) = [each.account for each in read_status(home.context, archive).partitions]
    assert (account.archived, account.dead, account.adds_up) == (3, 1, True)


@pytest.mark.server
@pytest.mark.parametrize("bad", [1, 5, 9], ids=["second", "middle", "last"])
def test_pump_copies_every_change_of_a_table_before_a_refused_one(
    home: Home, cassandra_server: Cassandra, bad: int
) -> None:
    play = Play(cassandra_server)
    now_ms = int(time.time() * 1000)
    play.begin_generation(now_ms - 3_600_000)
    for number in range(10):
        state = LARGE.decode() if number == bad else "new"
        play.write(now_ms - 60_000 + number, Row("insert", "r", number, {"state": state}))
    for _ in range(2):
        with pytest.raises(InvalidError, match=r"event: has 5\d+ bytes"):
            pump(home, play.url(lag="2s", groups=1))
        assert len(copied(home)) == bad
    play.close()
