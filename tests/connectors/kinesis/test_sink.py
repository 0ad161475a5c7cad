"""Events into Kinesis: at least once, in the order of each partition key, by requests that fit."""

from __future__ import annotations

import base64
import hashlib
import pickle
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.connectors.kinesis.test_source import Stream, rows, values
from tests.servers.moto import KEYS, Moto
from tests.support.kinesis_server import FakeKinesis, RefusedError, running_kinesis
from tests.support.named_pipelines import create_pipeline, open_named
from tidelog import Event, Home
from tidelog.codec.event_batch import table_of
from tidelog.connectors.by_url import sink_at, source_at
from tidelog.connectors.kinesis.client import HASH_KEY, Kinesis, parse_kinesis_address
from tidelog.connectors.kinesis.sink import KinesisSink, KinesisWriter, open_writer, partition_key
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.model.address import parse_address
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock


@pytest.fixture
def fake() -> Iterator[FakeKinesis]:
    with running_kinesis() as service:
        yield service


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ=KEYS))[0] as made:
        made.create_topic("t", 2)
        yield made


def batch(events: Sequence[Event]) -> pa.Table:
    return table_of(events, 0)


def numbered(count: int, keys: int = 7) -> list[Event]:
    return [Event(b"%d" % n, key=b"key-%d" % (n % keys)) for n in range(count)]


def writer(stream: Stream, clock: FakeClock | None = None) -> KinesisWriter:
    place = parse_kinesis_address(parse_address(stream.url()), KEYS, "sink")
    clock = clock or FakeClock()
    kinesis = Kinesis(place, clock=clock)
    return KinesisWriter(kinesis, stream.name, 1 << 20, clock=clock, source=random.Random(5))


def by_key(fake: FakeKinesis, stream: Stream) -> dict[str, list[int]]:
    """The numbers of each partition key, in the order in which the stream has them."""
    records = [each for shard in fake.shards(stream.name).values() for each in shard.records]
    found = defaultdict(list)
    for each in sorted(records, key=lambda record: record.sequence):
        found[each.key].append(int(base64.b64decode(each.data)))
    return found


@pytest.mark.server
def test_moto_gets_every_event_under_its_key_and_in_order(moto_server: Moto) -> None:
    stream = Stream(moto_server.endpoint, shards=2)
    put = open_writer(stream.url(), environ=KEYS).put
    assert put(batch(numbered(1_200))) == 1_200
    assert put(batch([])) == 0
    source = stream.source()
    found = [row for shard in source.partitions() for row in rows(source, shard)[0]]
    assert Counter(row["value"] for row in found) == Counter(b"%d" % n for n in range(1_200))
    for row in found:
        assert row["key"] == b"key-%d" % (int(row["value"]) % 7)
    for shard in source.partitions():
        numbers = [int(value) for value in values(rows(source, shard))]
        assert numbers == sorted(numbers)


def test_partition_keys_are_stable_and_such_as_kinesis_takes() -> None:
    assert partition_key(b"user-1", "id", b"v") == "user-1"
    assert partition_key("ключ".encode(), None, None) == "ключ"
    assert partition_key(None, "id-7", b"v") == partition_key(b"", "id-7", b"x") == "id-7"
    assert partition_key(None, None, b"v") == hashlib.sha256(b"v").hexdigest()
    assert partition_key(None, None, None) == hashlib.sha256(b"").hexdigest()
    assert partition_key(b"\xff\x00", "id", None) == hashlib.sha256(b"\xff\x00").hexdigest()
    assert partition_key(b"k" * 256, None, None) == "k" * 256
    assert partition_key(b"k" * 257, None, None) == hashlib.sha256(b"k" * 257).hexdigest()
    assert len(partition_key(None, "i" * 300, None)) == 64


def test_hash_keys_go_back_to_where_they_came_from(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint, shards=2)
    low, high = b"5", b"%d" % (2**127 + 5)
    strange = [b"", b"x", b"-1", b"%d" % 2**128, b"\xff"]
    events = [
        Event(b"0", key=b"k", headers=((HASH_KEY, low),)),
        Event(b"1", key=b"k", headers=(("other", b"y"), (HASH_KEY, high))),
        *(Event(b"2", key=b"k", headers=((HASH_KEY, text),)) for text in strange),
    ]
    assert writer(stream).put(batch(events)) == 7
    counts = [len(shard.records) for shard in fake.shards(stream.name).values()]
    assert counts[0] >= 1
    assert counts[1] >= 1
    assert sum(counts) == 7


