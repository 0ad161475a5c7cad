"""Trims a topic: deletes its oldest events. Starts no threads, takes no locks.

A trim that would pass a reader (a consumer, an archive, a pump, a playback) is refused before step
1, unless the caller accepts that (``log.late_readers``). Readers only move forward, except by a
seek, so what the check allows stays allowed.

A trim has three steps. The next trim or sweep finishes what a crash left:

1. Move ``head.start`` forward, by one conditional write for each partition.
2. Delete the rows of runs, journals and amendments that are completely below it
   (``obsolete_rows``), each run or journal with its slot rows in one write. Then narrow the head's
   range of amendments.
3. (In a sweep) Delete the objects that these rows named: step 2 lists them as unused.

| crash after | what it leaves                            | repair                               |
|-------------|-------------------------------------------|--------------------------------------|
| nothing     | no change                                 | none needed                          |
| 1           | rows below the start, which do not count  | the next trim or sweep does step 2   |
| 2, partly   | the same, fewer; no run without its slots | the same                             |
| 2           | objects that a row lists as unused        | the next sweep                       |

A start only moves forward. So after a lost reply the trim reads it, and repeats the step if the
start has not arrived. A run or journal that holds the start keeps its row, so rows cover every
offset from the start to the next. A plan is valid only if nothing was compiled while it was made.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from tidelog.catalog.update import read_stable
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites
from tidelog.coordination.trusted_time import has_own_clock, trusted_now_ms
from tidelog.errors import InternalError, InvalidError, UnavailableError
from tidelog.log.maintenance.obsolete_rows import decode_run, remove_trimmed
from tidelog.log.topics import raise_head, read_head
from tidelog.model import layout
from tidelog.model.event import check_whole, to_iso
from tidelog.model.times import moment_ms
from tidelog.model.topic import Head, Run, Topic

__all__ = [
    "BeforeTime",
    "KeepBytes",
    "ToOffsets",
    "TrimResult",
    "TrimTo",
    "before_time",
    "check_clock",
    "explain_kept",
    "plan_trim",
    "trim_topic",
]

_QUIET_MS = 30 * 24 * 3600 * 1000  # without an event: then even a correct clock looks wrong


@dataclass(frozen=True, slots=True)
class BeforeTime:
    """Trims up to the first run or journal with an event of this time or later."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class ToOffsets:
    """Trims exactly to an offset, in each partition given."""

    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """Keeps the newest runs and journals, by commit time over all partitions, up to this size.

    Deletes only whole runs and journals. Bytes are those in the store, after compression. A journal
    has the commit time of its newest run. A time that contradicts those of its neighbours, since a
    producer's clock was wrong, is replaced by theirs.
    """

    bytes: int


TrimTo = BeforeTime | ToOffsets | KeepBytes


@dataclass(frozen=True, slots=True)
class TrimResult:
    """What a trim deleted in one partition.

    Runs include journals; bytes are those of their objects.
    """

    partition: int
    old_start: int
    new_start: int
    runs: int
    bytes: int
    kept: str = ""  # why it kept events that are older than the given time

    @property
    def events(self) -> int:
        """Returns how many events were deleted, those included that were deleted before."""
        return self.new_start - self.old_start


def trim_topic(
    context: Context,
    topic: Topic,
    to: TrimTo,
    check: Callable[[Mapping[int, int]], None] | None = None,
) -> list[TrimResult]:
    """Deletes the oldest events; returns what was done in each partition that ``to`` selects.

    ``check`` gets the planned starts and may raise to refuse them, such as
    ``late_readers.check_readers``. Before anything is written, raises ``InvalidError`` for an
    unknown partition or an offset past the end. Raises ``NotFoundError`` if the topic was deleted,
    ``UnavailableError`` if nothing was trimmed, and ``UnknownOutcomeError`` if something was or may
    have been: repeat the same trim to complete it.
    """
    starts = _plan(context, topic, to)
    if check is not None:
        check(starts)
    sent = SentWrites()
    context = sent.tracked(context)
    with sent.unknown_if_any(f"trim of `{topic.name}`", "trim again"):
        return [
            _trim(context, topic, partition, start) for partition, start in sorted(starts.items())
        ]


def plan_trim(context: Context, topic: Topic, to: TrimTo) -> list[TrimResult]:
    """Returns what a trim would delete now, in each partition that ``to`` selects.

    Raises as :func:`trim_topic` does before it writes.
    """
    return [
        _planned(context, topic, partition, start)
        for partition, start in sorted(_plan(context, topic, to).items())
    ]


