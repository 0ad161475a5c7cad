"""Rows that say which objects a partition needs no more, and what they prove together.

Every write that takes away the last mention of an object in a partition also puts a row
``unused/<id>`` that lists it. So an object is garbage because a row says so, never because no row
names it: an object that no row names or lists was never committed, or the catalog has lost that
commit. A process that will not commit what it has uploaded lists that too: in the write that
replaces it, or apart. Only what processes have uploaded that died stays unlisted. A sweep deletes
the objects first and the row after them, so a row that is gone means that its objects are.

A segment may have events of several partitions, and its key says of how many. Each of them commits
one of its copies, so the segment is settled when that many partitions name or list a copy. Journals
and values of updates belong to one partition. A compile lists the journals that it will make before
it makes them, under one name for all, and its swap deletes that row: so the journals of a compile
that died are garbage too, and what they hold of erased events goes with the next sweep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tidelog.catalog.base import Check, Delete, Put
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.topics import read_head
from tidelog.model import layout, limits
from tidelog.model.run import Unused, decode_row, encode_row
from tidelog.model.topic import Topic

__all__ = [
    "ListedRow",
    "Uses",
    "is_shared",
    "list_apart",
    "list_unused",
    "read_unused",
    "remove_unused",
]


@dataclass(frozen=True, slots=True)
class ListedRow:
    """One row of this kind."""

    row: str
    version: str
    objects: tuple[str, ...]


def list_unused(row_id: str, objects: Iterable[str]) -> list[Put]:
    """The change that lists objects, for the write that takes their last mention away; none for
    no objects. ``row_id`` is fresh: the row of another write is never replaced.
    """
    listed = tuple(dict.fromkeys(objects))
    return [Put(layout.unused_row(row_id), encode_row(Unused(listed)))] if listed else []


def list_apart(log: Log, topic: Topic, partition: int, objects: Sequence[str]) -> bool:
    """List objects that a process has stored and will commit no more; whether that was done.

    The write expects the head, so that it comes once, and never after the topic was deleted.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    with contextlib.suppress(NotFoundError, UnavailableError):
        for delay_s in RACE.delays_s(log.random):
            head, version = read_head(log, topic, partition)
            if head.closed:
                break
            write_id = log.ids.new()
            listed = list_unused(write_id, objects)
            try:
                log.catalog.write(where, Check("head", version), *listed, write_id=write_id)
            except (ConflictError, UnknownOutcomeError):
                log.clock.sleep(delay_s)
            else:
                return True
    return False


def read_unused(log: Log, topic: Topic, partition: int) -> list[ListedRow]:
    """All rows of a partition. ``CorruptError``."""
    where = layout.topic_partition(topic.incarnation, partition)
    found = []
    for row in log.catalog.scan(where, layout.unused_row(""), "unused0"):
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        found.append(ListedRow(row.row, row.version, decode_row(row.value, Unused, what).objects))
    return found


def remove_unused(
    log: Log,
    place: tuple[Topic, int],
    rows: Sequence[ListedRow],
    keys: Collection[str],
    deleted: Collection[str],
) -> None:
    """Delete the rows that list nothing that is there any more, also no copy of it.

    ``keys`` are the objects that are left, of a listing that was made after the rows were read,
    without those that were ``deleted`` since. The row of a compile that may be at work is to be
    left out.
    """
    listed = {_origin(key)[0] for row in rows for key in row.objects}
    left = {origin for key in keys if (origin := _origin(key)[0]) in listed}
    over = [row for row in rows if left.isdisjoint(_origin(key)[0] for key in row.objects)]
    gone = [
        row
        for row in over
        if not any(key not in deleted and _is_there(log, key) for key in row.objects)
    ]
    where = layout.topic_partition(place[0].incarnation, place[1])
    for first in range(0, len(gone), limits.CHANGES_MAX):
        changes = [Delete(row.row, row.version) for row in gone[first : first + limits.CHANGES_MAX]]
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep meets them
            log.catalog.write(where, *changes, write_id=log.ids.new())


def is_shared(key: str) -> bool:
    """Whether an object has events of several partitions: one that names it says too little."""
    return _origin(key)[1] > 1


class Uses:
    """Which of some objects are settled: as many partitions name or list them as they are for."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Only ``keys`` are asked about."""
        self._partitions: dict[str, set[int]] = {_origin(key)[0]: set() for key in keys}

    def add(self, partition: int, objects: Collection[str]) -> None:
        """Rows of a partition name or list these."""
        for key in objects:
            found = self._partitions.get(_origin(key)[0])
            if found is not None:
                found.add(partition)

    def add_rows(self, partition: int, rows: Sequence[ListedRow]) -> None:
        for row in rows:
            self.add(partition, row.objects)

    def is_settled(self, key: str) -> bool:
        origin, partitions = _origin(key)
        return len(self._partitions.get(origin, ())) >= partitions


def _is_there(log: Log, key: str) -> bool:
    """A listing may be old: what it does not show is asked for."""
    try:
        log.store.head(key)
    except NotFoundError:
        return False
    return True


def _origin(key: str) -> tuple[str, int]:
    """What all copies of an object share, and how many partitions it has events of."""
    if key.endswith(".parquet"):
        return "/".join(layout.journal_work(key)), 1
    if key.endswith(".arrow"):
        with contextlib.suppress(ValueError):
            return layout.segment_origin(key)
    return key, 1
