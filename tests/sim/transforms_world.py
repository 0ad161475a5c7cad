"""Archives whose transforms drop events, and backfills of what loses more and more of its events.

Transforms run in the process itself. Generations have one of three, which drop other offsets. They
are built of the archive's own source, or of a backup that loses events meanwhile: those that the
first transform drops, and in most worlds others. In every second world the archive's own source
loses events too, as a compacted topic does. In half of the worlds what loses events is a folder, of
which a range lists one hole.

What a live generation had stays, unless it was deleted or the transform of the generation that is
live now drops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.sim.archive_accounts import Accountant
from tests.sim.archive_many import HoledBackup, HoledFolder
from tests.sim.archive_store import Generation, Row, SourceRows
from tests.sim.archive_world import BY_DAY, BY_MINUTE, BY_MINUTE_A, Done
from tests.sim.archive_worlds import HolesWorld
from tests.sim.backups_world import BackupsWorld
from tests.sim.journal_home import PARTITIONS
from tests.sim.journal_raw import Place
from tidelog.archive.archive import find_archive
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.connectors.files import source as files_source
from tidelog.connectors.source import Chunk, RangeReader, Source, SourcePartition
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model.archive import Account, ArchiveFormat
from tidelog.pipeline.tasks import Task, TaskOutcome, Workers, run_task

__all__ = ["TransformsWorld"]

HALF, QUARTER, THIRDS = "sim:half", "sim:quarter", "sim:thirds"
Lost = set[tuple[int, int]]  # partitions and offsets
TRANSFORMS = (HALF, HALF, QUARTER, THIRDS)


def is_dropped(transform: str, offset: int) -> bool:
    """Whether a transform drops the event of an offset."""
    drops = {HALF: offset % 2 == 1, QUARTER: offset % 4 > 0, THIRDS: offset % 3 == 2}
    return drops.get(transform, False)


class DroppingWorkers:
    """Workers that run these transforms, one task after another."""

    def run(self, tasks: Sequence[Task]) -> Iterator[TaskOutcome]:
        for task in tasks:
            reader = _Dropping(task.reader, task.transform)
            outcome = run_task(replace(task, reader=reader, transform=""))
            if outcome.produced is not None:
                outcome = replace(outcome, produced=replace(outcome.produced, read=reader.count))
            yield outcome


@dataclass
class _Dropping:
    reader: RangeReader
    transform: str
    count: int = 0  # of events, with those that are dropped

    @property
    def range(self) -> Any:
        return self.reader.range

    def read(self) -> Iterator[Chunk]:
        for chunk in self.reader.read():
            self.count += chunk.batch.num_rows
            offsets = chunk.batch.column("offset").to_pylist()
            kept = [not is_dropped(self.transform, offset) for offset in offsets]
            yield replace(chunk, batch=chunk.batch.filter(pa.array(kept, pa.bool_())))


class Losing(HoledBackup):
    """Topic ``t`` without events that were lost since, as a compacted topic is."""

    kind = "losing"

    def __init__(self, open_context: Any, name: str, lost: Lost) -> None:
        super().__init__(open_context, name)
        self._lost = lost

    @property
    def url(self) -> str:
        return f"{self.kind}:{self._archive}"

    def lacks(self, partition: SourcePartition, offset: int) -> bool:
        return (int(partition.name), offset) in self._lost


class LosingFolder(Losing, HoledFolder):
    """The same as files of a folder."""

    kind = "losing-files"


@dataclass
class DroppingAccountant(Accountant):
    """Knows what transforms drop, and what the backup has lost."""

    own: Lost = field(default_factory=set)  # by the archive's source
    backup: Lost = field(default_factory=set)

    @property
    def lost(self) -> Lost:
        """What one of them has lost."""
        return self.own | self.backup

    def transform(self, of: Generation) -> str:
        """The transform of a generation."""
        return str(self.folders.archives()[of.archive]["formats"][of.number]["transform"])

    def may_lack(self, live: Generation, place: Place) -> bool:
        return self.was_deleted(place) or is_dropped(self.transform(live), place[2])

    def why_nowhere(self, of: Generation, place: Place, head: Row) -> str:
        if self.was_deleted(place):
            return "erased"
        some = [gap for gap in head["gaps"] if gap["reason"] == "transform"]  # of the one before
        carried = any(int(gap["start"]) <= place[2] < int(gap["end"]) for gap in some)
        if carried or is_dropped(self.transform(of), place[2]):
            return "dropped"
        return "absent" if place[1:] in self.lost else ""  # before a live generation had it

    def reads_folder(self, of: Generation) -> bool:
        return True  # any generation may have been built of one

    def check_counts(
        self, where: str, rows: SourceRows, tally: Counter[str], claim: Account
    ) -> None:
        """What was dropped may have been lost or deleted before or after that."""
        assert (claim.archived, claim.dead) == (tally["archived"], tally["dead"]), where
        unread = claim.absent + sum(g.offsets for g in claim.gaps if g.reason == "files")
        assert unread <= len(self.lost), f"{where}: {claim}, and {len(self.lost)} were lost"


@dataclass
class TransformsDone(Done):
    """What has happened here too."""

    lost: int = 0  # by the backup


class TransformsWorld(BackupsWorld):
    """One seed's world."""

    accountants = DroppingAccountant
    accountant: DroppingAccountant
    first_formats = tuple(
        msgspec.structs.replace(each, transform=HALF) for each in (BY_DAY, BY_MINUTE_A)
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: TransformsDone = TransformsDone()
        self.kinds = {"build", self.random.choice(["trim", "erase", "replay", "build"])}
        kind = "losing-files" if seed % 4 > 1 else "losing"
        self.backup = f"{kind}:b"
        self.source = f"{kind}:t" if seed % 2 else "topic:t"
        self.loses_any = self.random.choice([0.0, 0.3, 0.6])  # also what no transform drops

    @property
    def workers(self) -> Workers:
        return DroppingWorkers()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        patch.setattr(files_source, "FILE_GAPS_PER_RANGE", 1)

    def open_source(self, url: str, **how: Any) -> Source:
        kind, _, name = url.partition(":")
        if kind in ("losing", "losing-files"):
            made = Losing if kind == "losing" else LosingFolder
            lost = self.accountant.own if name == "t" else self.accountant.backup
            return made(how["open_context"], name, lost)
        return super().open_source(url, **how)

    def spawn_all(self) -> None:
        super().spawn_all()
        self._spawn("lose", self.lose)

    def lose(self) -> None:
        """Let the backup lose events, one after the other."""
        context = self._context()
        for _ in range(12):
            context.clock.sleep(self.random.uniform(0, 6))
            number = self.random.randrange(PARTITIONS)
            end = self.truth.end(self.topic.incarnation, number)
            offset = self.random.randrange(end)
            if self.chance(self.loses_any) or is_dropped(HALF, offset):
                losing = [self.accountant.backup, self.accountant.own]
                losing[self.chance(0.5) and self.source != "topic:t"].add((number, offset))
                self.done.lost += 1

    wait_opened = HolesWorld.wait_opened  # late drivers of a backfill

    def trim_to(self, number: int, past: bool) -> int:
        return self.read_by_all(number)

    def build(self) -> None:
        home = self.home()
        for _ in range(12):
            home.context.clock.sleep(self.random.uniform(0, 6))
            with self.tolerating(InvalidError, NotFoundError):
                self.change_generation(home)

    def change_generation(self, home: Home) -> None:
        archive = find_archive(home.context, "day")
        kept, chance = archive.in_state("kept"), self.random.random()
        if archive.building is not None and chance < 0.75:
            self.drive_some(home, archive.building)
            promote(home.context, "day", workers=self.workers)
            self.done.promoted += 1
        elif archive.building is not None:  # it may lack what nothing has any more
            drop_generation(home.context, "day", archive.building, force=True)
            self.done.dropped += 1
        elif kept and chance < 0.4:
            number = self.random.choice(kept)
            rollback(home.context, "day", generation=number, workers=self.workers)
            self.done.rolled_back += 1
        elif kept and chance < 0.5:
            drop_generation(home.context, "day", self.random.choice(kept))
            self.done.dropped += 1
        else:
            begin_backfill(home.context, "day", self.next_format())
            self.done.backfills += 1

    def erase(self) -> None:
        """Deletes from the topic reach its own archives; others have erasures of their own."""
        if self.source == "topic:t":
            super(BackupsWorld, self).erase()
        else:
            super().erase()

    def check_erased(self, home: Home) -> None:
        if self.source == "topic:t":
            super(BackupsWorld, self).check_erased(home)
        else:
            super().check_erased(home)

    def next_format(self) -> ArchiveFormat:
        source = self.random.choice([self.backup, self.backup, ""])
        transform = self.random.choice(TRANSFORMS)
        return msgspec.structs.replace(BY_MINUTE, source=source, transform=transform)
