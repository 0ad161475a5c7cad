"""Turns a playback request into a pin: what to play, fixed when the playback begins.

The end of each partition is read once: later events are not part of the playback, so it ends, and
is the same when it is resumed. As of an earlier state, ends are those that the topic had then. The
pin also has the lowest offset that the range needs in each partition, so that a trim which removes
some of it can be distinguished from one that does not.

A journal counts as committed when its newest run was: as of an earlier time, a partition ends where
the journal begins. So compiling makes earlier states coarser, and never wrong.

**Slots.** The runs of a partition that overlap a time range are found by their slot rows. A run is
in the lowest level of slots where it touches at most two (``model.times``). So a lookup reads, for
each level, the rows of the slots that the range overlaps: one range scan, which returns only
existing rows, however long the gaps. Levels without rows cost nothing: reading the next row after a
level's range skips all of them at once.

The scans are lazy, so memory does not grow with the range. They show every run that existed when
they began. Journals may replace runs during the scans, and then there may be new rows before the
time that was reached. So a caller compares the head's ``compiled`` after each read, and opens the
scans again at that time if it has changed (``run_queue.SwapGuard``).

The value of a run's slot row is its end; a journal's also has a ``j``. A row without it below the
head's ``journaled`` is left from a run that a journal replaced.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tidelog.catalog.base import Row
from tidelog.catalog.update import read_stable
from tidelog.connectors.sink import check_playback_sink, remade
from tidelog.context import Context
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.log.topics import find_target, find_topic, read_head
from tidelog.model import layout
from tidelog.model.event import to_iso
from tidelog.model.playback import Floors, Pin, PlaybackPin, TimeRange, time_range
from tidelog.model.times import moment_ms
from tidelog.model.topic import Head, Run, Topic, decode_row, level_count
from tidelog.playback.session import find_playback, start_playback

__all__ = [
    "AsOf",
    "PartitionSlots",
    "PlaybackRequest",
    "SlotEntry",
    "check_needed",
    "parse_as_of",
    "pin_asked",
    "pin_topic",
    "pinned_playback",
    "trimmed",
]

_CLOSE = 8  # up to this ratio of distance to length, one scan reads several runs


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A slot row: a run has, or may have, events in a slot."""

    start_ms: int  # of the slot
    end_ms: int
    base: int  # of the run
    end: int
    is_journal: bool = False


class PartitionSlots:
    """The time index of one partition, for one range; below ``journaled`` there are journals."""

    def __init__(
        self, context: Context, topic: Topic, partition: int, range: TimeRange, journaled: int = 0
    ) -> None:
        self._context = context
        self._journaled = journaled
        self._slot_ms = topic.slot_ms
        self._range = range
        self._where = layout.topic_partition(topic.incarnation, partition)
        self._what = f"`{topic.name}/{partition}`"
        self._levels = list(self._levels_with_rows())

    def by_start(self) -> Iterator[SlotEntry]:
        """Yields all rows by the start of their slots. A run may appear twice."""
        return heapq.merge(*map(self._rows, self._levels), key=attrgetter("start_ms"))

    def by_end(self) -> Iterator[SlotEntry]:
        """Yields all rows by the end of their slots."""
        return heapq.merge(*map(self._rows, self._levels), key=attrgetter("end_ms"))

    def runs(self, listed: Sequence[SlotEntry]) -> dict[int, Run]:
        """Returns the runs of some rows, by base; omits a run whose row is deleted."""
        found: dict[int, Run] = {}
        for is_journal, name in ((False, layout.run_row), (True, layout.journal_row)):
            some = [each for each in listed if each.is_journal == is_journal]
            for group in _close_together(some):
                found |= self._named(name, group[0].base, group[-1].base)
        return {each.base: found[each.base] for each in listed if each.base in found}

    def _named(self, name: Callable[[int], str], first: int, last: int) -> dict[int, Run]:
        """Returns the rows of one kind between two bases."""
        if first == last:
            row = self._context.catalog.get(self._where, name(first))
            rows: Iterable[Row] = [] if row is None else [row]
        else:
            rows = self._context.catalog.scan(self._where, name(first), name(last + 1))
        runs = (decode_row(row.value, Run, f"a run of {self._what}") for row in rows)
        return {run.base: run for run in runs}

    def _levels_with_rows(self) -> Iterator[int]:
        """Yields levels with a row in the range: one read per level that has any row at all."""
        level = 0
        while level < level_count(self._slot_ms) and self._range.start_ms < self._range.end_ms:
            first, end = self._bounds(level)
            row = next(iter(self._context.catalog.scan(self._where, first, "slot0", 1)), None)
            if row is None:
                return
            if row.row < end:
                yield level
                level += 1
            else:
                level = max(level + 1, int(row.row[5:7]))

    def _bounds(self, level: int) -> tuple[str, str]:
        width = self._slot_ms << level
        start = self._range.start_ms // width * width
        last = (self._range.end_ms - 1) // width * width
        return layout.slot_rows(level, start, last)

    def _rows(self, level: int) -> Iterator[SlotEntry]:
        width = self._slot_ms << level
        for row in self._context.catalog.scan(self._where, *self._bounds(level)):
            is_journal = row.value.endswith(b"j")
            try:
                start_ms, base = layout.slot_place(row.row)
                end = int(row.value.removesuffix(b"j"))
            except ValueError as exc:
                raise CorruptError(
                    f"row `{row.row}` of {self._what}: is not a valid slot row ({exc}): keep it, "
                    "and run `tidelog verify`"
                ) from exc
            if is_journal or base >= self._journaled:
                yield SlotEntry(start_ms, start_ms + width, base, end, is_journal)


