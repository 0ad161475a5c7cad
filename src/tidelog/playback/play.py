"""The events of all partitions of a topic by time, as Arrow from end to end.

Compiling goes on beside it: when journals have taken the place of runs, it opens its scans again
after the last event that it has given out. Amendments are seen that were made before it began, and
later ones where their runs were not loaded yet.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor

import msgspec
import pyarrow as pa

from tidelog.codec.events import STORED_SCHEMA, bad_text, events_of
from tidelog.codec.journal import Group
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.log.base import Log
from tidelog.log.read import lost_object
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.playback import Cursor, Pin, Time, TimeRange, time_range
from tidelog.model.topic import Topic
from tidelog.playback.ahead import Ahead, Found
from tidelog.playback.held import Rows, Wanted
from tidelog.playback.load import Loader
from tidelog.playback.pin import AsOf, pin_topic, trimmed
from tidelog.playback.standing import Standing, SwappedError
from tidelog.playback.windows import READERS, Bounds, Windows
from tidelog.pool import Pool

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
    with Pool(READERS, "tidelog-playback") as pool:
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
    is_over = False
    while not is_over:
        with contextlib.closing(_Playing(log, topic, pin, after, pool)) as playing:
            try:
                for batch in playing.batches(bounds or Bounds()):
                    after = _last(batch)
                    yield batch
                is_over = True
            except SwappedError:
                continue  # events stay where they are, so it goes on after the last one


def _with_pool(log: Log, topic: Topic, pin: Pin) -> Iterator[pa.RecordBatch]:
    with Pool(READERS, "tidelog-playback") as pool:
        yield from play(log, topic, pin, pool=pool)


class _Playing:
    """A playback from a cursor on, as long as nothing is compiled: what is wanted, and where."""

    def __init__(
        self, log: Log, topic: Topic, pin: Pin, after: Cursor | None, pool: Executor | None
    ) -> None:
        self._topic = topic
        self._pin = pin
        self._after = after
        self._pool = pool
        start_ms = pin.range.start_ms if after is None else after.time_ms
        self._times = TimeRange(start_ms, max(start_ms, pin.range.end_ms))
        self._standing = Standing(log, topic)
        self._loader = Loader(log.store, topic.name)
        self._windows: Windows | None = None

    def batches(self, bounds: Bounds) -> Iterator[pa.RecordBatch]:
        """All that is left. ``SwappedError`` when it is to be opened again."""
        ahead = Ahead(self._standing, self._pin, self._times, self._groups, self._pool)
        end_ms = self._times.end_ms
        windows = Windows(self._topic.name, ahead, self._load, end_ms, bounds, self._pool)
        self._windows = windows
        return windows.batches()

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._windows is not None:
            self._windows.stop()

    def _groups(self, found: Found) -> Sequence[Group]:
        try:
            return self._loader.groups(found)
        except NotFoundError as exc:
            raise self._lost(found, exc) from exc

    def _load(self, found: Found) -> Rows:
        """The events of a run that are wanted."""
        partition = found.partition
        wanted = Wanted(
            partition=partition,
            start_ms=self._times.start_ms,
            end_ms=self._times.end_ms,
            start=self._pin.starts[partition],
            end=self._pin.ends[partition],
            after=self._after,
        )
        head = self._standing.recent(partition)
        while True:
            amendments = self._standing.amendments(partition, found.base, found.end, head)
            try:
                return self._loader.load(found, wanted, amendments)
            except NotFoundError as exc:
                before, head = head, self._standing.check(partition)
                if head.amendments == before.amendments:  # else a value was replaced, and swept
                    raise self._lost(found, exc) from exc

    def _lost(self, found: Found, error: NotFoundError) -> Exception:
        """An object is gone: it was trimmed, or something is wrong. ``SwappedError``."""
        head = self._standing.check(found.partition)
        if found.run.base < head.start:
            return trimmed(self._topic, found.partition, found.base, head.start)
        return lost_object(self._topic.name, found.partition, [found.run], error)


def _last(batch: pa.RecordBatch) -> Cursor:
    """The place of a batch's last event."""
    row = batch.num_rows - 1
    places = (batch.column(name)[row].as_py() for name in ("partition", "offset"))
    return Cursor(batch.column("timestamp")[row].value, *places)


def _events(batch: pa.RecordBatch) -> Iterator[Event]:
    """Each event of a batch in event columns."""
    columns = batch.select(STORED_SCHEMA.names)
    places = zip(
        batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True
    )
    topic = batch.column("topic")[0].as_py()
    try:
        events = events_of(columns, topic, 0, 0)
    except CorruptError as exc:  # which knows no place
        raise bad_text(batch) from exc
    for event, (partition, offset) in zip(events, places, strict=True):
        yield msgspec.structs.replace(event, partition=partition, offset=offset)
