"""Freezes the heads of a live generation while another is promoted, and releases them.

A frozen head has another version, so its driver fails at its next write. It claims the head again
only while the *gate* (``HeadGate``) is open: the archive's row, whose ``promotion`` names the
running promote. A promote withdraws that when it is refused. After a crash a later promote does, or
a driver that finds it older than ``limits.PROMOTION_MS``. After that, the promote can no longer
switch generations, because its last write expects its own id there. So a promote that crashed stops
drivers for at most a minute, and clocks decide nothing else.

An unfinished range is settled under the freeze: a decided one is published and committed, any other
is withdrawn. So a kept generation has no unfinished range that an erasure would wait for.

A driver checks the gate whenever it takes a partition, after it has read its head. A driver that
was opened for a backfill reads a backup, and what the live generation had then. After the promote,
the head may be past the end of both, which must not look like a source that lost its events.

A listed source partition without a head gets a frozen one without a position. A driver lists a
partition before it checks the gate: if the promote has already read the list, the gate is closed.
"""

from __future__ import annotations

import contextlib

import msgspec

from tidelog.archive.coverage import is_same_sequence
from tidelog.catalog.base import Change, Delete, Put
from tidelog.catalog.update import Decision, Rows, update
from tidelog.connectors.files.chain_tracking import joined_notes
from tidelog.connectors.source import SourcePartition
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    change_archive,
    list_partitions,
    read_archive,
    read_listed,
    read_partitions,
    read_progress,
)
from tidelog.coordination.trusted_time import store_now_ms
from tidelog.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    UnknownOutcomeError,
)
from tidelog.model import layout, limits
from tidelog.model.archive import Archive, ArchiveEnd, Promotion
from tidelog.model.event import to_iso
from tidelog.model.pipeline import Progress
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.source_partitions import copy_seen
from tidelog.pipeline.source_state import SourceState, frozen_error

__all__ = [
    "HeadGate",
    "carry_known",
    "freeze_heads",
    "is_stale",
    "release_heads",
    "withdraw",
]


def freeze_heads(context: Context, pipeline: Pipeline, promotion: Promotion | ArchiveEnd) -> None:
    """Freezes all heads of a pipeline, and settles the unfinished ranges there."""
    work = _Freeze(context, pipeline, owner="")
    for partition in read_partitions(context, pipeline.id):
        work.freeze(SourcePartition.named(partition), promotion.id)