def test_null_and_empty_values_are_empty_records(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    writer(stream).put(batch([Event(None, key=b"k"), Event(b"", key=b"k"), Event(None)]))
    assert fake.values(stream.name) == [b"", b"", b""]
    assert writer(stream).put(pa.table({"value": pa.array([b"1"], pa.binary())})) == 1


def test_requests_keep_to_their_limits(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    writer(stream).put(batch(numbered(1_001)))
    assert fake.calls["PutRecords"] == 3
    large = [Event(bytes(900_000), key=b"k") for _ in range(12)]
    writer(stream).put(batch(large))  # the service refuses more than 5 MiB at once
    assert fake.calls["PutRecords"] == 3 + 3
    full = Event(bytes((1 << 20) - 3), key=b"key")
    writer(stream).put(batch([full]))
    before = fake.calls["PutRecords"]
    with pytest.raises(InvalidError, match=r"has 1048577 bytes, at most 1048576"):
        writer(stream).put(batch([Event(b"small"), Event(bytes((1 << 20) - 2), key=b"key")]))
    assert fake.calls["PutRecords"] == before


@pytest.mark.parametrize("seed", range(5))
def test_records_that_fail_are_sent_again_in_the_order_of_their_key(
    fake: FakeKinesis, seed: int
) -> None:
    stream, chance = Stream(fake.endpoint, shards=3), random.Random(seed)
    fake.put_fault = lambda _: chance.random() < 0.2
    assert writer(stream).put(batch(numbered(2_000))) == 2_000
    for key, numbers in by_key(fake, stream).items():
        remainder = int(key.removeprefix("key-"))
        assert set(numbers) == set(range(remainder, 2_000, 7))
        last = {number: place for place, number in enumerate(numbers)}
        assert sorted(last, key=lambda number: last[number]) == sorted(last)


def test_a_throttled_key_does_not_hold_up_the_others(fake: FakeKinesis) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock()
    fake.put_fault = lambda record: record["PartitionKey"] == "key-3"
    with pytest.raises(UnavailableError, match="accepts no more") as told:
        writer(stream, clock).put(batch(numbered(700)))
    assert told.value.context["put"] == 600
    assert set(by_key(fake, stream)) == {f"key-{n}" for n in (0, 1, 2, 4, 5, 6)}
    assert all(len(numbers) == 100 for numbers in by_key(fake, stream).values())


def test_a_lost_reply_doubles_and_loses_nothing(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    original, lost = fake._put_records, iter([True, False, True, False, False, False])

    def forgetful(region: str, asked: dict[str, Any]) -> dict[str, Any]:
        answer = original(region, asked)
        if next(lost):
            raise RefusedError("InternalFailure", "the reply is lost")
        return answer

    fake._put_records = forgetful  # type: ignore[method-assign]
    assert writer(stream).put(batch(numbered(1_000))) == 1_000
    counts = Counter(int(value) for value in fake.values(stream.name))
    assert set(counts) == set(range(1_000))
    assert set(counts.values()) == {2}


def test_what_is_not_there_is_told(fake: FakeKinesis, home: Home) -> None:
    with pytest.raises(NotFoundError, match="`nope`: is not there"):
        open_writer(f"kinesis://nope?region=x&endpoint_url={fake.endpoint}", environ=KEYS)
    with pytest.raises(NotFoundError, match="`nope`: is not there"):
        sink_at(home.context, f"kinesis://nope?region=x&endpoint_url={fake.endpoint}")
    with pytest.raises(InvalidError, match="unknown option `start`"):
        sink_at(home.context, "kinesis://s?start=oldest")


def test_a_pipeline_brings_a_topic_into_kinesis_and_goes_on(fake: FakeKinesis, home: Home) -> None:
    stream = Stream(fake.endpoint, shards=2)
    home.append("t", numbered(1_500))
    made = create_pipeline(home.context, "out", "topic:t", stream.url())
    for total in (1_500, 2_000):
        Driver(home.context, open_named(home.context, made, LocalWorkers(2)), DriverOptions()).run()
        assert sorted(map(int, fake.values(stream.name))) == list(range(total))
        home.append("t", [Event(b"%d" % n, key=b"more") for n in range(1_500, 2_000)])
    assert list(home.store.list("staging/")) == []
    for numbers in by_key(fake, stream).values():
        assert numbers == sorted(numbers)


def test_an_event_that_is_too_large_stops_before_anything_is_put(
    fake: FakeKinesis, home: Home
) -> None:
    stream = Stream(fake.endpoint)
    home.append("t", [Event(b"1"), Event(bytes(1 << 20), key=b"")], partition=0)
    made = create_pipeline(home.context, "out", "topic:t", stream.url())
    with pytest.raises(InvalidError, match="at most 1048576 are allowed in a record"):
        Driver(home.context, open_named(home.context, made, LocalWorkers()), DriverOptions()).run()
    assert fake.values(stream.name) == []


class DyingSink(KinesisSink):
    """Dies once, after it has published and before that is committed."""

    died = False

    def publish(self, manifest: Any) -> int:
        done = super().publish(manifest)
        if not DyingSink.died:
            DyingSink.died = True
            raise KeyboardInterrupt
        return done


def test_a_range_that_is_published_twice_is_there_twice_and_none_is_lost(
    fake: FakeKinesis, home: Home
) -> None:
    stream = Stream(fake.endpoint)
    home.append("t", numbered(300), partition=0)
    home.append("t", numbered(200, keys=3), partition=1)
    sink = sink_at(home.context, stream.url())
    assert isinstance(sink, KinesisSink)
    dying = DyingSink(sink._place, sink._settings)
    source = source_at(home.context, "topic:t")
    pipeline = Pipeline("p", "inc", source, dying, LocalWorkers())
    with pytest.raises(KeyboardInterrupt):
        Driver(home.context, pipeline, DriverOptions()).run()
    Driver(home.context, pipeline, DriverOptions()).run()
    counts = Counter(fake.values(stream.name))
    assert set(counts) == {b"%d" % n for n in range(300)}
    assert sum(counts.values()) in (800, 700)  # one of the two ranges came twice
    assert list(home.store.list("staging/")) == []


def test_a_stream_that_was_made_anew_is_refused(fake: FakeKinesis, home: Home) -> None:
    stream = Stream(fake.endpoint)
    home.append("t", numbered(10))
    made = create_pipeline(home.context, "out", "topic:t", stream.url())
    pipeline = open_named(home.context, made, LocalWorkers())
    stream.client.delete_stream(StreamName=stream.name)
    time.sleep(0.01)
    stream.client.create_stream(StreamName=stream.name, ShardCount=1)
    with pytest.raises(NotFoundError, match="made again since this pipeline began"):
        Driver(home.context, pipeline, DriverOptions()).run()
    with pytest.raises(InvalidError, match="was deleted and made again"):
        open_named(home.context, made, LocalWorkers())
    assert fake.values(stream.name) == []


def test_a_sink_pickles_without_secrets(
    fake: FakeKinesis, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(fake.endpoint)
    sink = sink_at(home.context, stream.url())
    data = pickle.dumps(sink)
    assert b"secret" not in data
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    again: KinesisSink = pickle.loads(data)
    assert (again.url, again.incarnation) == (sink.url, sink.incarnation)
    again.check(["anything/at all"])


def test_from_kinesis_into_kinesis_keys_and_order_stay(fake: FakeKinesis, home: Home) -> None:
    first, second = Stream(fake.endpoint, shards=2), Stream(fake.endpoint, shards=3)
    first.put([(f"key-{n % 7}", b"%d" % n) for n in range(500)])
    made = create_pipeline(home.context, "copy", first.url(), second.url())
    Driver(home.context, open_named(home.context, made, LocalWorkers(2)), DriverOptions()).run()
    assert by_key(fake, second) == by_key(fake, first)