def _planned(context: Context, topic: Topic, partition: int, start: int) -> TrimResult:
    head, _ = read_head(context, topic, partition)
    where = layout.topic_partition(topic.incarnation, partition)
    runs = stored = 0
    for kind in _kinds(head):
        for row in context.catalog.scan(where, *kind):
            run = decode_run(row, topic, partition)
            if run.end > start:
                break
            if run.end > head.start:
                runs, stored = runs + 1, stored + run.byte_end - run.byte_start
    return TrimResult(partition, head.start, max(head.start, start), runs, stored)


def explain_kept(
    context: Context, topic: Topic, to: TrimTo, done: Iterable[TrimResult]
) -> list[TrimResult]:
    """Returns results that say why a trim to a time kept all events of a partition, if older."""
    if not isinstance(to, BeforeTime):
        return list(done)
    return [
        each if each.events else replace(each, kept=_why_kept(context, topic, each.partition, to))
        for each in done
    ]


def _why_kept(context: Context, topic: Topic, partition: int, to: BeforeTime) -> str:
    head, _ = read_head(context, topic, partition)
    where = layout.topic_partition(topic.incarnation, partition)
    rows = (row for kind in _kinds(head) for row in context.catalog.scan(where, *kind))
    runs = (decode_run(row, topic, partition) for row in rows)
    first = next((run for run in runs if run.end > head.start), None)
    if first is None or first.first_ms >= to.time_ms:
        return ""
    return (
        f"the first run has {first.count:,} events, from {to_iso(first.first_ms)} to "
        f"{to_iso(first.last_ms)}: only whole runs before the time are deleted"
    )


def before_time(context: Context, topic: Topic, before: str) -> BeforeTime:
    """Returns where a trim to a time ends: ISO 8601, or relative such as ``-30d``.

    ``InvalidError``, also for a relative time where the clock cannot be trusted.
    """
    now_ms = trusted_now_ms(context)
    if not before[:1].isdigit():
        check_clock(context, topic, now_ms)
    return BeforeTime(moment_ms(before, now_ms))


def check_clock(context: Context, topic: Topic, now_ms: int) -> None:
    """Raises ``InvalidError`` if nothing supports ``now_ms`` as the time from which an age counts.

    A folder has no clock of its own. If this machine's clock is far ahead of everything that the
    topic has recorded, it may have jumped, and events that are minutes old would look a year old. A
    trim to a date does not depend on the clock.
    """
    newest_ms = max(
        (_newest_ms(context, topic, each) for each in range(topic.partitions)), default=-1
    )
    if has_own_clock(context.store) or newest_ms < 0 or now_ms - newest_ms <= _QUIET_MS:
        return
    raise InvalidError(
        f"trim of `{topic.name}`: this machine's clock says {to_iso(now_ms)}, and the newest event "
        f"was stored at {to_iso(newest_ms)}: check the clock; if it is right, give a date instead "
        "of an age"
    )


def _newest_ms(context: Context, topic: Topic, partition: int) -> int:
    """Returns when the newest run or journal of a partition was committed; -1 if there is none."""
    where = layout.topic_partition(topic.incarnation, partition)
    found = -1
    for kind in ("run", "journal"):
        for row in context.catalog.scan(where, f"{kind}/", f"{kind}0", limit=1, reverse=True):
            found = max(found, decode_run(row, topic, partition).committed_ms)
    return found


def _plan(context: Context, topic: Topic, to: TrimTo) -> dict[int, int]:
    """Returns where each partition will start; plans again if something was compiled meanwhile."""
    if isinstance(to, ToOffsets):
        found = to.offsets.items()
        return {int(p): _check_offset(context, topic, p, offset) for p, offset in found}

    def plan() -> dict[int, int] | None:
        heads = _heads(context, topic)
        if isinstance(to, BeforeTime):
            starts = {
                p: _start_at(context, topic, p, head, to.time_ms) for p, head in heads.items()
            }
        else:
            starts = _starts_of_newest(context, topic, heads, to.bytes)
        now = _heads(context, topic)
        is_same = all(now[p].compiled == head.compiled for p, head in heads.items())
        return starts if is_same else None

    busy = UnavailableError(f"topic `{topic.name}`: is being compiled: trim again")
    return read_stable(context, plan, busy)


def _heads(context: Context, topic: Topic) -> dict[int, Head]:
    return {p: read_head(context, topic, p)[0] for p in range(topic.partitions)}


def _trim(context: Context, topic: Topic, partition: int, start: int) -> TrimResult:
    def raised(head: Head) -> Head:
        if start > head.next:
            raise InternalError(
                f"partition `{topic.name}/{partition}`: to be trimmed to {start}, next is "
                f"{head.next}"
            )
        return msgspec.structs.replace(head, start=max(head.start, start))

    before, after = raise_head(context, topic, partition, raised)
    removed = remove_trimmed(context, topic, partition, after, before.start)
    return TrimResult(partition, before.start, after.start, removed.runs, removed.bytes)


