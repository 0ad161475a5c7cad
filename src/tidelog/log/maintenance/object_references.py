"""Reads which objects the rows of a partition need, and which rows a sweep may delete.

Rows come in the order of their keys, so amendments come before journals: if a journal contains an
amendment, it does so for good. Rows of unused objects come last, so an object that another write
removes from a row in the meantime is found in one place or the other. Slot rows are skipped: there
are many, and they name no object.

Journals and runs must cover every offset from the head's start to its next. If they do not, a row
is lost or hidden, and the object that it names would look like garbage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tidelog.catalog.base import Row
from tidelog.catalog.update import read_stable
from tidelog.context import Context
from tidelog.errors import (
    CorruptError,
    InvalidError,
    UnavailableError,
)
from tidelog.log.maintenance.obsolete_rows import UnnamedProducerRow, decode_run
from tidelog.log.maintenance.strays import NotedRow
from tidelog.log.topics import read_head
from tidelog.log.unused_objects import ListedRow
from tidelog.model import layout
from tidelog.model.topic import (
    UNNAMED,
    Amendment,
    Head,
    ProducerState,
    Run,
    Strays,
    Topic,
    UnusedObjects,
    decode_row,
)
from tidelog.store.base import object_exists

__all__ = [
    "KNOWN",
    "AmendmentRow",
    "References",
    "UnknownRowError",
    "check_objects",
    "find_gap",
    "read_references",
    "read_whole",
]


# The rows that a sweep understands. Another module sweeps what a sink has staged
# (``unfinished_writes``).
KNOWN = frozenset(
    {
        "accepted",
        "amend",
        "compile",
        "head",
        "journal",
        "producer",
        "run",
        "sink",
        "slot",
        "staged",
        "stray",
        "unused",
    }
)


class UnknownRowError(InvalidError):
    """A row of an unknown kind, whose references are unknown."""


@dataclass(frozen=True, slots=True)
class AmendmentRow:
    """An amendment's row, without its value."""

    offset: int
    row: str
    version: str
    sequence: int
    at_ms: int
    object: str | None


@dataclass(slots=True)
class References:
    """What one partition's rows say."""

    objects: set[str] = field(default_factory=set)  # that are needed
    spans: list[tuple[int, int]] = field(default_factory=list)  # offsets of journals and runs
    applied: list[AmendmentRow] = field(default_factory=list)  # amendments that a journal contains
    leftovers: set[str] = field(default_factory=set)  # objects of rows that do not count
    has_leftovers: bool = False  # of trims or compiles
    unused: list[ListedRow] = field(default_factory=list)
    noted: list[NotedRow] = field(default_factory=list)  # strays, in partition 0
    producers: list[UnnamedProducerRow] = field(default_factory=list)  # unnamed ones
    newest_ms: int = 0  # the newest time that a commit or a producer has recorded


def read_whole(
    context: Context, topic: Topic, partition: int, head: Head
) -> tuple[Head, References]:
    """Returns the head and all references of a partition, whose journals and runs have no gap.

    Raises ``CorruptError`` if offsets have no row. A compile or a trim may cause a gap while the
    rows are read; both change the head, and then everything is read again.
    """

    def read() -> tuple[Head, References] | None:
        nonlocal head
        found = read_references(context, topic, partition, head)
        gap = find_gap(head, found)
        if gap is None:
            return head, found
        before, (head, _) = head, read_head(context, topic, partition)
        if (head.start, head.journaled, head.compiled) == (
            before.start,
            before.journaled,
            before.compiled,
        ):
            raise CorruptError(
                f"partition `{topic.name}/{partition}`: no row holds offsets {gap[0]} to {gap[1]}, "
                "so the catalog has lost rows: keep everything, and restore the catalog from a copy"
            )
        return None

    busy = UnavailableError(
        f"partition `{topic.name}/{partition}`: is compiled again and again: sweep again"
    )
    return read_stable(context, read, busy)


def check_objects(context: Context, topic: Topic, missing: Collection[str]) -> None:
    """Raises ``CorruptError`` if rows still name one of these objects, and the store lacks it.

    Between a look at the rows and one at the store, a trim or a compile may take a row away, and
    another sweep its object. So the rows that named a missing object are read once more.
    """
    lost = [
        key
        for key in sorted(_named(context, topic).intersection(missing))
        if not object_exists(context.store, key)
    ]
    if lost:
        lost = sorted(_named(context, topic).intersection(lost))
    if lost:
        raise CorruptError(
            f"topic `{topic.name}`: a row names object `{lost[0]}`, which is not there: keep "
            "everything, and restore the store or the catalog from a copy"
        )


