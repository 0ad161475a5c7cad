"""The swap: journals replace the rows that they were built from, in one write.

The write expects the head as it was just read, and the row of the compiler. It lists the objects of
journals that it replaces as unused. If the head has moved, the swap reads it again and repeats the
write with the same journals: producers, trims and amendments may come in between. Another swap may
not: if ``compiled`` has changed, the compiler plans again. Each row that is replaced must still
reach above the start, so a trim before the swap never means the row that the swap puts.
"""

from __future__ import annotations

import msgspec

from tidelog.catalog.base import Change, Check, Delete, Put
from tidelog.catalog.update import RACE
from tidelog.context import Context
from tidelog.coordination.ownership import Ownership
from tidelog.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.journal.compile.policy import CompileGroup
from tidelog.log.maintenance.unused import list_unused
from tidelog.log.reader.amendments import are_pending
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.partition_rows import Head, Run, decode_row, encode_row
from tidelog.model.times import journal_slots
from tidelog.model.topic import Topic

__all__ = ["Swap"]


class Swap:
    """Step 4, for the partition whose compiler row we hold."""

    def __init__(self, context: Context, topic: Topic, partition: int, holding: Ownership) -> None:
        self._context = context
        self._topic = topic
        self._partition = partition
        self._holding = holding
        self._where = layout.topic_partition(topic.incarnation, partition)

    def list_work(self, work_id: str) -> int:
        """Lists all journals that a work will build as unused; returns the epoch to build them
        under.

        The swap deletes that row. The write expects the head and the row of the compiler. A swap
        changes one and a sweep the other, so the write never lands after these have deleted what it
        puts. Raises ``FencedError`` if another compiler has the partition.
        """
        for delay_s in RACE.delays_s(self._context.random):
            epoch, check = self._holding.current()
            _, version = read_head(self._context, self._topic, self._partition)
            key = layout.journal(self._topic.incarnation, self._partition, epoch, 0, work_id)
            listed = list_unused(work_id, [key])
            try:
                checks = (Check("head", version), check)
                write_id = self._context.ids.new()
                self._context.catalog.write(self._where, *listed, *checks, write_id=write_id)
            except ConflictError:
                self._hold_on()
            except UnknownOutcomeError:
                pass
            else:
                return epoch
            self._context.clock.sleep(delay_s)
        raise self._busy()

    def run(self, group: CompileGroup, made: tuple[Run, ...], compiled: int, seen: Head) -> bool:
        """Returns whether the journals replaced their rows; False: plan again, since rows have
        changed.

        Also returns False if a trim has passed amendments that the head ``seen`` before the work
        mentions: a sweep may have removed them before they were read. Raises ``FencedError`` if
        another compiler has the partition, and ``NotFoundError`` if the topic was deleted.
        """
        left: list[str] = []  # of lower epochs, under which no swap can land any more
        for delay_s in RACE.delays_s(self._context.random):
            epoch, check = self._holding.current()
            head, version = read_head(self._context, self._topic, self._partition)
            if head.closed:
                raise NotFoundError(f"topic `{self._topic.name}`: was deleted: compile no more")
            if head.compiled != compiled:
                return self._landed(made)
            first = max(seen.start, group.base)
            is_passed = head.start > first and are_pending(seen, first, head.start)
            if is_passed or not _is_next(group, head):
                return False
            if layout.journal_place(made[0].object)[1] != epoch:
                moved = self._move(made)
                if moved is None:
                    return False
                left += [run.object for run in made]
                made = moved
                continue  # the epoch may be another one by now
            write_id = self._context.ids.new()
            changes = _changes(self._topic, group, made, (head, version))
            changes += list_unused(write_id, [*(old.object for old in group.journals), *left])
            try:
                self._context.catalog.write(self._where, *changes, check, write_id=write_id)
            except ConflictError:
                self._hold_on()
            except UnknownOutcomeError:
                pass  # the head settles it
            else:
                return True
            self._context.clock.sleep(delay_s)
        raise self._busy()

    def _busy(self) -> UnavailableError:
        return UnavailableError(
            f"partition `{self._topic.name}/{self._partition}`: too many writers at once: "
            "compile again"
        )

    def _landed(self, made: tuple[Run, ...]) -> bool:
        """After a lost reply: returns whether it was our swap that changed ``compiled``."""
        row = self._context.catalog.get(self._where, layout.journal_row(made[0].base))
        what = f"a journal of `{self._topic.name}/{self._partition}`"
        return row is not None and decode_row(row.value, Run, what).object == made[0].object

    def _hold_on(self) -> None:
        """Takes the row again if a sweep has raised the epoch."""
        if not (self._holding.is_ours() or self._holding.try_take()):
            raise FencedError(
                f"partition `{self._topic.name}/{self._partition}`: another process compiles it: "
                "leave it to that one"
            )

    def _move(self, made: tuple[Run, ...]) -> tuple[Run, ...] | None:
        """Returns the journals under our new epoch; None if a sweep has deleted one."""
        work_id = self._context.ids.new()
        epoch = self.list_work(work_id)
        incarnation, partition = self._topic.incarnation, self._partition
        moved = []
        for run in made:
            new_id = self._context.ids.new()
            key = layout.journal(incarnation, partition, epoch, run.base, work_id, new_id)
            try:
                self._context.store.copy(run.object, key)
            except NotFoundError:
                return None
            moved.append(msgspec.structs.replace(run, object=key))
        return tuple(moved)


def _is_next(group: CompileGroup, head: Head) -> bool:
    """Returns whether no row of it was trimmed, and no readable row lies before its runs."""
    runs = [row for row in group.rows if row.journal is None]
    follows = not runs or runs[0].base <= max(head.journaled, head.start)
    return follows and group.rows[0].end > head.start


def _changes(
    topic: Topic, group: CompileGroup, made: tuple[Run, ...], at: tuple[Head, str]
) -> list[Change]:
    head, version = at
    new_head = msgspec.structs.replace(
        head, journaled=max(head.journaled, group.end), compiled=head.compiled + 1
    )
    changes: list[Change] = [Put("head", encode_row(new_head), expect=version)]
    for run in made:
        changes.append(Put(layout.journal_row(run.base), encode_row(run)))
        slots = journal_slots(run, topic.slot_ms)
        changes += [Put(row, value) for row, value in slots.items()]
    bases = {run.base for run in made}
    for old in group.journals:
        if old.base not in bases:
            changes.append(Delete(layout.journal_row(old.base)))
        changes += [Delete(row) for row in journal_slots(old, topic.slot_ms)]
    changes.append(Delete(layout.unused_row(layout.journal_work(made[0].object)[1])))
    return changes
