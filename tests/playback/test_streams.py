"""Playback into Kafka and Kinesis, by real servers, with players that die."""

from __future__ import annotations

import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.connectors.kafka.test_sink import Target
from tests.connectors.kinesis.test_source import Stream
from tests.playback.test_kill import EVENTS, Players, wanted
from tests.servers.dynamodb import DynamoDb
from tests.servers.kafka import Kafka
from tests.servers.moto import KEYS, Moto
from tests.servers.s3 import S3
from tests.support.playback_stage import T0
from tidelog import Event, Home
from tidelog.connectors.sink import Lot, SinkContext, open_playback_sink
from tidelog.errors import NotFoundError
from tidelog.home import create_home
from tidelog.model.playback import TimeRange
from tidelog.playback.play import Playback, opened, run_named, run_playback
from tidelog.playback.request import PlaybackRequest, pin_topic, pinned_playback
from tidelog.playback.session import NamedPlayback
from tidelog.settings import Settings, load_settings

pytestmark = pytest.mark.server


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as made:
        made.create_topic("t", 3)
        events = [
            Event(
                b"%d" % n,
                b"key-%d" % (n % 17),
                id=f"id-{n}",
                timestamp=T0 + n * 40,
                type="x",
                headers=(("h", b"\xff"),),
            )
            for n in range(EVENTS)
        ]
        for first in range(0, EVENTS, 300):
            made.append("t", events[first : first + 300])
        yield made


def playback(home: Home, events: int = EVENTS) -> Playback:
    topic = home.topic("t")
    pin = pin_topic(home.context, topic, TimeRange(T0, T0 + 40 * events))
    return Playback(home.context, topic, pin)


@pytest.fixture
def target(kafka_server: Kafka) -> Target:
    return Target(kafka_server)


def test_kafka_gets_all_that_an_event_has(home: Home, target: Target) -> None:
    with opened(lambda: open_playback_sink(target.url(), SinkContext({}, "once"))) as sink:
        assert run_playback(playback(home), sink).events == EVENTS
    messages = [message for p in range(target.partitions) for message in target.messages(p)]
    by_value = {int(message.value()): message for message in messages}
    assert sorted(by_value) == list(range(EVENTS))
    message = by_value[7]
    assert (message.key(), message.timestamp()[1]) == (b"key-7", T0 + 280)
    assert message.headers() == [("h", b"\xff"), ("tidelog-id", b"id-7"), ("tidelog-type", b"x")]


def test_kafka_keeps_partitions_where_that_is_asked_for(home: Home, target: Target) -> None:
    url = target.url("?partition=same")
    with opened(lambda: open_playback_sink(url, SinkContext({}, "same"))) as sink:
        run_playback(playback(home), sink)
    for partition in range(3):
        found = [message.value() for message in target.messages(partition)]
        assert found == [event.value for event in home.read("t", partition)]


def test_a_lot_that_kafka_has_is_not_sent_again(home: Home, target: Target) -> None:
    setting = SinkContext({}, f"again-{target.name}", name="p")
    (batch,) = playback(home, 100).batches()
    lots = [Lot(first, batch.slice(first, 40)) for first in range(0, 100, 40)]
    first = open_playback_sink(target.url(), setting)
    first.put(lots[0])
    first.put(lots[1])
    second = open_playback_sink(target.url(), replace(setting, resumed=True))
    second.put(lots[1])
    second.put(lots[2])
    second.close()
    first.close(failed=True)
    assert Counter(target.values()) == Counter(b"%d" % n for n in range(100))


def test_a_topic_that_kafka_does_not_have(kafka_server: Kafka) -> None:
    url = f"kafka://{kafka_server.bootstrap}/no-such-{uuid.uuid4().hex}"
    with pytest.raises(NotFoundError):
        open_playback_sink(url, SinkContext({}, "no"))


@pytest.mark.long
def test_into_kafka_by_players_that_die(home: Home, target: Target, tmp_path: Path) -> None:
    with Players(home, tmp_path, target.url()) as players:
        players.kill(4)
    found = [(value or b"").decode() for value in target.values()]
    assert Counter(found) == wanted()


@pytest.mark.long
def test_into_kinesis_by_players_that_die(
    home: Home, moto_server: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    assert os.environ["AWS_ACCESS_KEY_ID"]
    stream = Stream(moto_server.endpoint, shards=2)
    with Players(home, tmp_path, stream.url()) as players:
        players.kill(4)
    found = defaultdict(list)
    for key, value in records(stream):
        found[key].append(int(value))
    numbers = Counter(number for each in found.values() for number in each)
    assert set(numbers) == set(range(EVENTS)), "nothing is skipped"
    assert sum(numbers.values()) < EVENTS * 1.5, "only lots in flight come again"
    for key, each in found.items():
        assert {f"key-{number % 17}" for number in each} == {key}
        last = {number: at for at, number in enumerate(each)}
        assert sorted(last, key=last.__getitem__) == sorted(last), "last ones are in order"


def test_on_s3_and_dynamodb(
    s3_server: S3, dynamodb_server: DynamoDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    settings = Settings(
        f"s3://{s3_server.fresh_bucket()}?endpoint={s3_server.endpoint}&region={s3_server.region}",
        f"dynamodb://p{uuid.uuid4().hex}?endpoint={dynamodb_server.endpoint}&region=us-east-1",
    )
    with create_home(settings)[0] as home:
        home.create_topic("t", 5)
        home.create_topic("u", 3)
        for minute in range(12):
            times = [T0 + minute * 60_000 + n * 900 for n in range(60)]
            home.append("t", [Event(b"%d" % time, b"%d" % time, timestamp=time) for time in times])
        asked = PlaybackRequest("t", "topic:u", "2023-11-14T22:15:00Z", "2023-11-15")
        with ThreadPoolExecutor(4) as pool:
            topic, pinned = pinned_playback(home.context, "p", asked, pool)
            named = NamedPlayback(home.context, "p")
            assert named.try_take()
            setting = SinkContext.of_named(home.context, {}, named, pinned)
            playing = Playback(home.context, topic, pinned.pin, pool)
            played = run_named(playing, named, lambda: open_playback_sink("topic:u", setting))
        found = Counter(event.timestamp for p in range(3) for event in home.read("u", p))
        every = [event.timestamp for p in range(5) for event in home.read("t", p)]
        assert found == Counter(time for time in every if time >= T0 + 100_000)  # type: ignore[operator]
        assert played.events == sum(found.values())


def records(stream: Stream) -> Iterator[tuple[str, bytes]]:
    """All records of a stream, shard by shard."""
    shards = stream.client.list_shards(StreamName=stream.name)["Shards"]
    for shard in shards:
        at = stream.client.get_shard_iterator(
            StreamName=stream.name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while at:
            answer = stream.client.get_records(ShardIterator=at, Limit=10_000)
            yield from ((each["PartitionKey"], each["Data"]) for each in answer["Records"])
            at = answer.get("NextShardIterator") if answer["Records"] else None
