"""Topics whose registry row was lost: objects of an incarnation that the registry does not know.

A person gives such an incarnation a name, and it is a topic again. What rows the catalog still has
of it count as before: events with their offsets, cursors, deletes. Where it has none, its
partitions begin empty, and all its objects are strays, whose events ``recover`` appends again.

The topic is created by the steps of ``log.topics``, under the incarnation that its objects have: a
call that dies is finished by the next one. Nothing is deleted or changed before that.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.segment import read_known
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    NotFoundError,
)
from tidelog.log.base import Log
from tidelog.log.incarnations import is_deleted
from tidelog.log.leftovers import decode_run
from tidelog.log.topics import create_topic, find_topic, head_of, list_topics
from tidelog.model import layout
from tidelog.model.slot import journal_slots, slots_of
from tidelog.model.topic import Topic, check_topic_name
from tidelog.store.base import ObjectInfo

__all__ = ["LostTopic"]

_INCARNATION = re.compile(r"[0-9a-f]{32}")


class LostTopic:
    """An incarnation that has objects or rows, and that no registry row explains.

    ``InvalidError`` for one that was deleted, or is a topic of another name, ``AlreadyExistsError``
    where another topic has the name.
    """

    def __init__(self, log: Log, name: str, incarnation: str) -> None:
        check_topic_name(name)
        self._log = log
        self._name = name
        self._incarnation = incarnation
        self._what = f"topic of incarnation `{incarnation[:80]}`"
        self.is_registered = False  # under this name, by an earlier call
        if not _INCARNATION.fullmatch(incarnation):
            raise InvalidError(f"{self._what}: give one that `tidelog verify` names")
        for topic in list_topics(log):
            if topic.incarnation == incarnation and topic.name != name:
                raise InvalidError(
                    f"{self._what}: is topic `{topic.name}`: run `tidelog topic recover "
                    f"{topic.name}`"
                )
            if topic.incarnation != incarnation and topic.name == name:
                raise AlreadyExistsError(
                    f"topic `{name}`: exists already: give a name that no topic has"
                )
            self.is_registered |= topic.incarnation == incarnation and topic.state == "ready"
        if is_deleted(log, incarnation):
            raise InvalidError(f"{self._what}: was deleted: nothing is left to recover")

    def register(self, partitions: int | None, slot_ms: int) -> Topic:
        """Make it a topic, or find the one that it is.

        ``InvalidError`` for settings that do not fit to what is there.
        """
        if self.is_registered:
            topic = find_topic(self._log, self._name)
        else:
            topic = create_topic(self._log, self._wanted(partitions, slot_ms))
        if partitions not in (None, topic.partitions):
            raise InvalidError(
                f"topic `{topic.name}`: was made again with {topic.partitions} partitions: leave "
                "out --partitions"
            )
        return topic

    def as_if(self, partitions: int | None, slot_ms: int) -> tuple[Log, Topic]:
        """The topic that it would be, and a log in which it is that: for reading.

        Where heads are missing, that log has a catalog of its own, in memory, with new ones.
        """
        wanted = self._wanted(partitions, slot_ms)
        if self._heads() == wanted.partitions:
            return self._log, wanted
        log = replace(self._log, catalog=MemoryCatalog())
        return log, create_topic(log, wanted)

    def _wanted(self, partitions: int | None, slot_ms: int) -> Topic:
        heads = self._heads()
        needed = max(heads, self._partitions())
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
            created_ms=self._log.clock.now_ms(),
            slot_ms=slot_ms,
            home=self._log.standing.id,
        )
        for partition in range(heads):
            self._check_slots(topic, partition)
        return topic

    def _heads(self) -> int:
        """How many partitions the catalog has heads of. ``InvalidError`` for closed ones."""
        count = 0
        while True:
            where = layout.topic_partition(self._incarnation, count)
            row = self._log.catalog.get(where, "head")
            if row is None:
                return count
            topic = Topic(self._name, self._incarnation, count + 1, 0)
            if head_of(topic, count, row)[0].closed:
                raise InvalidError(f"{self._what}: its delete had begun: nothing is recovered")
            count += 1

    def _check_slots(self, topic: Topic, partition: int) -> None:
        """Refuse a resolution that the index by time does not have: reads would miss events."""
        where = layout.topic_partition(topic.incarnation, partition)
        for kind, end in (("run/", "run0"), ("journal/", "journal0")):
            for row in self._log.catalog.scan(where, kind, end):
                run = decode_run(row, topic, partition)
                if kind == "journal/":
                    names = list(journal_slots(run, topic.slot_ms))
                else:
                    level, starts = slots_of(run.first_ms, run.last_ms, topic.slot_ms)
                    names = [layout.slot_row(level, each, run.base, "") for each in starts]
                if not all(self._begins(where, name) for name in names):
                    raise InvalidError(
                        f"{self._what}: its index by time has another resolution than "
                        f"{topic.slot_ms} ms: give --slot as the topic was created with"
                    )

    def _begins(self, where: str, name: str) -> bool:
        """Whether a row begins with a name."""
        rows = self._log.catalog.scan(where, name, name + "\U0010ffff", limit=1)
        return next(iter(rows), None) is not None

    def _partitions(self) -> int:
        """How many partitions its objects have events of, counted from 0."""
        highest = -1
        for folder in (layout.segments, layout.journals):
            for info in self._log.store.list(folder(self._incarnation)):
                try:
                    highest = max(highest, *self._partitions_of(info))
                except NotFoundError:
                    continue  # a sweep has deleted it meanwhile
                except (CorruptError, ValueError):
                    continue  # recovery names it
        return highest + 1

    def _partitions_of(self, info: ObjectInfo) -> list[int]:
        if info.key.startswith(layout.journals(self._incarnation)):
            return [layout.journal_place(info.key)[0], -1]
        data = self._log.store.get(info.key)
        return [-1, *(each.partition for each in read_known(data, f"segment `{info.key}`"))]
