"""Runs a playback from beginning to end: what was pinned, at its speed, lot by lot.

``session`` has the steps of a named playback.

:func:`paced` keeps its speed, and :class:`SlotCounter` counts its slots.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.clock import Clock
from tidelog.codec.event_batch import EVENT_SCHEMA, one_batch
from tidelog.codec.numbers import numbers_of
from tidelog.connectors.sink import Lot, PlaybackSink, lots_of
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.playback import Cursor, Pin, PlaybackState
from tidelog.model.topic import Topic
from tidelog.playback.merge import play, times_of
from tidelog.playback.session import NamedPlayback

__all__ = [
    "Playback",
    "PlaybackOptions",
    "PlaybackResult",
    "SlotCount",
    "SlotCounter",
    "check_speed",
    "opened",
    "paced",
    "run_named",
    "run_playback",
    "split_at",
]

_TOGETHER_S = 0.005  # events due within this go out together
_SOON_S = 1e-6  # too short for a pause
_LOOK_S = 0.2  # how often a pause checks for a stop


def check_speed(text: str) -> float | None:
    """Parses a factor; None for ``max``. Raises ``InvalidError``."""
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise InvalidError(f"speed `{text}`: give max, 1 for as it happened, or another factor")
    return speed


def paced(
    batches: Iterable[pa.RecordBatch],
    speed: float | None,
    clock: Clock,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[pa.RecordBatch]:
    """Yields the batches, cut so that each event goes out when due, relative to the first one.

    Pauses are divided by ``speed``. A slow consumer gets larger batches and loses nothing. Ends
    early if ``stopped`` returns True.
    """
    began: tuple[float, int] | None = None
    for batch in batches:
        if stopped():
            return
        if speed is None or batch.num_rows == 0:
            yield batch
            continue
        times = times_of(batch)
        if began is None:
            began = clock.monotonic_s(), int(times[0])
        due_s = began[0] + (times - began[1]) / (1000 * speed)
        at = 0
        while at < batch.num_rows:
            if not _wait_until(float(due_s[at]), clock, stopped):
                return
            now_s = max(clock.monotonic_s(), float(due_s[at])) + _TOGETHER_S
            end = int(np.searchsorted(due_s, now_s, "right"))
            yield batch.slice(at, end - at)
            at = end


class SlotCount(NamedTuple):
    """What one slot contained; ``first_ms`` is None for an empty one."""

    slot_ms: int
    first_ms: int | None
    events: int


class SlotCounter:
    """Counts events by slot as they go out."""

    def __init__(self, slot_ms: int, start_ms: int, end_ms: int, empty: bool = False) -> None:
        self._slot_ms = slot_ms
        self._next_ms = start_ms // slot_ms * slot_ms  # the first slot that is not reported yet
        self._end_ms = end_ms
        self._empty = empty
        self._open: SlotCount | None = None  # more may come
        self.slots = 0  # with events

    def add(self, batch: pa.RecordBatch) -> Iterator[SlotCount]:
        """Yields the slots that a batch ends and, if wanted, empty ones in between."""
        times = times_of(batch)
        numbers = times // self._slot_ms
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        counts = np.diff(firsts, append=len(times))
        starts = numbers[firsts] * self._slot_ms
        columns = (starts.tolist(), times[firsts].tolist(), counts.tolist())
        found = list(map(SlotCount, *columns))
        if self._open is not None and found and found[0].slot_ms == self._open.slot_ms:
            total = self._open.events + found[0].events
            found[0] = SlotCount(self._open.slot_ms, self._open.first_ms, total)
        elif self._open is not None:
            found.insert(0, self._open)
        self.slots += len(found) - (self._open is not None)
        self._open = found.pop() if found else None
        return self._with_empty(found)

    def rest(self, finished: bool = True) -> Iterator[SlotCount]:
        """Yields the last slot, and empty ones up to the end if the playback is finished."""
        if self._open is not None:
            yield from self._with_empty([self._open])
            self._open = None
        if finished:
            yield from self._empty_ones(self._end_ms)

    def _with_empty(self, found: list[SlotCount]) -> Iterator[SlotCount]:
        if not self._empty:
            yield from found
            return
        for slot in found:
            yield from self._empty_ones(slot.slot_ms)
            yield slot
            self._next_ms = slot.slot_ms + self._slot_ms

    def _empty_ones(self, before_ms: int) -> Iterator[SlotCount]:
        if self._empty:
            for slot_ms in range(self._next_ms, before_ms, self._slot_ms):
                yield SlotCount(slot_ms, None, 0)


def _wait_until(due_s: float, clock: Clock, stopped: Callable[[], bool]) -> bool:
    """Waits. Returns whether the time has come; False if stopped."""
    while (left_s := due_s - clock.monotonic_s()) > _SOON_S:
        if stopped():
            return False
        clock.sleep(min(left_s, _LOOK_S))
    return not stopped()


@dataclass(frozen=True)
class PlaybackOptions:
    """How to run a playback."""

    speed: float | None = None  # a factor; None: as fast as possible
    empty_slots: bool = False  # report them too
    on_slot: Callable[[SlotCount], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False


@dataclass
class PlaybackResult:
    """What one process has played."""

    events: int = 0
    slots: int = 0  # with events
    last: Cursor | None = None  # the last event that is out
    left_out: int = 0  # events skipped because they were erased from the target
    finished: bool = False
    before: PlaybackState | None = None  # of a named playback that another run had finished


@dataclass(frozen=True)
class Playback:
    """What to play, and with what."""

    context: Context
    topic: Topic
    pin: Pin
    pool: Executor | None = None
    how: PlaybackOptions = field(default_factory=PlaybackOptions)

    def batches(self, after: Cursor | None = None) -> Generator[pa.RecordBatch, None, None]:
        """Yields what is left after a cursor, by time."""
        return play(self.context, self.topic, self.pin, after=after, pool=self.pool)

    def span(self) -> contextlib.AbstractContextManager[None]:
        """Returns a trace span around the playback."""
        return self.context.spans.span("tidelog.playback", topic=self.topic.name)

    def put(self, lot: Lot, sink: PlaybackSink) -> int:
        """Puts a lot, in its own span. Returns how many of its events were skipped as erased."""
        with self.context.spans.span("tidelog.put", events=lot.batch.num_rows):
            return sink.put(lot) or 0

    def lots(
        self,
        batches: Iterator[pa.RecordBatch],
        number: int,
        sink: PlaybackSink,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> Iterator[Lot]:
        """Yields lots of the sink's size when they are due, numbered from ``number``."""

        def ended() -> bool:
            return self.how.stopped() or is_lost()

        for batch in paced(batches, self.how.speed, self.context.clock, ended):
            for part in lots_of(batch, sink):
                lot = Lot(number, part)
                yield lot
                number = lot.end
                if ended():
                    return


