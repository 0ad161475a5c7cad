"""Trimming: the oldest events of a topic are deleted. No threads and no locks here.

A trim that would pass a reader (a consumer, an archive, a pump, a playback) is refused before step
1 unless the caller accepts that (``readers``). Readers only move forward, except by a seek, so what
the check allows stays allowed.

Trim, in three steps; whoever comes next, a trim or a sweep, finishes what a crash left:

1. ``head.start`` moves forward, by one conditional write for each partition
2. the rows of runs, journals and amendments that lie wholly below it are deleted (``leftovers``),
   each run or journal with its slot rows in one write; then the head says where amendments are left
3. (a sweep's work) the objects that no row names any more are deleted

| dies after | what is on disk                            | who repairs it                       |
|------------|--------------------------------------------|--------------------------------------|
| nothing    | all as it was                              | nobody needs to                      |
| 1          | rows below the start, which nobody counts  | the next trim or sweep does step 2   |
| 2, partly  | the same, fewer; no run without its slots  | the same                             |
| 2          | objects that no row names                  | the next sweep                       |

A start only moves forward, so after a lost reply it is enough to read it: it has arrived, or the
step is taken again. A run or journal that holds the start keeps its row, so rows tile from at or
below the start to the next offset. A plan holds only if nothing was compiled while it was made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tidelog.context import Context
from tidelog.coordination.ages import has_own_clock
from tidelog.coordination.outcome import Sent
from tidelog.errors import InternalError, InvalidError, UnavailableError
from tidelog.log.heads import RACE, raise_head
from tidelog.log.maintenance.leftovers import decode_run, remove_trimmed
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import to_iso
from tidelog.model.partition_rows import Head, Run
from tidelog.model.topic import Topic

__all__ = [
    "BeforeTime",
    "KeepBytes",
    "ToOffsets",
    "TrimResult",
    "TrimTo",
    "check_clock",
    "trim_topic",
]

_QUIET_MS = 30 * 24 * 3600 * 1000  # without an event: then a clock that is right looks wrong too


@dataclass(frozen=True, slots=True)
class BeforeTime:
    """Up to the first run or journal with an event of this time or later; whole ones go."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class ToOffsets:
    """Exactly to an offset, for each partition that is named."""

    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """The newest runs and journals stay, by commit time over all partitions; whole ones go.

    Bytes are those in the store, after compression. A journal counts as committed when its newest
    run was.
    """

    bytes: int


TrimTo = BeforeTime | ToOffsets | KeepBytes


@dataclass(frozen=True, slots=True)
class TrimResult:
    """What one partition lost. Runs, journals among them, and bytes are those whose rows this trim
    deleted.
    """

    partition: int
    old_start: int
    new_start: int
    runs: int
    bytes: int


def trim_topic(
    context: Context,
    topic: Topic,
    to: TrimTo,
    check: Callable[[Mapping[int, int]], None] | None = None,
) -> list[TrimResult]:
    """Delete the oldest events; what was done in each partition that ``to`` concerns.

    ``InvalidError`` for a partition that is not there and an offset behind the end, before
    anything is written. ``NotFoundError`` when the topic was deleted. ``check`` gets the planned
    starts and refuses them by an error, such as ``readers.check_readers``. ``UnavailableError``
    when nothing was trimmed, ``UnknownOutcomeError`` when something was or may have been: the same
    trim again completes it.
    """
    starts = _plan(context, topic, to)
    if check is not None:
        check(starts)
    sent = Sent()
    context = sent.noting(context)
    with sent.told(f"trim of `{topic.name}`", "trim again"):
        return [
            _trim(context, topic, partition, start) for partition, start in sorted(starts.items())
        ]


def check_clock(context: Context, topic: Topic, now_ms: int) -> None:
    """Refuse ``now_ms`` as the time from which an age counts, where nothing supports it.

    A folder has no clock of its own. Where this machine's is far ahead of all that the topic has
    recorded, it may have jumped, and events that are minutes old would look a year old.
    ``InvalidError``: a date does not depend on the clock.
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
    """When the newest run or journal of a partition was committed; -1 for none."""
    where = layout.topic_partition(topic.incarnation, partition)
    found = -1
    for kind in ("run", "journal"):
        for row in context.catalog.scan(where, f"{kind}/", f"{kind}0", limit=1, reverse=True):
            found = max(found, decode_run(row, topic, partition).committed_ms)
    return found


def _plan(context: Context, topic: Topic, to: TrimTo) -> dict[int, int]:
    """Where each partition shall start; planned again when something was compiled meanwhile."""
    if isinstance(to, ToOffsets):
        return {p: _checked(context, topic, p, offset) for p, offset in to.offsets.items()}
    for delay_s in RACE.delays_s(context.random):
        heads = _heads(context, topic)
        if isinstance(to, BeforeTime):
            starts = {
                p: _start_at(context, topic, p, head, to.time_ms) for p, head in heads.items()
            }
        else:
            starts = _starts_of_newest(context, topic, heads, to.bytes)
        now = _heads(context, topic)
        if all(now[p].compiled == head.compiled for p, head in heads.items()):
            return starts
        context.clock.sleep(delay_s)
    raise UnavailableError(f"topic `{topic.name}`: is being compiled: trim again")


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


def _checked(context: Context, topic: Topic, partition: int, offset: int) -> int:
    topic.check_partition(partition)
    head, _ = read_head(context, topic, partition)
    if not 0 <= offset <= head.next:
        raise InvalidError(
            f"partition `{topic.name}/{partition}`: cannot start at offset {offset}, its next "
            f"one is {head.next}: give 0 to {head.next}"
        )
    return offset


def _start_at(context: Context, topic: Topic, partition: int, head: Head, time_ms: int) -> int:
    """The end of the leading journals and runs that are older than a time."""
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
    """Go back from the newest runs of all partitions as long as their bytes fit.

    Counting from the newest end, two trims at once come to the same answer, and what an older
    trim left behind costs nothing.
    """
    if kept < 0:
        raise InvalidError(f"topic `{topic.name}`: keep {kept} bytes: give 0 or more")
    starts = {partition: head.next for partition, head in heads.items()}
    newest = heapq.merge(
        *(_runs_backwards(context, topic, p, head) for p, head in heads.items()),
        key=lambda found: found[1].committed_ms,
        reverse=True,
    )
    for partition, run in newest:
        kept -= run.byte_end - run.byte_start
        if kept < 0:
            break
        # A run that was committed since the head was read does not move the start past it.
        starts[partition] = min(starts[partition], max(run.base, heads[partition].start))
    else:
        return {partition: head.start for partition, head in heads.items()}  # all fits
    return starts


def _runs_backwards(
    context: Context, topic: Topic, partition: int, head: Head
) -> Iterator[tuple[int, Run]]:
    where = layout.topic_partition(topic.incarnation, partition)
    for first, _ in reversed(_kinds(head)):
        end = "run0" if first.startswith("run/") else layout.journal_row(head.journaled)
        for row in context.catalog.scan(where, first, end, reverse=True):
            run = decode_run(row, topic, partition)
            if run.end <= head.start:
                return
            yield partition, run


def _kinds(head: Head) -> list[tuple[str, str]]:
    """Where the rows that count stand: journals, then the runs that follow them."""
    return [
        ("journal/", layout.journal_row(head.journaled)),
        (layout.run_row(head.journaled), layout.run_row(head.next)),
    ]
