"""A topic to play from: runs step by step in fake time, and what a playback must give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from tests.support.topic_upkeep import House
from tests.support.waiting import until
from tidelog import Home
from tidelog.catalog.base import Catalog, Change, Row
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.log.partition_reader import Reader
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.playback import Cursor, Pin, PlaybackState, TimeRange
from tidelog.model.topic import Topic, decode_row
from tidelog.playback.merge import BufferBounds, play
from tidelog.playback.request import AsOf, pin_topic

T0 = 1_700_000_000_000

Place = tuple[int, int, int]  # time, partition, offset


class Stage(House):
    """A house with one topic, whose events are told by where they stand."""

    def __init__(self, partitions: int = 1, slot_ms: int = 1_000, seed: int = 1) -> None:
        super().__init__(seed)
        self.main = self.made("main", partitions, slot_ms)

    def made(self, name: str, partitions: int = 1, slot_ms: int = 1_000) -> Topic:
        from tidelog.log.topics import create_topic

        wanted = Topic(name, self.ids.new(), partitions, self.clock.now_ms(), slot_ms)
        return create_topic(self.context, wanted)

    def run(self, times: Sequence[int], partition: int = 0, topic: Topic | None = None) -> int:
        """One run, whose events have these times; its first offset."""
        events = [
            Event(b"v%d" % number, b"k%d" % (number % 5), timestamp=time_ms)
            for number, time_ms in enumerate(times)
        ]
        return self.stored(events, partition, topic)

    def stored(
        self, events: Sequence[Event], partition: int = 0, topic: Topic | None = None
    ) -> int:
        appender = self.appender(topic or self.main)
        segment = encode_staged([(partition, table_of(events, self.clock.now_ms()))])
        base, _ = appender.commit(appender.upload(segment), segment.pieces[0])
        appender.close()
        return base

    def pin(self, start_ms: int, end_ms: int, as_of: AsOf = None) -> Pin:
        return pin_topic(self.context, self.main, TimeRange(start_ms, end_ms), as_of)

    def play(
        self,
        start_ms: int,
        end_ms: int,
        bounds: BufferBounds | None = None,
        after: Cursor | None = None,
    ) -> list[Place]:
        pin = self.pin(start_ms, end_ms)
        return list(places(play(self.context, self.main, pin, bounds=bounds, after=after)))

    def there(self, start_ms: int, end_ms: int, topic: Topic | None = None) -> list[Place]:
        """What a playback of this range must give."""
        found = [(e.timestamp, e.partition, e.offset) for e in self.events(topic)]
        return sorted(place for place in found if start_ms <= place[0] < end_ms)  # type: ignore[operator,misc]

    def events(self, topic: Topic | None = None) -> Iterator[Event]:
        """All events, partition by partition."""
        topic = topic or self.main
        for partition in range(topic.partitions):
            start = self.head(topic, partition).start
            for stretch in Reader(self.context, topic, partition).read(start):
                yield from stretch.events()


def playback_state(home: Home, name: str) -> PlaybackState:
    """How far a named playback of a home is."""
    row = home.catalog.get(layout.playback_partition(name), layout.PLAYBACK_STATE)
    return decode_row(row.value, PlaybackState, "state") if row else PlaybackState()


def wait_for_number(home: Home, name: str, number: int, output: Path) -> None:
    """Until events up to this number are intended, or out; players tell errors beside an output."""

    def reached() -> bool:
        state = playback_state(home, name)
        return max(state.number, state.until_number) >= number

    until(reached, 120, Path(f"{output}.err").read_text)


def places(batches: Iterable[pa.RecordBatch]) -> Iterator[Place]:
    """Where the events of batches stand."""
    for batch in batches:
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        rest = (batch.column(name).to_pylist() for name in ("partition", "offset"))
        yield from zip(times, *rest, strict=True)


class CountingCatalog:
    """Counts calls, and the rows that they give."""

    def __init__(self, inner: Catalog) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls = self.rows = 0

    def get(self, partition: str, row: str) -> Row | None:
        self.calls += 1
        return self.inner.get(partition, row)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        self.calls += 1
        for row in self.inner.scan(partition, start, end, limit, reverse):
            self.rows += 1
            yield row

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self.calls += 1
        self.inner.write(partition, *changes, write_id=write_id)

    def close(self) -> None:
        self.inner.close()
