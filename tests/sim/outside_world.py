"""Generations built of a folder outside of the home, which has events that no archive has.

The folder is a copy of the topic's first events. The topic trimmed most of them before any archive
was created. Events are deleted by key, most of them when only archives hold events of that key.
Deletes are slow between their search of the archives and their record. Generations are built of the
folder, most of them in between, and these are promoted; the others are dropped.

A delete that has found an event of a key is a fact about all older ones: no live generation has
any of them in the end, whenever it was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.sim.archive_world import BY_DAY, BY_MINUTE
from tests.sim.archive_worlds import WHY
from tests.sim.journal_home import KEYS, PARTITIONS
from tests.sim.journal_raw import TRIMMED, Raw
from tests.sim.returns_world import ReturnsDone, ReturnsWorld
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.codec.event_batch import one_batch
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import Bounds, Chunk, Source, SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.erasure import delete_archived
from tidelog.erasure.delete import delete_key
from tidelog.home import Home
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model.topic import Topic

__all__ = ["OutsideWorld"]

COPIED = 5  # events of each partition


class OutsideWorld(ReturnsWorld):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: ReturnsDone = ReturnsDone()
        self.kinds = {"erase", "build"}
        self.copied: dict[int, pa.RecordBatch] = {}
        self.searching = 0  # deletes that have searched the archives

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        settled = delete_archived.settled_offsets

        def settle_slowly(context: Context, topic: Topic) -> Any:
            self.searching += 1
            try:
                context.clock.sleep(self.random.uniform(0, 10))
            finally:
                self.searching -= 1
            return settled(context, topic)

        patch.setattr(delete_archived, "settled_offsets", settle_slowly)

    def fill(self) -> None:
        """The copied events, of which the topic keeps the last, and then the archives."""
        for number in range(PARTITIONS):
            self.append(self.quiet, number, [self.event() for _ in range(COPIED)])
        source = source_at(self.quiet, "topic:t")
        for each in source.partitions():
            chunks = source.read(SourceRange(each, "0", str(COPIED)))
            self.copied[int(each.name)] = one_batch([chunk.batch for chunk in chunks])
        starts = dict.fromkeys(range(PARTITIONS), COPIED - 1)
        self.home(self.quiet).trim("t", ToOffsets(starts), past_readers=True)
        super().fill()

    def open_source(self, url: str, **how: Any) -> Source:
        return (
            CopiedFolder(self.copied)
            if url == CopiedFolder.url
            else super().open_source(url, **how)
        )

    def some_mark(self) -> tuple[bytes | None, str]:
        """A key; most often one of which the topic has no event."""
        keys = {f"k{number}".encode() for number in range(KEYS)}
        own = [place for place in self.truth.events if place[0] == self.topic.incarnation]
        left = keys - {
            self.truth.events[place].key for place in own if self.truth.now(place) is not TRIMMED
        }
        return self.random.choice(sorted(left if left and self.chance(0.8) else keys)), ""

    def send_again(self, home: Home, key: bytes | None, event_id: str) -> None:
        if self.chance(0.3):  # else archives alone have events of most keys
            super().send_again(home, key, event_id)

    def delete_all(self, home: Home, key: bytes | None, event_id: str) -> None:
        assert key is not None

        def is_sought(raw: Raw) -> bool:
            return raw.key == key

        there = self.accountant.places(is_sought)
        with self.accountant.deleting(is_sought):
            deleted = delete_key(home.context, home.amender("t", WHY), key)
        if deleted.events or deleted.archived:  # else nothing says that the key was deleted
            self.gone |= there
            self.done.erased += 1
            self.done.only_archived += bool(deleted.archived)

    def change_generation(self, home: Home) -> None:
        """Build a generation of the folder while a delete is slow, most often, and promote that.

        Later ones read the live generation's source, as any other.
        """
        for _ in range(self.random.choice([0, 40, 40])):
            if not self.searching:
                home.context.clock.sleep(0.5)
        is_beside = bool(self.searching)
        archive = find_archive(home.context, "day")
        other = self.random.choice([BY_DAY, BY_MINUTE])
        if not archive.format_of().source:
            other = msgspec.structs.replace(other, source=CopiedFolder.url, start="earliest")
        written_as = other if archive.building is None else archive.formats[archive.building]
        _, number = begin_backfill(home.context, "day", written_as)
        self.done.backfills += 1
        self.drive(home, "day", number)
        if self.chance(0.8 if is_beside else 0.2):
            promote(home.context, "day")
            self.done.promoted += 1
        else:
            drop_generation(home.context, "day", number, force=True)
            self.done.dropped += 1


class CopiedFolder:
    """A folder with the first events of topic ``t``, in memory."""

    url = "copied:t"

    def __init__(self, events: Mapping[int, pa.RecordBatch]) -> None:
        self._events = events

    def partitions(self) -> list[SourcePartition]:
        return [SourcePartition("t", str(number)) for number in sorted(self._events)]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        ends = {each: self._events[int(each.name)].num_rows for each in partitions}
        return {each: Bounds("0", str(end)) for each, end in ends.items()}

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> CopiedRange:
        return CopiedRange(range, self._events[int(range.partition.name)])

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(int(end), int(start) + events))

    def before(self, one: str, other: str) -> bool:
        return int(one) < int(other)

    def count(self, start: str, end: str) -> int | None:
        return int(end) - int(start)


@dataclass(frozen=True)
class CopiedRange:
    range: SourceRange
    events: pa.RecordBatch

    def read(self) -> Iterator[Chunk]:
        start, limit = int(self.range.start), int(self.range.limit)
        yield Chunk(self.events.slice(start, limit - start), self.range.limit)


_source: type[Source] = CopiedFolder
