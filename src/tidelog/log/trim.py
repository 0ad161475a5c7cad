"""Trimming: the oldest events of a topic are given up. No threads and no locks here.

Trim, in three steps; whoever comes next, a trim or a sweep, finishes what a crash left:

1. ``head.start`` moves forward, by one conditional write for each partition
2. the rows of runs that lie wholly below it are deleted, each with its slot rows in one write
3. (a sweep's work) the objects that no row names any more are deleted

| dies after | what is on disk                            | who repairs it                       |
|------------|--------------------------------------------|--------------------------------------|
| nothing    | all as it was                              | nobody needs to                      |
| 1          | rows below the start, which nobody counts  | the next trim or sweep does step 2   |
| 2, partly  | the same, fewer; no run without its slots  | the same                             |
| 2          | objects that no row names                  | the next sweep                       |

A start only moves forward, so after a lost reply it is enough to read it: it has arrived, or the
step is taken again. A run that holds the start keeps its row, so rows tile from at or below the
start to the next offset. Rows of trimmed runs may be deleted twice: offsets are never reused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InternalError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.base import Log
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.backoff import Backoff
from tidelog.model.run import Head, Run, decode_row, encode_row
from tidelog.model.slot import slots_of
from tidelog.model.topic import Topic

__all__ = [
    "RACE",
    "BeforeTime",
    "KeepBytes",
    "Removed",
    "ToOffsets",
    "TrimTo",
    "Trimmed",
    "raise_head",
    "remove_trimmed",
    "trim_topic",
]

RACE = Backoff(limits.COMMIT_ATTEMPTS, base_ms=1, max_ms=200)  # against producers on one row
_RUNS_AT_ONCE = 500  # run rows whose slot rows are looked for together
_SLOTS_APART = 16  # slots further from each other than this are looked for one by one


@dataclass(frozen=True, slots=True)
class BeforeTime:
    """Up to the first run that holds an event of this time or later; whole runs go."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class ToOffsets:
    """Exactly to an offset, for each partition that is named."""

    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """The newest runs stay, by commit time over all partitions, as many as fit; whole runs go.

    Bytes are those in the store, after compression.
    """

    bytes: int


TrimTo = BeforeTime | ToOffsets | KeepBytes


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What one partition lost. Runs and bytes are those whose rows this trim deleted."""

    partition: int
    old_start: int
    new_start: int
    runs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Rows that were deleted: how many runs, and how many bytes of objects they named."""

    runs: int = 0
    bytes: int = 0


def trim_topic(log: Log, topic: Topic, to: TrimTo) -> list[Trimmed]:
    """Give up the oldest events; what was done in each partition that ``to`` concerns.

    ``InvalidError`` for a partition that is not there and an offset behind the end, before
    anything is written. ``NotFoundError`` when the topic was deleted.
    """
    starts = _plan(log, topic, to)
    return [_trim(log, topic, partition, start) for partition, start in sorted(starts.items())]


