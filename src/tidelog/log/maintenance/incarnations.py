"""The topics that the objects of a home belong to, and topics that lost their registry row.

A topic is registered before it has objects, and its deletion leaves a ``deleted`` row. So if an
incarnation has objects and neither row, the registry has lost one: these objects are never garbage.

**Lost topics** are incarnations with objects that the registry does not know. When a person gives
such an incarnation a name, it becomes a topic again. The rows that the catalog still has count as
before: events with their offsets, cursors, deletes. A partition without any row starts empty. All
its objects are strays, and ``recover`` appends their events again. A partition with rows and no
head is refused: a new head would hide its events and reuse their offsets.

The topic is created by the steps of ``log.topics``, under the incarnation of its objects. If a call
dies, the next one finishes. Nothing is deleted or changed before that. Two values must never recur
or shrink, so they are determined from everything that exists:

- The incarnation belongs to one name. The write that adds the name expects the registry as it was
  when no other topic had the incarnation, and it was not deleted.
- The generation is not below any floor of a head, nor that of any object that is stored or named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

import msgspec

from tidelog.catalog.base import ABSENT, Catalog, Change, Put, Row, prefix_end
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.codec.segment import read_known
from tidelog.context import Context
from tidelog.coordination.registry import add_name
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.log.maintenance.object_references import read_references
from tidelog.log.maintenance.obsolete_rows import decode_run
from tidelog.log.topics import create_topic, find_partition, find_topic, list_topics
from tidelog.model import layout
from tidelog.model.topic import Head, Topic, check_topic_name, encode_row, journal_slots, slots_of
from tidelog.store.base import ObjectInfo

__all__ = [
    "TOPICS",
    "LostTopic",
    "accept_unexplained",
    "inspect_catalog",
    "inspect_home",
    "is_deleted",
    "stored_incarnations",
    "unexplained",
]

TOPICS = "topics/"
_INCARNATION = re.compile(r"[0-9a-f]{32}")


def stored_incarnations(context: Context) -> Iterator[str]:
    """Yields the incarnations that have objects, with one listing for each."""
    after = ""
    while (info := next(iter(context.store.list(TOPICS, after)), None)) is not None:
        incarnation = info.key.split("/")[1]
        if _INCARNATION.fullmatch(incarnation):
            yield incarnation
        after = f"{TOPICS}{incarnation}0"  # the character after the slash


def unexplained(context: Context, stored: Iterable[str]) -> list[CorruptError]:
    """Returns an error for each listed incarnation that the registry does not know."""
    known = {topic.incarnation for topic in list_topics(context)}
    return [
        CorruptError(
            f"topic of incarnation `{incarnation}`: has objects or rows, but no registry row, and "
            "was never deleted: restore a catalog that knows it, or get its events back by "
            f"`tidelog topic recover NAME --incarnation {incarnation}`; to do without them, run "
            f"`tidelog sweep --accept-loss {incarnation}`",
            incarnation=incarnation,
        )
        for incarnation in stored
        if incarnation not in known and not is_deleted(context, incarnation)
    ]


def accept_unexplained(context: Context, name: str) -> bool:
    """Marks an incarnation that the registry does not know as deleted; False for other names.

    A person decides that, after restoring a catalog that is older than the topic.
    """
    if not _INCARNATION.fullmatch(name):
        return False
    stored = [each for each in stored_incarnations(context) if each == name]

    def check() -> None:
        if not unexplained(context, stored):
            raise InvalidError(
                f"topic of incarnation `{name}`: was brought back meanwhile: nothing was accepted"
            )

    if unexplained(context, stored):
        add_name(context, Put(layout.deleted_row(name), b"", ABSENT), check)
    return is_deleted(context, name)


def is_deleted(context: Context, incarnation: str) -> bool:
    """Returns whether the topic of an incarnation was deleted."""
    return context.catalog.get(layout.REGISTRY, layout.deleted_row(incarnation)) is not None


def inspect_home(context: Context) -> Iterator[str]:
    """Yields what is wrong with the whole catalog, in words; ``verify`` of a topic cannot see it.

    These are findings of the backend's own check, rows with a wrong checksum, and objects or rows
    of topics that the registry does not explain.
    """
    stored = set(stored_incarnations(context))
    yield from inspect_catalog(context)
    if isinstance(context.catalog, CheckedCatalog):
        stored |= set(_row_incarnations(context.catalog))
    try:
        yield from (error.message for error in unexplained(context, sorted(stored)))
    except CorruptError as exc:
        yield exc.message


def inspect_catalog(context: Context) -> Iterator[str]:
    """Yields findings of the backend's own check, and rows with a wrong checksum."""
    if isinstance(context.catalog, CheckedCatalog):
        yield from context.catalog.inspect()