def _check_offset(context: Context, topic: Topic, partition: int, offset: int) -> int:
    topic.check_partition(partition)
    offset = check_whole(f"partition `{topic.name}/{partition}`: its new start", offset)
    head, _ = read_head(context, topic, partition)
    if not 0 <= offset <= head.next:
        raise InvalidError(
            f"partition `{topic.name}/{partition}`: cannot start at offset {offset}, its next "
            f"one is {head.next}: give 0 to {head.next}"
        )
    return offset


def _start_at(context: Context, topic: Topic, partition: int, head: Head, time_ms: int) -> int:
    """Returns the end of the leading journals and runs that are older than a time."""
    where = layout.topic_partition(topic.incarnation, partition)
    start = head.start
    for kind in _kinds(head):
        for row in context.catalog.scan(where, *kind):
            run = decode_run(row, topic, partition)
            if run.end > start:
                if run.last_ms >= time_ms:
                    return start
                start = run.end
    return start


def _starts_of_newest(
    context: Context, topic: Topic, heads: Mapping[int, Head], kept: int
) -> dict[int, int]:
    """Returns the starts that keep the newest runs of all partitions, as many as fit.

    It counts from the newest end, so two concurrent trims get the same answer, and what an older
    trim left behind costs nothing.
    """
    if check_whole(f"topic `{topic.name}`: bytes to keep", kept) < 0:
        raise InvalidError(f"topic `{topic.name}`: keep {kept} bytes: give 0 or more")
    starts = {partition: head.next for partition, head in heads.items()}
    newest = heapq.merge(
        *(_newest_runs(context, topic, p, head, kept) for p, head in heads.items()),
        key=lambda found: found[0],
        reverse=True,
    )
    for _, partition, run in newest:
        kept -= run.byte_end - run.byte_start
        if kept < 0:
            break
        # A run that was committed after the head was read does not move the start past it.
        starts[partition] = min(starts[partition], max(run.base, heads[partition].start))
    else:
        return {partition: head.start for partition, head in heads.items()}  # everything fits
    return starts


def _newest_runs(
    context: Context, topic: Topic, partition: int, head: Head, kept: int
) -> list[tuple[int, int, Run]]:
    """Returns the newest runs of a partition up to the first that does not fit into ``kept`` bytes.

    Newest first, each with its commit time and the partition.
    """
    found: list[Run] = []
    for run in _runs_backwards(context, topic, partition, head):
        found.append(run)
        kept -= run.byte_end - run.byte_start
        if kept < 0:
            break
    times = _in_order([run.committed_ms for run in reversed(found)])
    return [(time, partition, run) for time, run in zip(reversed(times), found, strict=True)]


def _in_order(times: list[int]) -> list[int]:
    """Returns times that never go back: of those that contradict others, the fewest are replaced.

    Commits are in the order of their offsets, so where times go back, a producer's clock was wrong.
    One such time must not make all runs before it look as old, or as new. A replaced time is that
    of the last right one before it.
    """
    ends: list[int] = []  # the lowest last time of a sequence of each length, and its index
    lasts: list[int] = []
    before: list[int] = []  # for each time, the index of the one before it in its sequence
    for index, time in enumerate(times):
        length = bisect_right(ends, time)
        before.append(lasts[length - 1] if length else -1)
        ends[length : length + 1] = [time]
        lasts[length : length + 1] = [index]
    right: set[int] = set()
    index = lasts[-1] if lasts else -1
    while index >= 0:
        right.add(index)
        index = before[index]
    found: list[int] = []
    latest = times[min(right)] if right else 0
    for index, time in enumerate(times):
        latest = time if index in right else latest
        found.append(latest)
    return found


def _runs_backwards(context: Context, topic: Topic, partition: int, head: Head) -> Iterator[Run]:
    where = layout.topic_partition(topic.incarnation, partition)
    for first, _ in reversed(_kinds(head)):
        end = "run0" if first.startswith("run/") else layout.journal_row(head.journaled)
        for row in context.catalog.scan(where, first, end, reverse=True):
            run = decode_run(row, topic, partition)
            if run.end <= head.start:
                return
            yield run


def _kinds(head: Head) -> list[tuple[str, str]]:
    """Returns the ranges of rows that count: journals, then the runs that follow them."""
    return [
        ("journal/", layout.journal_row(head.journaled)),
        (layout.run_row(head.journaled), layout.run_row(head.next)),
    ]