def floors_of(slots: PartitionSlots, bounds: tuple[int, int], entries: int) -> Floors:
    """Returns the least offsets of ``[start, end)`` that are needed, in few entries."""
    start, end = bounds
    until: list[int] = []
    least: list[int] = []
    rows, each = 0, 1  # how many rows make one entry
    for listed in slots.by_end():
        if listed.base >= end or listed.end <= start:
            continue
        base = max(listed.base, start)
        if rows % each:
            until[-1], least[-1] = listed.end_ms, min(least[-1], base)
        else:
            until.append(listed.end_ms)
            least.append(base)
        rows += 1
        if len(until) > 2 * entries:
            until, least = until[1::2] + until[-1:], [min(p) for p in _pairs(least)]
            each *= 2
    for index in range(len(least) - 2, -1, -1):
        least[index] = min(least[index], least[index + 1])
    return Floors(tuple(until), tuple(least))


def _pairs(values: list[int]) -> Iterator[list[int]]:
    return (values[first : first + 2] for first in range(0, len(values), 2))


def _close_together(listed: Sequence[SlotEntry]) -> Iterator[list[SlotEntry]]:
    """Yields groups of runs so close that one scan is cheaper than many lookups."""
    group: list[SlotEntry] = []
    for each in sorted(listed, key=attrgetter("base")):
        if group and each.base - group[-1].end > _CLOSE * (group[-1].end - group[-1].base):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


_OFFSETS = re.compile(r"\d+:\d+(,\d+:\d+)*", re.ASCII)
_INSIDE = ("topic", "stdout", "null")  # sinks that no other home can share


@dataclass(frozen=True, slots=True)
class PlaybackRequest:
    """A playback as requested; None for what was not given."""

    topic: str
    sink: str
    start: str | None = None
    end: str | None = None
    as_of: str | None = None

    @property
    def texts(self) -> tuple[str, str, str]:
        return self.start or "", self.end or "", self.as_of or ""


def parse_as_of(text: str | None, now_ms: int) -> AsOf:
    """Parses a commit time, or offsets as ``P:O,P:O``. Raises ``InvalidError``."""
    if text is None:
        return None
    if not _OFFSETS.fullmatch(text):
        return moment_ms(text, now_ms)
    pairs = [each.split(":") for each in text.split(",")]
    offsets = {int(partition): int(offset) for partition, offset in pairs}
    if len(offsets) != len(pairs):
        raise InvalidError(f"as-of `{text}`: a partition is named twice: name each once")
    return offsets


def pin_asked(
    context: Context, asked: PlaybackRequest, pool: Executor | None = None
) -> tuple[Topic, Pin]:
    """Returns the topic, and what to play of it."""
    now_ms = context.clock.now_ms()
    times = time_range(asked.start, asked.end, now_ms)
    as_of = parse_as_of(asked.as_of, now_ms)
    topic = find_topic(context, asked.topic)
    return topic, pin_topic(context, topic, times, as_of, pool)


def pinned_playback(
    context: Context, name: str, asked: PlaybackRequest, pool: Executor | None = None
) -> tuple[Topic, PlaybackPin]:
    """Returns the playback with this name, and starts it if there is none.

    Raises ``InvalidError`` if it has other settings, or if its topic or its target topic was
    deleted and created again.
    """
    address = check_playback_sink(asked.sink, named=True)
    target = find_target(context, address.path).incarnation if address.scheme == "topic" else ""
    inside = address.scheme in _INSIDE
    if not inside:
        context.identity.check(f"playback `{name}` to `{asked.sink}`")
    found = find_playback(context, name)
    if found is None:
        topic, pin = pin_asked(context, asked, pool)
        now_ms = context.clock.now_ms()
        home = "" if inside else context.identity.id
        wanted = PlaybackPin(asked.topic, asked.sink, target, asked.texts, pin, now_ms, home=home)
        found = start_playback(context, name, wanted)
    _check_same(context, name, asked, found)
    if not inside:
        what = f"playback `{name}` to `{asked.sink}`"
        context.identity.check_own(what, found.home, "begin another one, under another name")
    topic = find_topic(context, asked.topic)
    for role, there, was in (
        ("topic", topic.incarnation, found.pin.incarnation),
        ("target", target, found.target),
    ):
        if there != was:
            raise remade(name, role)
    return topic, found