def _row_incarnations(catalog: CheckedCatalog) -> Iterator[str]:
    """Yields the incarnations that have heads, if the catalog can list them."""
    for partition, row in catalog.every_row():
        parts = partition.split("/")
        if row == "head" and parts[0] == "topic" and len(parts) == 3:
            yield parts[1]


_LOOK_AHEAD = 100  # partitions above the last known one, which may have rows


class LostTopic:
    """An incarnation that has objects or rows, and that no registry row explains.

    Raises ``InvalidError`` if it was deleted or is a topic of another name, and
    ``AlreadyExistsError`` if another topic has the name.
    """

    def __init__(self, context: Context, name: str, incarnation: str) -> None:
        check_topic_name(name)
        self._context = context
        self._name = name
        self._incarnation = incarnation
        self._what = f"topic of incarnation `{incarnation[:80]}`"
        self.is_registered = False  # under this name, by an earlier call
        if not _INCARNATION.fullmatch(incarnation):
            raise InvalidError(f"{self._what}: give one that `tidelog verify` names")
        self._check_registry()

    def _check_registry(self) -> None:
        """Raises if the registry has the incarnation or the name for something else."""
        for topic in list_topics(self._context):
            is_same = topic.incarnation == self._incarnation
            if is_same and topic.name != self._name:
                raise InvalidError(
                    f"{self._what}: is topic `{topic.name}`: run `tidelog topic recover "
                    f"{topic.name}`"
                )
            if not is_same and topic.name == self._name:
                raise AlreadyExistsError(
                    f"topic `{self._name}`: exists already: give a name that no topic has"
                )
            self.is_registered |= is_same and topic.state == "ready"
        if is_deleted(self._context, self._incarnation):
            raise InvalidError(f"{self._what}: was deleted: nothing is left to recover")

    def register(self, partitions: int | None, slot_ms: int) -> Topic:
        """Makes it a topic, or finds the one that it is.

        Raises ``InvalidError`` for settings that contradict what exists.
        """
        if self.is_registered:
            topic = find_topic(self._context, self._name)
        else:
            topic = create_topic(
                self._context, self._wanted(partitions, slot_ms)[0], self._check_registry
            )
        if partitions not in (None, topic.partitions):
            raise InvalidError(
                f"topic `{topic.name}`: was made again with {topic.partitions} partitions: leave "
                "out --partitions"
            )
        return topic

    def as_if(self, partitions: int | None, slot_ms: int) -> tuple[Context, Topic]:
        """Returns the topic that it would be, and a context in which it exists, for reading."""
        wanted, heads = self._wanted(partitions, slot_ms)
        missing = set(range(wanted.partitions)) - set(heads)
        new = [layout.topic_partition(self._incarnation, each) for each in missing]
        catalog = _WithHeads(self._context.catalog, frozenset(new))
        return replace(self._context, catalog=catalog), wanted

    def _wanted(self, partitions: int | None, slot_ms: int) -> tuple[Topic, Mapping[int, Head]]:
        """Returns the topic, and the heads that exist."""
        shown = self._partitions()
        heads = self._heads(max(shown, partitions or 0))
        needed = max(shown, *(each + 1 for each in heads), 0)
        if not needed:
            raise NotFoundError(f"{self._what}: has no events here: give one that `verify` names")
        if partitions is not None and partitions < needed:
            raise InvalidError(
                f"{self._what}: has events of {needed} partitions: give --partitions {needed} or "
                "more"
            )
        topic = Topic(
            name=self._name,
            incarnation=self._incarnation,
            partitions=partitions or needed,
            created_ms=self._context.clock.now_ms(),
            slot_ms=slot_ms,
            home=self._context.identity.id,
        )
        for partition in heads:
            self._check_slots(topic, partition)
        generation = self._generation(topic, heads)
        return msgspec.structs.replace(topic, generation=generation), heads

    def _heads(self, at_least: int) -> Mapping[int, Head]:
        """Returns the heads in the catalog, by partition.

        Raises ``InvalidError`` for closed ones, and ``CorruptError`` for a partition that has lost
        its head.
        """
        found: dict[int, Head] = {}
        end = at_least + _LOOK_AHEAD
        for partition in count():
            if partition >= end:
                break
            head = find_partition(
                self._context, Topic(self._name, self._incarnation, 1, 0), partition
            )
            if head is None:
                continue
            if head.closed:
                raise InvalidError(f"{self._what}: its delete had begun: nothing is recovered")
            found[partition] = head
            end = max(end, partition + 1 + _LOOK_AHEAD)
        return found

    def _generation(self, topic: Topic, heads: Mapping[int, Head]) -> int:
        """Returns the highest generation of a head, a row or an object."""
        highest = max((head.floor for head in heads.values()), default=0)
        keys = [
            info.key
            for folder in (layout.segments, layout.amendments)
            for info in self._context.store.list(folder(self._incarnation))
        ]
        for partition, head in heads.items():
            rows = read_references(self._context, topic, partition, head)
            keys += [*rows.objects, *rows.leftovers]
        for key in keys:
            if not key.startswith(layout.journals(self._incarnation)):
                with contextlib.suppress(ValueError, IndexError):  # recovery reports it
                    highest = max(highest, layout.segment_generation(key))
        return highest

    def _check_slots(self, topic: Topic, partition: int) -> None:
        """Raises if the time index has another resolution: reads would miss events."""
        where = layout.topic_partition(topic.incarnation, partition)
        for kind, end in (("run/", "run0"), ("journal/", "journal0")):
            for row in self._context.catalog.scan(where, kind, end):
                run = decode_run(row, topic, partition)
                if kind == "journal/":
                    names = list(journal_slots(run, topic.slot_ms))
                else:
                    level, starts = slots_of(run.first_ms, run.last_ms, topic.slot_ms)
                    names = [layout.slot_row(level, each, run.base, "") for each in starts]
                if not all(self._has_row_prefix(where, name) for name in names):
                    raise InvalidError(
                        f"{self._what}: its index by time has another resolution than "
                        f"{topic.slot_ms} ms: give --slot as the topic was created with"
                    )

    def _has_row_prefix(self, where: str, name: str) -> bool:
        """Returns whether the name of any row begins with ``name``."""
        rows = self._context.catalog.scan(where, name, prefix_end(name), limit=1)
        return next(iter(rows), None) is not None

    def _partitions(self) -> int:
        """Returns how many partitions its objects have events of, counted from 0."""
        highest = -1
        for folder in (layout.segments, layout.journals):
            for info in self._context.store.list(folder(self._incarnation)):
                try:
                    highest = max(highest, *self._partitions_of(info))
                except NotFoundError:
                    continue  # a sweep has deleted it in the meantime
                except (CorruptError, ValueError):
                    continue  # recovery reports it
        return highest + 1

    def _partitions_of(self, info: ObjectInfo) -> list[int]:
        if info.key.startswith(layout.journals(self._incarnation)):
            return [layout.journal_place(info.key)[0], -1]
        data = self._context.store.get(info.key)
        return [-1, *(each.partition for each in read_known(data, f"segment `{info.key}`"))]


class _WithHeads:
    """A catalog with new heads in partitions that have no rows, for reading."""

    def __init__(self, inner: Catalog, new: frozenset[str]) -> None:
        self._inner = inner
        self._new = new
        self._head = Row("head", encode_row(Head()), "new")

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, partition: str, row: str) -> Row | None:
        if partition in self._new:
            return self._head if row == "head" else None
        return self._inner.get(partition, row)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        if partition not in self._new:
            return self._inner.scan(partition, start, end, limit, reverse)
        is_asked = start <= "head" and (end is None or end > "head") and limit != 0
        return iter([self._head] if is_asked else [])

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        raise InvalidError(f"write to `{partition}`: this only counts, and changes nothing")

    def close(self) -> None:
        """Leaves the catalog open, since it belongs to the caller."""