def release_heads(context: Context, pipeline: str, promotion: Promotion) -> None:
    """Lets drivers resume at once. A driver that finds a frozen head later thaws it itself."""
    for partition in read_partitions(context, pipeline):
        where = layout.pipeline_partition(pipeline, partition)
        row = context.catalog.get(where, "head")
        head = decode_row(row.value, Progress, where) if row is not None else None
        if row is None or head is None or head.frozen != promotion.id:
            continue
        change: Change = Delete("head", expect=row.version)
        if head.position:
            thawed = msgspec.structs.replace(head, frozen="")
            change = Put("head", encode_row(thawed), expect=row.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            context.catalog.write(where, change, write_id=context.ids.new())


def carry_known(context: Context, old: str, new: str) -> None:
    """Copies what a frozen generation knows about its source to the one that replaces it.

    That is: what identifies files for its source, the ends listed at creation and seen by drivers,
    and what a person accepted (ended partitions, vanished files). Otherwise a driver would mistake
    other files for those that were read, or ask the person again.
    """
    list_partitions(context, new, read_listed(context, old).values())
    copy_seen(context, old, new)
    for partition in read_partitions(context, old):
        before = read_progress(context, old, partition)
        if before is not None:
            _carry_head(context, before, layout.pipeline_partition(new, partition))


def _carry_head(context: Context, before: Progress, where: str) -> None:
    """Copies what a head says to that of another generation, which a driver may be changing."""

    def decide(rows: Rows) -> Decision[None]:
        row = rows["head"]
        if row is None:
            return Decision(None)
        head = decode_row(row.value, Progress, where)
        carried = _with_note(head, before)
        same = head.position == before.position and is_same_sequence(head, before)
        if same and not head.ended:
            carried = _with_decisions(carried, before)
        changes = [] if carried == head else [rows.put("head", encode_row(carried))]
        return Decision(None, changes)

    update(context, where, ["head"], decide, f"head `{where}`")


def _with_note(head: Progress, before: Progress) -> Progress:
    """Returns the head with the note of another generation, of the same file or topic.

    A note may cover more than was read. Notes of sources without incarnations are lists of files
    that each generation has read for itself, maybe from another folder: the driver knows both.
    """
    same = head.incarnation and head.incarnation == before.incarnation
    note = before.note if same else joined_notes(head.note, before.note)
    return msgspec.structs.replace(head, note=note)


def _with_decisions(head: Progress, before: Progress) -> Progress:
    """Returns the head with the gaps and the end that a person accepted at the same position."""
    reasons = ("remade", "parent", "vanished") if before.ended else ("vanished",)
    decided = [gap for gap in before.gaps if gap.reason in reasons]
    known = {(gap.start, gap.end, gap.reason) for gap in head.gaps}
    more = [gap for gap in decided if (gap.start, gap.end, gap.reason) not in known]
    lost = head.totals.lost + len(more)
    return msgspec.structs.replace(
        head,
        ended=before.ended,
        gaps=(*head.gaps, *more),
        totals=msgspec.structs.replace(head.totals, lost=lost),
    )


class _Freeze(Cycle):
    """Takes heads from their drivers, and finishes what was decided."""

    def freeze(self, partition: SourcePartition, promotion: str) -> None:
        """Freezes one head, and settles its range."""
        where = layout.pipeline_partition(self._pipeline.id, partition.text)

        def decide(rows: Rows) -> Decision[SourceState | None]:
            row = rows["head"]
            found = decode_row(row.value, Progress, where) if row is not None else None
            if found is not None and found.closed:
                return Decision(None)
            if row is not None and found is not None and found.frozen == promotion:
                return Decision(SourceState(partition, where, found, row.version))
            head = msgspec.structs.replace(found or Progress("", 0, 0), frozen=promotion)
            state = SourceState(partition, where, head, rows.write_id)
            return Decision(state, [rows.put("head", encode_row(head))])

        state = update(self._context, where, ["head"], decide, f"head of `{partition.text}`")
        if state is not None:
            self._settle(state)

    def _settle(self, state: SourceState) -> None:
        state.read_intent(self._context.catalog)
        if state.intent is None:
            return
        if state.intent.manifest:
            self._finish(state, self._manifest(state.intent.manifest), CycleReport())
        else:
            self._withdraw(state)


class HeadGate:
    """Whether heads of a generation may be created or thawed now, by the archive's row."""

    def __init__(self, context: Context, archive: Archive, generation: int) -> None:
        self._context = context
        self._archive = archive
        self._generation = generation
        self._state = archive.state_of(generation)  # in another state it has another source

    def __call__(self) -> None:
        """Raises ``FrozenError`` while another one is promoted, ``FencedError`` after that."""
        name, number = self._archive.name, self._generation
        try:
            now = read_archive(self._context, name)
        except NotFoundError:
            now = None
        if now is None or now.incarnation != self._archive.incarnation or number not in now.formats:
            raise FencedError(
                f"archive `{name}`: generation {number} was removed: stop this driver"
            )
        if now.ended is not None:
            raise FencedError(
                f"archive `{name}`: was ended at {to_iso(now.ended.at_ms)}: stop this driver"
            )
        state = now.state_of(number)
        if state != self._state or state in ("kept", "removing"):
            is_live = "" if state == "live" else f", and {now.generation} is live"
            raise FencedError(
                f"archive `{name}`: generation {number} is {state} now{is_live}: stop this driver"
            )
        promotion = now.promotion
        if promotion is None or state != "live":
            return
        if not is_stale(self._context, promotion):
            raise frozen_error(name, f"generation {number}")
        withdraw(self._context, name, promotion)


def is_stale(context: Context, promotion: Promotion) -> bool:
    """Returns whether a promote is older than ``PROMOTION_MS``, so its process must be dead.

    Uses the store's clock, like the promote itself: another machine's may be a year ahead. A folder
    has no other clock than the machine's, which may have been ahead: one that began that far in the
    future counts as old too.
    """
    return abs(store_now_ms(context) - promotion.began_ms) > limits.PROMOTION_MS


def withdraw(context: Context, name: str, promotion: Promotion) -> Archive:
    """Withdraws a promote, unless it is done: it can no longer switch generations."""

    def edit(found: Archive) -> Archive:
        if found.promotion is None or found.promotion.id != promotion.id:
            return found
        return msgspec.structs.replace(found, promotion=None)

    return change_archive(context, name, edit)
