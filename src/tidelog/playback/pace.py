"""Paces a playback, and counts its slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.clock import Clock
from tidelog.errors import InvalidError

__all__ = ["SlotCount", "SlotCounter", "check_speed", "paced", "times_of"]

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


def times_of(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Returns the event times of a batch, in ms."""
    times: npt.NDArray[np.int64] = batch.column("timestamp").cast(pa.int64()).to_numpy()
    return times


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
