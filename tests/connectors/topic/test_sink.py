"""The topic sink: every byte as it was, partitions as chosen, and targets that are not there."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.ranges import EVERYTHING, NAMED, batch_of, stage
from tidelog import Event, Home
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.connectors.by_url import sink_at
from tidelog.errors import CorruptError, InternalError, InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.model import layout
from tidelog.model.topic import partition_for
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock

WEEKS_S = 30 * 24 * 3600


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def home(tmp_path: Path, clock: FakeClock) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}, clock=clock))[0] as made:
        made.create_topic("t", 3)
        yield made


def stored(home: Home, partition: int) -> list[Event]:
    return list(home.read("t", partition))


def values(home: Home) -> list[list[bytes | None]]:
    return [[event.value for event in stored(home, partition)] for partition in range(3)]


def test_every_byte_is_kept(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    batch = batch_of([*EVERYTHING, *NAMED], partition=1, base=70)
    sink.publish(stage(sink, [batch]))
    (found,) = home.read_arrow("t", 1)
    names = STORED_SCHEMA.names
    assert found.select(names).equals(batch.select(names))
    assert found.column("offset").to_pylist() == list(range(8))
    assert values(home)[0] == values(home)[2] == []


def test_partitions_are_chosen_by_key_as_producers_do(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    events = [Event(b"%d" % n, b"key-%d" % n) for n in range(60)]
    sink.publish(stage(sink, [batch_of(events)]))
    for partition, found in enumerate(map(list, (stored(home, p) for p in range(3)))):
        assert found
        assert all(partition_for(event.key or b"", 3) == partition for event in found)
        numbers = [int(event.value or b"") for event in found]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("source", "partition"), [("from/0", 0), ("from/5", 2), ("shards/shardId-0001", 1)]
)
def test_events_without_a_key_stay_together(home: Home, source: str, partition: int) -> None:
    sink = sink_at(home.context, "topic:t")
    for ordinal in (0, 2):
        events = [Event(b"%d" % n) for n in range(ordinal, ordinal + 2)]
        sink.publish(stage(sink, [batch_of(events)], ordinal, source))
    assert values(home)[partition] == [b"0", b"1", b"2", b"3"]


def test_a_range_that_is_published_again_stores_nothing(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    events = [Event(b"%d" % n, b"%d" % n) for n in range(30)]
    first = stage(sink, [batch_of(events[:10])])
    sink.publish(first)
    sink.publish(first)
    second = stage(sink, [batch_of(events[10:])], 10)
    sink.publish(second)
    sink.publish(first)  # by a driver that slept
    sink.discard(first)
    sink.discard(second)
    sink_at(home.context, "topic:t").publish(second)
    assert sorted(v or b"" for each in values(home) for v in each) == sorted(
        event.value or b"" for event in events
    )
    assert list(home.store.list("staging/")) == []
    assert home.verify("t").errors == 0


def test_other_source_partitions_and_pipelines_are_not_confused(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    for source in ("from/0", "from/1", "other/0"):
        sink.publish(stage(sink, [batch_of([Event(source.encode())])], 0, source))
    assert values(home)[0] == [b"from/0", b"from/1", b"other/0"]


def test_large_ranges_become_several_segments(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.log.producer.staged.SEGMENT_EVENTS_MAX", 100)
    sink = sink_at(home.context, "topic:t?partition=same")
    events = [Event(b"%d" % n) for n in range(950)]
    manifest = stage(sink, [batch_of(events[:30]), batch_of(events[30:], base=30)])
    assert sum(file.events for file in manifest.files) == manifest.written == 950
    assert all(file.events <= 100 and file.kind == "segment" for file in manifest.files)
    assert (manifest.files[0].first_offset, manifest.files[-1].last_offset) == (0, 949)
    sink.publish(manifest)
    assert values(home)[0] == [event.value for event in events]


def test_large_events_end_a_segment_too(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    chance = random.Random(1)
    large = [Event(chance.randbytes(900_000)) for _ in range(50)]
    batches = [batch_of([event], base=n) for n, event in enumerate(large)]
    manifest = stage(sink, batches)
    assert len(manifest.files) == 2
    sink.publish(manifest)
    assert values(home)[0] == [event.value for event in large]


def test_an_empty_range_is_nothing(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    manifest = stage(sink, [])
    sink.publish(manifest)
    sink.discard(manifest)
    assert manifest.files == ()
    assert values(home) == [[], [], []]


def test_what_is_neither_staged_nor_stored_is_corruption(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    manifest = stage(sink, [batch_of([Event(b"x")])])
    sink.discard(manifest)
    with pytest.raises(CorruptError, match=r"`from/0`, 0 to 1, is neither staged nor stored"):
        sink.publish(manifest)


def test_more_events_than_were_read_are_refused(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    manifest = stage(sink, [batch_of([Event(b"x"), Event(b"y")])])
    with pytest.raises(InternalError, match="2 events came of 1"):
        sink.publish(msgspec.structs.replace(manifest, read=1))


def test_a_topic_with_fewer_partitions_is_refused(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    message = "topic `t`: has 3 partitions, and there are events of partition 3: create it with 4"
    with pytest.raises(InvalidError, match=message):
        sink.check(["from/0", "from/3"])
    with pytest.raises(InvalidError, match=message):
        stage(sink, [batch_of([Event(b"x")], partition=3)])
    sink_at(home.context, "topic:t").check(["from/0", "from/3"])


def test_a_topic_that_goes_away_is_told(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    manifest = stage(sink, [batch_of([Event(b"x")])])
    home.delete_topic("t")
    with pytest.raises(NotFoundError, match=r"topic `t`: not found.*or create it"):
        sink.publish(manifest)
    with pytest.raises(NotFoundError, match="topic `t`: not found"):
        sink_at(home.context, "topic:t")
    home.create_topic("t", 3)
    with pytest.raises(NotFoundError, match="was deleted and made again since this pipeline"):
        sink.publish(manifest)
    assert values(home) == [[], [], []]


def test_an_event_that_is_too_large_is_refused(home: Home) -> None:
    sink = sink_at(home.context, "topic:t")
    with pytest.raises(InvalidError, match="at most 1048576 are allowed"):
        stage(sink, [batch_of([Event(b"x" * (1 << 20) + b"y")])])


def test_its_producer_rows_outlive_sweeps(home: Home, clock: FakeClock) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    manifest = stage(sink, [batch_of([Event(b"x")])])
    sink.publish(manifest)
    clock.advance(WEEKS_S)
    home.sweep(0)
    where = layout.topic_partition(home.topic("t").incarnation, 0)
    assert home.catalog.get(where, layout.producer_row(":pipeline:pipe:from/0")) is not None
    sink.publish(manifest)
    assert values(home)[0] == [b"x"]


def test_it_pickles_and_writers_open_no_catalog(home: Home, tmp_path: Path) -> None:
    sink = pickle.loads(pickle.dumps(sink_at(home.context, "topic:t?partition=same")))
    assert sink.url == "topic:t?partition=same"
    catalog = tmp_path / "c.sqlite"
    hidden = catalog.rename(tmp_path / "hidden.sqlite")
    manifest = stage(sink, [batch_of([Event(b"x")])])
    hidden.rename(catalog)
    sink.publish(manifest)
    assert values(home)[0] == [b"x"]