def run_playback(playback: Playback, sink: PlaybackSink) -> PlaybackResult:
    """Plays everything, or until stopped. What was put is out; it cannot be resumed exactly."""
    told = _Progress(playback, None)
    with playback.span(), contextlib.closing(playback.batches()) as batches:
        for lot in playback.lots(batches, 0, sink):
            told.add(lot, playback.put(lot, sink))
    return told.done()


def run_named(
    playback: Playback, named: NamedPlayback, open_sink: Callable[[], PlaybackSink]
) -> PlaybackResult:
    """Plays what is left of a playback that we own, or until stopped.

    Raises ``FencedError`` if another process takes it over.
    """
    try:
        with named.beating() as lost, opened(open_sink) as sink:
            played = _play_rest(playback, named, sink, lost.is_set)
            reached = sink.reached()
    except Exception:
        named.release(lot_is_out=False)
        raise
    if played.finished:
        named.finish(reached)
    else:
        named.release(lot_is_out=True, reached=reached)
    return played


@contextlib.contextmanager
def opened(open_sink: Callable[[], PlaybackSink]) -> Iterator[PlaybackSink]:
    """Yields a sink, and closes it at the end; as failed if the body fails."""
    sink = open_sink()
    try:
        yield sink
    except BaseException:
        sink.close(failed=True)
        raise
    sink.close()


def split_at(
    batches: Iterator[pa.RecordBatch], until: Cursor
) -> tuple[pa.RecordBatch | None, Iterator[pa.RecordBatch]]:
    """Returns everything up to an event as one batch, if any, and what comes after it."""
    before: list[pa.RecordBatch] = []
    after: list[pa.RecordBatch] = []
    for batch in batches:
        count = _rows_up_to(batch, until)
        before.append(batch.slice(0, count))
        if count < batch.num_rows:
            after.append(batch.slice(count))
            break
    first = one_batch(before, EVENT_SCHEMA)
    return first if first.num_rows else None, itertools.chain(after, batches)


def _play_rest(
    playback: Playback, named: NamedPlayback, sink: PlaybackSink, is_lost: Callable[[], bool]
) -> PlaybackResult:
    state = named.state
    number = state.number
    told = _Progress(playback, state.cursor)
    with playback.span(), contextlib.closing(playback.batches(state.cursor)) as batches:
        left: Iterator[pa.RecordBatch] = batches
        if state.until is not None:
            first, left = split_at(batches, state.until)
            named.beat()  # the lot is intended, so it must still be ours
            if first is not None:
                lot = Lot(number, first, state.until_number)
                told.add(lot, playback.put(lot, sink))
            number = state.until_number
        for lot in playback.lots(left, number, sink, is_lost):
            named.intend(lot.last, lot.end, sink.reached())
            told.add(lot, playback.put(lot, sink))
        if is_lost():
            named.beat()  # raises if it is not ours
    return told.done()


def _rows_up_to(batch: pa.RecordBatch, until: Cursor) -> int:
    """Returns how many events of a batch are not after ``until``."""
    times = times_of(batch)
    places, offsets = (numbers_of(batch.column(name)) for name in ("partition", "offset"))
    tied = (places < until.partition) | ((places == until.partition) & (offsets <= until.offset))
    return int(np.count_nonzero((times < until.time_ms) | ((times == until.time_ms) & tied)))


class _Progress:
    """Counts what is out, and reports each slot."""

    def __init__(self, playback: Playback, after: Cursor | None) -> None:
        times = playback.pin.range
        start_ms = times.start_ms if after is None else after.time_ms
        self._how = playback.how
        self._counter = SlotCounter(
            playback.topic.slot_ms, start_ms, times.end_ms, self._how.empty_slots
        )
        self._played = PlaybackResult(last=after)

    def add(self, lot: Lot, left_out: int) -> None:
        self._played.events += lot.batch.num_rows
        self._played.left_out += left_out
        self._played.last = lot.last
        for slot in self._counter.add(lot.batch):
            self._how.on_slot(slot)

    def done(self) -> PlaybackResult:
        self._played.finished = not self._how.stopped()
        for slot in self._counter.rest(self._played.finished):
            self._how.on_slot(slot)
        self._played.slots = self._counter.slots
        return self._played