def raise_head(
    log: Log, topic: Topic, partition: int, raised: Callable[[Head], Head]
) -> tuple[Head, Head]:
    """Change a head by what only grows; the head as it was found, and as it is now.

    ``raised`` gives the head as it should be, or the same one where it is so already: a conflict
    and a lost reply are both settled by asking it again. ``NotFoundError`` for a deleted topic.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    found: Head | None = None
    for delay_s in RACE.delays_s(log.random):
        head, version = read_head(log, topic, partition)
        if found is None:
            found = head
        if head.closed:
            raise NotFoundError(f"topic `{topic.name}`: was deleted: nothing was changed")
        wanted = raised(head)
        if wanted == head:
            return found, head
        try:
            change = Put("head", encode_row(wanted), expect=version)
            log.catalog.write(where, change, write_id=log.ids.new())
        except (ConflictError, UnknownOutcomeError):
            log.clock.sleep(delay_s)
        else:
            return found, wanted
    raise UnavailableError(
        f"partition `{topic.name}/{partition}`: too many writers at once: try again"
    )


def remove_trimmed(log: Log, topic: Topic, partition: int, start: int) -> Removed:
    """Step 2: delete the rows of runs that lie wholly below ``start``, which must be trimmed."""
    where = layout.topic_partition(topic.incarnation, partition)
    runs = total = 0
    at = 0
    while True:
        rows = log.catalog.scan(where, layout.run_row(at), layout.run_row(start), _RUNS_AT_ONCE)
        below = [run for row in rows if (run := _decode(row, topic, partition)).end <= start]
        if not below:
            return Removed(runs, total)
        for chunk in _chunks(below, _slot_rows(log, topic, where, below)):
            _delete_rows(log, where, chunk)
        runs += len(below)
        total += sum(_size(run) for run in below)
        at = below[-1].base + 1


def _plan(log: Log, topic: Topic, to: TrimTo) -> dict[int, int]:
    """Where each partition shall start."""
    match to:
        case ToOffsets(offsets):
            return {p: _checked(log, topic, p, offset) for p, offset in offsets.items()}
        case BeforeTime(time_ms):
            return {p: _start_at(log, topic, p, time_ms) for p in range(topic.partitions)}
        case KeepBytes(kept):
            return _starts_of_newest(log, topic, kept)


def _trim(log: Log, topic: Topic, partition: int, start: int) -> Trimmed:
    def raised(head: Head) -> Head:
        if start > head.next:
            raise InternalError(
                f"partition `{topic.name}/{partition}`: to be trimmed to {start}, next is "
                f"{head.next}"
            )
        return msgspec.structs.replace(head, start=max(head.start, start))

    before, after = raise_head(log, topic, partition, raised)
    removed = remove_trimmed(log, topic, partition, after.start)
    return Trimmed(partition, before.start, after.start, removed.runs, removed.bytes)


def _checked(log: Log, topic: Topic, partition: int, offset: int) -> int:
    topic.check_partition(partition)
    head, _ = read_head(log, topic, partition)
    if not 0 <= offset <= head.next:
        raise InvalidError(
            f"partition `{topic.name}/{partition}`: cannot start at offset {offset}, its next "
            f"one is {head.next}: give 0 to {head.next}"
        )
    return offset


def _start_at(log: Log, topic: Topic, partition: int, time_ms: int) -> int:
    """The end of the leading runs that are older than a time."""
    head, _ = read_head(log, topic, partition)
    where = layout.topic_partition(topic.incarnation, partition)
    start = head.start
    for row in log.catalog.scan(where, "run/", layout.run_row(head.next)):
        run = _decode(row, topic, partition)
        if run.end > start:
            if run.last_ms >= time_ms:
                break
            start = run.end
    return start


def _starts_of_newest(log: Log, topic: Topic, kept: int) -> dict[int, int]:
    """Go back from the newest runs of all partitions as long as their bytes fit.

    Counting from the newest end, two trims at once come to the same answer, and what an older
    trim left behind costs nothing.
    """
    if kept < 0:
        raise InvalidError(f"topic `{topic.name}`: keep {kept} bytes: give 0 or more")
    heads = {p: read_head(log, topic, p)[0] for p in range(topic.partitions)}
    starts = {partition: head.next for partition, head in heads.items()}
    newest = heapq.merge(
        *(_runs_backwards(log, topic, p, head.start) for p, head in heads.items()),
        key=lambda found: found[1].committed_ms,
        reverse=True,
    )
    for partition, run in newest:
        kept -= _size(run)
        if kept < 0:
            break
        # A run that was committed since the head was read does not move the start past it.
        starts[partition] = min(starts[partition], max(run.base, heads[partition].start))
    else:
        return {partition: head.start for partition, head in heads.items()}  # all fits
    return starts


def _runs_backwards(
    log: Log, topic: Topic, partition: int, start: int
) -> Iterator[tuple[int, Run]]:
    where = layout.topic_partition(topic.incarnation, partition)
    for row in log.catalog.scan(where, "run/", "run0", reverse=True):
        run = _decode(row, topic, partition)
        if run.end <= start:
            return
        yield partition, run


def _slot_rows(log: Log, topic: Topic, where: str, runs: Sequence[Run]) -> dict[int, list[str]]:
    """The slot rows that runs have, by the run's base."""
    bases: dict[str, int] = {}
    levels: dict[int, set[int]] = {}
    for run in runs:
        level, starts = slots_of(run.first_ms, run.last_ms, topic.slot_ms)
        levels.setdefault(level, set()).update(starts)
        bases |= {layout.slot_row(level, start, run.base, ""): run.base for start in starts}
    found: dict[int, list[str]] = {}
    for level, slots in levels.items():
        for first_ms, last_ms in _spans(sorted(slots), _SLOTS_APART * (topic.slot_ms << level)):
            for row in log.catalog.scan(where, *layout.slot_rows(level, first_ms, last_ms)):
                base = bases.get(row.row[: row.row.rindex("/") + 1])
                if base is not None:
                    found.setdefault(base, []).append(row.row)
    return found


def _spans(slots: Sequence[int], apart_ms: int) -> list[tuple[int, int]]:
    """First and last of each group of slots that lie close together."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and slot - spans[-1][1] <= apart_ms:
            spans[-1] = (spans[-1][0], slot)
        else:
            spans.append((slot, slot))
    return spans


def _chunks(runs: Sequence[Run], slots: Mapping[int, Sequence[str]]) -> Iterator[list[Change]]:
    """Deletes in writes of the largest size, a run never apart from its slots."""
    chunk: list[Change] = []
    for run in runs:
        rows = [layout.run_row(run.base), *slots.get(run.base, ())]
        if len(chunk) + len(rows) > limits.CHANGES_MAX:
            yield chunk
            chunk = []
        chunk += [Delete(row) for row in rows]
    yield chunk


def _delete_rows(log: Log, where: str, changes: Sequence[Change]) -> None:
    """Deletes that expect nothing may land twice, so a lost reply is no matter."""
    delays = log.backoff.delays_s(log.random)
    while True:
        try:
            log.catalog.write(where, *changes, write_id=log.ids.new())
            return
        except UnknownOutcomeError:
            delay_s = next(delays, None)
            if delay_s is None:
                raise
            log.clock.sleep(delay_s)


def _decode(row: Row, topic: Topic, partition: int) -> Run:
    what = f"row `{row.row}` of `{topic.name}/{partition}`"
    run = decode_row(row.value, Run, what)
    if row.row != layout.run_row(run.base):
        raise CorruptError(f"{what}: holds the run of offset {run.base}: keep it, and run verify")
    return run


def _size(run: Run) -> int:
    return run.byte_end - run.byte_start
