"""Markers of archives of Kinesis: quiet shards, and chains that outlive what their stream holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.kinesis.test_archive import HOUR_MS, an_archive, drive, put, split
from tests.connectors.kinesis.test_source import Stream
from tests.servers.moto import KEYS
from tests.support.kinesis_server import FakeKinesis, running_kinesis
from tidelog import Home
from tidelog.archive.finalize import FinalizeOptions, finalize
from tidelog.archive.status import read_status
from tidelog.home import World, create_home
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


def test_a_quiet_shard_is_neither_behind_nor_in_the_way_of_finalizing(
    home: Home, fake: FakeKinesis
) -> None:
    stream = Stream(fake.endpoint, shards=2)
    archive = an_archive(home, stream.url(), parser="timestamp")
    stream.client.put_record(
        StreamName=stream.name, PartitionKey="k", Data=b"1", ExplicitHashKey="0"
    )
    drive(home, archive)
    before = time.time() * 1000
    done = finalize(home.context, home.archives.get("a").info, FinalizeOptions(delay_ms=0))
    assert done.watermark_ms is not None
    assert done.watermark_ms >= before - 1
    assert [each.lag_s for each in read_status(home.context, archive).partitions] == [0, 0]
    stream.client.put_record(
        StreamName=stream.name, PartitionKey="k", Data=b"2", ExplicitHashKey="0"
    )
    lags = [each.lag_s for each in read_status(home.context, archive).partitions]
    assert lags[0]
    assert lags[1] == 0


def test_lagging_chain_marks_no_folder_of_a_shard_that_expired(
    home: Home, fake: FakeKinesis
) -> None:
    fake.ahead_ms = -30 * HOUR_MS
    stream = Stream(fake.endpoint)
    first = home.archives.create("first", source=stream.url(), parser="timestamp")
    chain = home.archives.create("chain", source="archive:first", parser="timestamp")
    put(stream, range(5))
    assert first.run().events == chain.run().events == 5
    put(stream, range(5, 10))
    split(stream, 0, 2**127)
    assert first.run().events == 5
    for hours in (15, 0):
        fake.ahead_ms = -hours * HOUR_MS - 1_000
        first.run()
    assert 0 not in fake.shards(stream.name), "the chain can read it from its archive only"
    assert chain.finalize("0s").notices == []
    assert chain.run().events == 5
    (notice,) = chain.finalize("0s").notices
    assert (notice.event, notice.events) == ("final", 10)


def test_chain_behind_the_retention_of_its_stream_is_finalized_by_its_archive(
    home: Home, fake: FakeKinesis
) -> None:
    fake.ahead_ms = -30 * HOUR_MS
    stream = Stream(fake.endpoint)
    first = home.archives.create("first", source=stream.url(), parser="timestamp")
    chain = home.archives.create("chain", source="archive:first", parser="timestamp")
    put(stream, range(5))
    assert first.run().events == chain.run().events == 5
    for hours in (15, 0):
        fake.ahead_ms = -hours * HOUR_MS - 1_000
        put(stream, range(5 + hours, 10 + hours))
        first.run()
    assert chain.finalize("0s").notices == []
    assert chain.run().events == 10
    assert sum(each.events for each in chain.finalize("0s").notices) >= 5
