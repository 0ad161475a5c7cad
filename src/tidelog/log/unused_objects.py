"""Rows that list the objects that a partition no longer needs.

Every write that removes the last mention of an object in a partition also puts a row
``unused/<id>`` that lists it. So an object is garbage because a row says so, never because no row
names it. An object that no row names or lists was never committed, or the catalog has lost that
commit. A process that will not commit an object it uploaded lists that too, in the write that
replaces it or in a separate one. Only uploads of processes that died stay unlisted. A sweep deletes
the objects first and then the row.

A segment may have events of several partitions, and its key says of how many. Each of them commits
one of its copies, so the segment is settled when that many partitions name or list a copy. Journals
and values of updates belong to one partition.

A compile lists the journals that it will write before it writes them, under one name for all, and
its swap deletes that row. So the journals of a compile that died are garbage too, and the next
sweep deletes the erased events in them. Such a row is a **plan**. A copy of the catalog that was
made while the compile ran has it too, and then the journal may be the only copy of events. So a
plan counts only for journals from the partition's start on: existing rows hold the same events.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tidelog.catalog.base import Delete, Put
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.topics import open_head, read_head
from tidelog.model import layout, limits
from tidelog.model.topic import Topic, UnusedObjects, decode_row, encode_row
from tidelog.store.base import object_exists

__all__ = [
    "ListedRow",
    "ObjectUses",
    "add_row",
    "is_shared",
    "list_apart",
    "list_now",
    "list_unused",
    "origin_of",
    "planned_starts",
    "read_unused",
    "remove_unused",
]


@dataclass(frozen=True, slots=True)
class ListedRow:
    """One row that lists unused objects."""

    row: str
    version: str
    objects: tuple[str, ...]
    start: int = sys.maxsize  # the partition's: a plan does not cover journals before it


def list_unused(row_id: str, objects: Iterable[str]) -> list[Put]:
    """Returns the change that lists objects, for the write that removes their last mention.

    Empty for no objects. ``row_id`` must be new, so that no other row is replaced.
    """
    listed = tuple(dict.fromkeys(objects))
    return [Put(layout.unused_row(row_id), encode_row(UnusedObjects(listed)))] if listed else []


def list_apart(context: Context, topic: Topic, partition: int, objects: Sequence[str]) -> bool:
    """Lists objects that a process has stored and will never commit; returns whether it did.

    Best effort: a sweep keeps an unlisted object for a week.
    """
    with contextlib.suppress(NotFoundError, UnavailableError, UnknownOutcomeError):
        list_now(context, topic, partition, objects)
        return True
    return False


def list_now(context: Context, topic: Topic, partition: int, objects: Sequence[str]) -> None:
    """Lists objects with a separate write.

    The write expects the head, so that it lands once, and never after the topic was deleted. Raises
    ``NotFoundError`` if it was deleted, and otherwise what ``update`` raises.
    """
    for listed in list_unused(context.ids.new(), objects):
        add_row(context, topic, partition, listed)


def add_row(context: Context, topic: Topic, partition: int, added: Put) -> None:
    """Puts a row of a new name, once, by a write that expects the head. Errors as ``list_now``."""
    where = layout.topic_partition(topic.incarnation, partition)

    def decide(rows: Rows) -> Decision[None]:
        open_head(context, topic, partition, rows["head"])
        put = rows.put(added.row, added.value)
        return Decision(None, () if rows[added.row] else (rows.check("head"), put))

    what = f"partition `{topic.name}/{partition}`"
    update(context, where, ["head", added.row], decide, what, {added.row: None})


def read_unused(context: Context, topic: Topic, partition: int) -> list[ListedRow]:
    """Returns all rows of a partition. Raises ``CorruptError``."""
    where = layout.topic_partition(topic.incarnation, partition)
    start, found = sys.maxsize, []
    for row in context.catalog.scan(where, layout.unused_row(""), "unused0"):
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        objects = decode_row(row.value, UnusedObjects, what).objects
        if start == sys.maxsize and any(_compile_of(key) for key in objects):
            start = read_head(context, topic, partition)[0].start
        found.append(ListedRow(row.row, row.version, objects, start))
    return found


def remove_unused(
    context: Context,
    partition: tuple[Topic, int],
    rows: Sequence[ListedRow],
    keys: Collection[str],
    deleted: Collection[str],
) -> None:
    """Deletes the rows that list no existing object and no copy of one.

    ``keys`` are the objects that exist, from a listing made after the rows were read, without those
    that were ``deleted`` since. The caller leaves out the row of a compile that may be running.
    """
    listed = {_listed_as(key) for row in rows for key in row.objects}
    left = {name for key in keys for name in _names(key) if name in listed}
    over = [row for row in rows if left.isdisjoint(_listed_as(key) for key in row.objects)]
    gone = [
        row
        for row in over
        if not any(key not in deleted and object_exists(context.store, key) for key in row.objects)
    ]
    topic, number = partition
    where = layout.topic_partition(topic.incarnation, number)
    for first in range(0, len(gone), limits.CHANGES_MAX):
        changes = [Delete(row.row, row.version) for row in gone[first : first + limits.CHANGES_MAX]]
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep tries again
            context.catalog.write(where, *changes, write_id=context.ids.new())


def planned_starts(rows: Iterable[ListedRow]) -> dict[str, int]:
    """Returns the compiles whose plan a partition has, with the partition's start.

    A plan is written before the compile reads the rows. So the events that it finds at an offset
    are those of these rows; what it reads below the start was trimmed.
    """
    return {work: row.start for row in rows for key in row.objects if (work := _compile_of(key))}


def is_shared(key: str) -> bool:
    """Returns whether an object has events of several partitions."""
    return origin_of(key)[1] > 1


class ObjectUses:
    """Which objects are settled: as many partitions name or list them as they have events of."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Tracks only ``keys``."""
        self._partitions: dict[str, set[int]] = {origin_of(key)[0]: set() for key in keys}
        self._plans: dict[str, int] = {}  # compiles, and the first offset that their plan covers

    def add(self, partition: int, objects: Collection[str], start: int = sys.maxsize) -> None:
        """Adds objects that rows of a partition, which has this start, name or list."""
        for key in objects:
            work = _compile_of(key)
            if work:
                self._plans[work] = start
                continue
            found = self._partitions.get(origin_of(key)[0])
            if found is not None:
                found.add(partition)

    def add_rows(self, partition: int, rows: Sequence[ListedRow]) -> None:
        for row in rows:
            self.add(partition, row.objects, row.start)

    def is_known(self, key: str, partition: int) -> bool:
        """Returns whether a partition names or lists an object or a copy of it."""
        return partition in self._partitions.get(origin_of(key)[0], ())

    def is_settled(self, key: str) -> bool:
        origin, partitions = origin_of(key)
        return len(self._partitions.get(origin, ())) >= partitions or self._is_planned(key)

    def _is_planned(self, key: str) -> bool:
        if not key.endswith(".parquet"):
            return False
        try:
            base = layout.journal_base(key)
        except ValueError:
            return False  # not ours
        return base >= self._plans.get("/".join(layout.journal_work(key)), sys.maxsize)


def origin_of(key: str) -> tuple[str, int]:
    """Returns what all copies of an object share, and how many partitions it has events of.

    Journals of one compile that begin at the same offset are copies: the work was done twice.
    """
    if key.endswith(".parquet"):
        folder, _, name = key.rpartition("/")
        return f"{folder}/{name.removesuffix('.parquet').partition('-')[0]}", 1
    if key.endswith(".arrow"):
        with contextlib.suppress(ValueError):
            return layout.segment_origin(key)
    return key, 1


def _compile_of(key: str) -> str:
    """Returns the compile whose journals a listed key means; empty for the key of one object."""
    if not key.endswith(".parquet") or "-" in key.rpartition("/")[2]:
        return ""
    return "/".join(layout.journal_work(key))


def _listed_as(key: str) -> str:
    """Returns how rows of unused objects list a key."""
    work = _compile_of(key)
    return f"plan {work}" if work else origin_of(key)[0]


def _names(key: str) -> Iterable[str]:
    """Returns all names under which a row may list an object."""
    yield origin_of(key)[0]
    if key.endswith(".parquet"):
        yield f"plan {'/'.join(layout.journal_work(key))}"
