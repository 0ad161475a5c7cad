"""A small log whose partitions are compiled: amendments, compiles and looks at what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from tests.support.topic_upkeep import House
from tidelog.catalog.base import Put
from tidelog.context import Context
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.journal.compile import CompileReport, PartitionCompile, compile_topic
from tidelog.journal.compile_steps import CompilePolicy, make_journals
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import read_head
from tidelog.log.unused_objects import list_unused
from tidelog.model import layout
from tidelog.model.topic import Amendment, Run, Topic, decode_row, encode_row
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash

ALL = CompilePolicy.everything()
T = TypeVar("T")


class Death(Faults):
    """The caller dies after so many calls; what it tries on the way out has no effect."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        if self.calls >= self._after:
            raise Crash
        return super().call(verb, effect, lost)


class Press(House):
    """A house in which journals are made."""

    def compile(
        self, topic: Topic, policy: CompilePolicy = ALL, context: Context | None = None
    ) -> CompileReport:
        return compile_topic(context or self.context, topic, policy)

    def amend(
        self, topic: Topic, offset: int, value: bytes | None = b"", *, delete: bool = False
    ) -> None:
        """One update or delete, as the protocol writes it; the value of a delete is nothing."""
        amend_by_hand(self.context, topic, 0, {offset: None if delete else (value,)})

    def journals(self, topic: Topic, partition: int = 0) -> list[Run]:
        rows = self.rows(topic, "journal/", partition)
        return [decode_row(row.value, Run, row.row) for row in rows]

    def events(self, topic: Topic, partition: int = 0, start: int | None = None) -> dict[int, str]:
        """Values by their offsets, from the start or from an offset on."""
        at = self.head(topic, partition).start if start is None else start
        found = {}
        for stretch in Reader(self.context, topic, partition).read(at):
            assert stretch.base == at, "what is read follows without a gap"
            at = stretch.end
            for event in stretch.events():
                found[event.offset or 0] = (event.value or b"").decode()
        assert at == self.head(topic, partition).next
        return found


class Between:
    """A compile of one group that is stopped between written_as its journals and the swap."""

    def __init__(self, press: Press, topic: Topic, policy: CompilePolicy = ALL) -> None:
        self.compiling = PartitionCompile(press.context, topic, 0, policy)
        assert self.compiling.holding.try_take()
        plan = self.compiling.plan()
        self.planned = self.compiling.prepare(plan, plan.groups[0])
        self.made = make_journals(
            press.store, press.ids, self.planned.work, self.compiling.pages(self.planned)
        )
        assert self.made.journals, "there is something to swap"

    def swap(self) -> CompileReport | None:
        return self.compiling.swap(self.planned, self.made)


def amend_by_hand(
    context: Context, topic: Topic, partition: int, wanted: Mapping[int, tuple[bytes | None] | None]
) -> None:
    """Updates, and deletes where there is None; each lands once, whatever replies are lost."""
    where = layout.topic_partition(topic.incarnation, partition)
    for offset, value in wanted.items():
        while True:
            head, version = read_head(context, topic, partition)
            sequence = head.amendments + 1
            row = Amendment(
                sequence,
                "delete" if value is None else "update",
                context.clock.now_ms(),
                value[0] if value is not None else None,
            )
            first, last = head.amended or (offset, offset)
            wider = (min(first, offset), max(last, offset))
            new = msgspec.structs.replace(head, amendments=sequence, amended=wider)
            before = context.catalog.get(where, layout.amend_row(offset))
            old = None if before is None else decode_row(before.value, Amendment, "").object
            changes = (
                Put("head", encode_row(new), expect=version),
                Put(layout.amend_row(offset), encode_row(row)),
                *list_unused(context.ids.new(), [] if old is None else [old]),
            )
            try:
                context.catalog.write(where, *changes, write_id=context.ids.new())
            except ConflictError:
                continue
            except UnknownOutcomeError:
                continue  # twice is as good as once
            break
