"""Freezing the heads of a live generation while another one is promoted, and releasing them.

A frozen head has another version, so the driver that had it fails at its next write, and adopts it
again only when the *gate* is open (``gate``): the archive's row, whose ``promotion`` names
the promote under way. The promote withdraws it when it is refused; after a crash a later promote
does, or a driver that finds it older than ``limits.PROMOTION_MS``. From then on that promote can no
longer switch generations, since its last write expects its own id there. So a promote that died
holds drivers up for a minute at most, and clocks decide about nothing else.

A range that was under way is settled under the freeze: what was decided is published and committed,
what was not is withdrawn. So a generation that is kept has no range under way, for which an erasure
would wait in vain.

A source partition that is listed and has no head yet gets a frozen one without a position. A driver
lists a partition before it asks at the gate: one that it lists after the promote has read the list
finds the gate closed.
"""

from __future__ import annotations

import contextlib

import msgspec

from tidelog.catalog.base import ABSENT, Change, Delete, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.archives import (
    list_partitions,
    read_listed,
    read_partitions,
    read_progress,
)
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.archive import Ended, Promotion
from tidelog.model.pipeline import Progress
from tidelog.model.run import decode_row, encode_row
from tidelog.pipeline.base import Pipeline
from tidelog.pipeline.coverage import is_same_sequence
from tidelog.pipeline.cycle import Cycle, CycleReport, Track
from tidelog.pipeline.seen import copy_seen
from tidelog.sources.base import SourcePartition

__all__ = ["carry_known", "freeze_heads", "release_heads"]

_ATTEMPTS = 50  # of a write that others keep changing


def freeze_heads(log: Log, pipeline: Pipeline, promotion: Promotion | Ended) -> None:
    """Freeze all heads of a pipeline, and settle the ranges that are under way there."""
    work = _Freeze(log, pipeline, epoch=0)
    for partition in read_partitions(log, pipeline.id):
        work.freeze(SourcePartition.named(partition), promotion.id)


def release_heads(log: Log, pipeline: str, promotion: Promotion) -> None:
    """Let drivers resume at once; those that meet a frozen head later thaw it themselves."""
    for partition in read_partitions(log, pipeline):
        where = layout.pipeline_partition(pipeline, partition)
        row = log.catalog.get(where, "head")
        head = decode_row(row.value, Progress, where) if row is not None else None
        if row is None or head is None or head.frozen != promotion.id:
            continue
        change: Change = Delete("head", expect=row.version)
        if head.position:
            thawed = msgspec.structs.replace(head, frozen="")
            change = Put("head", encode_row(thawed), expect=row.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(where, change, write_id=log.ids.new())


def carry_known(log: Log, old: str, new: str) -> None:
    """Copy what a frozen generation knows of its source to the one that replaces it.

    That is: what its source recognises files by, the ends that its creation listed and that drivers
    saw, and what a person accepted: partitions that ended, and rows of files that vanished. A
    driver would otherwise take other files for those that were read, or ask the person again.
    """
    list_partitions(log, new, read_listed(log, old).values())
    copy_seen(log, old, new)
    for partition in read_partitions(log, old):
        before = read_progress(log, old, partition)
        if before is not None:
            _carry_head(log, before, layout.pipeline_partition(new, partition))


def _carry_head(log: Log, before: Progress, where: str) -> None:
    """Copy what a head says to that of another generation, which a driver may be changing."""
    for _ in range(_ATTEMPTS):
        row = log.catalog.get(where, "head")
        if row is None:
            return
        head = decode_row(row.value, Progress, where)
        carried = _with_note(head, before)
        same = head.position == before.position and is_same_sequence(head, before)
        if same and not head.ended:
            carried = _with_decisions(carried, before)
        if carried == head:
            return
        change = Put("head", encode_row(carried), expect=row.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(where, change, write_id=log.ids.new())
    raise UnavailableError(f"head `{where}`: others keep changing it: try again")


def _with_note(head: Progress, before: Progress) -> Progress:
    """The head with the note of another generation, of the same file or topic.

    A note may be of more than was read. Notes of sources without incarnations are lists of files,
    which each generation has read for itself.
    """
    same = head.incarnation and head.incarnation == before.incarnation
    return msgspec.structs.replace(head, note=before.note) if same else head


def _with_decisions(head: Progress, before: Progress) -> Progress:
    """The head with gaps and an end that a person accepted at the same position."""
    decided = [gap for gap in before.gaps if before.ended or gap.reason == "vanished"]
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
    """Takes heads from the drivers that have them, and finishes what was decided."""

    def freeze(self, partition: SourcePartition, promotion: str) -> None:
        """Freeze one head, and settle its range."""
        where = layout.pipeline_partition(self._pipeline.id, partition.text)
        for _ in range(_ATTEMPTS):
            row = self._log.catalog.get(where, "head")
            found = decode_row(row.value, Progress, where) if row is not None else None
            if found is not None and found.closed:
                return
            if row is not None and found is not None and found.frozen == promotion:
                self._settle(Track(partition, where, found, row.version))
                return
            head = msgspec.structs.replace(found or Progress("", 0, 0), frozen=promotion)
            expect = ABSENT if row is None else row.version
            change = Put("head", encode_row(head), expect=expect)
            with contextlib.suppress(ConflictError, UnknownOutcomeError):
                self._log.catalog.write(where, change, write_id=self._log.ids.new())
        raise UnavailableError(f"head of `{partition.text}`: others keep changing it: try again")

    def _settle(self, track: Track) -> None:
        self._read_intent(track)
        if track.intent is None:
            return
        if track.intent.manifest:
            self._finish(track, self._manifest(track.intent.manifest), CycleReport())
        else:
            self._withdraw(track)