def _named(context: Context, topic: Topic) -> set[str]:
    """Returns the objects that rows of a topic name now."""
    named: set[str] = set()
    for partition in range(topic.partitions):
        head, _ = read_head(context, topic, partition)
        named |= read_whole(context, topic, partition, head)[1].objects
    return named


def find_gap(head: Head, found: References) -> tuple[int, int] | None:
    """Returns the first offsets from start to next without a journal or run; None if no gap."""
    at = head.start
    for base, end in sorted(found.spans):
        if base > at:
            return at, min(base, head.next)
        at = max(at, end)
    return (at, head.next) if at < head.next else None


def read_references(context: Context, topic: Topic, partition: int, head: Head) -> References:
    """Returns all references of a partition; the caller has read the head before.

    Raises ``UnknownRowError`` for a row that this version does not know, and ``CorruptError`` for
    one that does not decode.
    """
    found = References()
    pending: list[AmendmentRow] = []
    journals: list[Run] = []
    for row in _rows(context, topic, partition):
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        kind = row.row.partition("/")[0]
        if kind not in KNOWN or kind not in layout.TOPIC_ROW_KINDS:
            raise UnknownRowError(
                f"{what}: is of a kind that this version does not know, so it cannot know what is "
                "referred to: a newer version of tidelog wrote it: update tidelog"
            )
        if kind == "amend":
            _note_amendment(row, what, head, pending, found)
        elif kind == "journal":
            run = decode_run(row, topic, partition)
            _note_run(run, run.end > head.start, found)
            journals.append(run)
        elif kind == "run":
            run = decode_run(row, topic, partition)
            _note_run(run, run.end > head.start and run.base >= head.journaled, found)
        elif kind == "unused":
            objects = decode_row(row.value, UnusedObjects, what).objects
            found.unused.append(ListedRow(row.row, row.version, objects, head.start))
        elif kind == "stray":
            noted = decode_row(row.value, Strays, what)
            found.noted.append(NotedRow(row.row, row.version, noted))
        elif kind == "producer":
            state = decode_row(row.value, ProducerState, what)
            found.newest_ms = max(found.newest_ms, state.seen_ms)
            if row.row.startswith(layout.producer_row(UNNAMED)):
                found.producers.append(UnnamedProducerRow(row.row, row.version, state))
    found.applied = list(_applied(pending, journals))
    return found


def _rows(context: Context, topic: Topic, partition: int) -> Iterator[Row]:
    where = layout.topic_partition(topic.incarnation, partition)
    yield from context.catalog.scan(where, "", "slot/")
    yield from context.catalog.scan(where, "slot0")


def _note_run(run: Run, counts: bool, found: References) -> None:
    found.newest_ms = max(found.newest_ms, run.committed_ms)
    if counts:
        found.objects.add(run.object)
        found.spans.append((run.base, run.end))
    else:
        found.has_leftovers = True
        found.leftovers.add(run.object)


def _note_amendment(
    row: Row, what: str, head: Head, pending: list[AmendmentRow], found: References
) -> None:
    amendment = decode_row(row.value, Amendment, what)
    offset = layout.amend_offset(row.row)
    if offset < head.start:
        found.has_leftovers = True  # deleted with its row, or when a journal contains it
    if amendment.object is not None:
        (found.leftovers if offset < head.start else found.objects).add(amendment.object)
    pending.append(
        AmendmentRow(
            offset, row.row, row.version, amendment.sequence, amendment.at_ms, amendment.object
        )
    )


def _applied(pending: list[AmendmentRow], journals: list[Run]) -> Iterator[AmendmentRow]:
    """Yields the amendments that the journal of their offset contains."""
    bases = [run.base for run in journals]
    for each in pending:
        at = bisect_right(bases, each.offset) - 1
        run = journals[at] if at >= 0 else None
        if run is None or run.journal is None or each.offset >= run.end:
            continue
        if each.sequence <= run.journal.applied:
            yield each
