"""The events of all partitions of a topic by time, as Arrow from end to end."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec
import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA, events_of
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.topics import find_topic, read_head
from tidelog.model.event import Event
from tidelog.model.playback import Cursor, Pin, Time, TimeRange, time_range
from tidelog.model.topic import Topic
from tidelog.playback.ahead import Ahead, Found
from tidelog.playback.held import Rows, Wanted, load_run
from tidelog.playback.pin import AsOf, pin_topic, trimmed
from tidelog.playback.windows import READERS, Bounds, Windows

__all__ = ["play", "play_arrow", "play_events"]


def play_events(
    log: Log, topic: str, start: Time = None, end: Time = None, as_of: AsOf = None
) -> Iterator[Event]:
    """The events of ``[start, end)`` by time, as they are now; by default the last 15 minutes.

    ``NotFoundError`` when events of it are trimmed meanwhile.
    """
    return itertools.chain.from_iterable(map(_events, play_arrow(log, topic, start, end, as_of)))


def play_arrow(
    log: Log, topic: str, start: Time = None, end: Time = None, as_of: AsOf = None
) -> Iterator[pa.RecordBatch]:
    """The same as Arrow batches in event columns."""
    found = find_topic(log, topic)
    times = time_range(start, end, log.clock.now_ms())
    with ThreadPoolExecutor(READERS, "tidelog-playback") as pool:
        pin = pin_topic(log, found, times, as_of, pool)
    return _with_pool(log, found, pin)


def play(
    log: Log,
    topic: Topic,
    pin: Pin,
    *,
    after: Cursor | None = None,
    pool: Executor | None = None,
    bounds: Bounds | None = None,
) -> Generator[pa.RecordBatch, None, None]:
    """What was pinned, from the beginning or after a cursor, by time.

    Without a pool there are no threads. ``NotFoundError`` when events of it are trimmed meanwhile,
    or the topic is deleted.
    """
    if topic.incarnation != pin.incarnation:
        raise InvalidError(
            f"playback of `{topic.name}`: the topic was deleted and made again since it began: "
            "begin another playback"
        )
    playing = _Playing(log, topic, pin, after)
    ahead = Ahead(log, topic, pin, playing.times, pool)
    end_ms = playing.times.end_ms
    windows = Windows(topic.name, ahead, playing.load, end_ms, bounds or Bounds(), pool)
    try:
        yield from windows.batches()
    finally:
        windows.stop()


def _with_pool(log: Log, topic: Topic, pin: Pin) -> Iterator[pa.RecordBatch]:
    with ThreadPoolExecutor(READERS, "tidelog-playback") as pool:
        yield from play(log, topic, pin, pool=pool)


class _Playing:
    """What is wanted of each run, and where it is."""

    def __init__(self, log: Log, topic: Topic, pin: Pin, after: Cursor | None) -> None:
        self._log = log
        self._topic = topic
        self._pin = pin
        self._after = after
        start_ms = pin.range.start_ms if after is None else after.time_ms
        self.times = TimeRange(start_ms, max(start_ms, pin.range.end_ms))

    def load(self, found: Found) -> Rows:
        """The events of a run that are wanted."""
        wanted = Wanted(
            partition=found.partition,
            start_ms=self.times.start_ms,
            end_ms=self.times.end_ms,
            start=self._pin.starts[found.partition],
            end=self._pin.ends[found.partition],
            after=self._after,
        )
        try:
            return load_run(self._log.store, self._topic.name, found.run, wanted)
        except NotFoundError as exc:
            head, _ = read_head(self._log, self._topic, found.partition)
            if found.run.base < head.start:
                raise trimmed(self._topic, found.partition, found.base, head.start) from exc
            raise CorruptError(
                f"object `{found.run.object}`: is gone, but partition "
                f"`{self._topic.name}/{found.partition}` has its offsets {found.run.base} to "
                f"{found.run.end} there: restore it from a copy, and run `tidelog verify`"
            ) from exc


def _events(batch: pa.RecordBatch) -> Iterator[Event]:
    """Each event of a batch in event columns."""
    columns = batch.select(STORED_SCHEMA.names)
    places = zip(
        batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True
    )
    topic = batch.column("topic")[0].as_py()
    for event, (partition, offset) in zip(events_of(columns, topic, 0, 0), places, strict=True):
        yield msgspec.structs.replace(event, partition=partition, offset=offset)