def _check_same(context: Context, name: str, asked: PlaybackRequest, found: PlaybackPin) -> None:
    for what, wanted, was in (
        ("topic", asked.topic, found.topic),
        ("sink", asked.sink, found.sink),
    ):
        if wanted != was:
            raise _other(name, what, wanted, was)
    now_ms = context.clock.now_ms()
    times = found.pin.range
    for what, text, said, time_ms in (
        ("start", asked.start, found.asked[0], times.start_ms),
        ("end", asked.end, found.asked[1], times.end_ms),
    ):
        if text not in (None, said) and moment_ms(text or "", now_ms) != time_ms:
            raise _other(name, what, text or "", to_iso(time_ms))
    if asked.as_of not in (None, found.asked[2]):
        raise _other(name, "as-of", asked.as_of or "", found.asked[2] or "none")


def _other(name: str, what: str, wanted: str, was: str) -> InvalidError:
    return InvalidError(
        f"playback `{name}`: began with {what} `{was}`, and is asked for `{wanted}`: leave {what} "
        "out to resume that one, or choose another name"
    )


AsOf = int | Mapping[int, int] | None
"""A commit time in ms, ends by partition (others as they are now), or None for now."""

_ENTRIES = 4_000  # of floors, over all partitions; they must fit into a row


def pin_topic(
    context: Context,
    topic: Topic,
    times: TimeRange,
    as_of: AsOf = None,
    pool: Executor | None = None,
) -> Pin:
    """Pins the ends of a topic, now or as of an earlier state.

    Raises ``InvalidError`` for a missing partition or an end that was never reached. Raises
    ``NotFoundError`` for an end that was trimmed.
    """
    offsets = as_of if isinstance(as_of, Mapping) else {}
    for partition in offsets:
        topic.check_partition(partition)
    each: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    entries = max(1, min(64, _ENTRIES // topic.partitions))

    busy = UnavailableError(f"topic `{topic.name}`: is compiled again and again: try again")

    def pinned(partition: int) -> tuple[int, int, Floors]:
        head, _ = read_head(context, topic, partition)

        def read() -> tuple[int, int, Floors] | None:
            nonlocal head
            end = head.next
            if partition in offsets:
                end = _check_end(topic, partition, head, offsets[partition])
            elif isinstance(as_of, int):
                end = _end_at(context, topic, partition, head, as_of)
            slots = PartitionSlots(context, topic, partition, times, head.journaled)
            floors = floors_of(slots, (head.start, end), entries)
            before, (head, _) = head, read_head(context, topic, partition)
            # Otherwise rows were replaced while they were read.
            return (before.start, end, floors) if head.compiled == before.compiled else None

        return read_stable(context, read, busy)

    starts, ends, floors = zip(*each(pinned, range(topic.partitions)), strict=True)
    return Pin(topic.incarnation, times, starts, ends, floors)


def check_needed(topic: Topic, pin: Pin, partition: int, time_ms: int, head: Head) -> None:
    """Raises ``NotFoundError`` if events from this time on were trimmed since the start.

    ``head`` must be read after the rows: a trim raises the start before it deletes any.
    """
    needed = pin.floors[partition].needed(time_ms)
    if needed is not None and head.start > needed:
        raise trimmed(topic, partition, needed, head.start)


def trimmed(topic: Topic, partition: int, offset: int, start: int) -> NotFoundError:
    return NotFoundError(
        f"playback of `{topic.name}`: offsets {offset} to {start} of partition {partition} were "
        "trimmed while it ran, and may be part of it: begin another playback of what is left",
        partition=partition,
        offset=offset,
        start=start,
    )


def _check_end(topic: Topic, partition: int, head: Head, end: int) -> int:
    if end > head.next or end < 0:
        raise InvalidError(
            f"partition `{topic.name}/{partition}`: as of offset {end}, but it ends at "
            f"{head.next}: give 0 to {head.next}"
        )
    if end < head.start:
        raise NotFoundError(
            f"partition `{topic.name}/{partition}`: as of offset {end}, but all before "
            f"{head.start} was trimmed: give {head.start} to {head.next}",
            partition=partition,
            start=head.start,
        )
    return end


def _end_at(context: Context, topic: Topic, partition: int, head: Head, time_ms: int) -> int:
    """Returns the end at a commit time: a border between runs committed by then, and later ones.

    Uses bisection, so it takes few reads. If clocks of producers differ, there may be several such
    borders, and each is an end that the partition once had.
    """
    low, high = head.start, head.next  # everything before `low` counts, nothing from `high` on
    while low < high:
        middle = (low + high) // 2
        run = _holder(context, topic, partition, head, middle)
        if run is None:
            return low
        if run.committed_ms <= time_ms:
            low = max(run.end, middle + 1)
        else:
            high = max(low, run.base)
    return min(low, head.next)


def _holder(context: Context, topic: Topic, partition: int, head: Head, offset: int) -> Run | None:
    where = layout.topic_partition(topic.incarnation, partition)
    if offset < head.journaled:
        bounds = "journal/", layout.journal_row(offset + 1)
    else:
        bounds = layout.run_row(head.journaled), layout.run_row(offset + 1)
    for row in context.catalog.scan(where, *bounds, 1, reverse=True):
        return decode_row(row.value, Run, f"a run of `{topic.name}/{partition}`")
    return None
