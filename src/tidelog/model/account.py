"""The account of a source partition: what happened to every offset since the archive's beginning.

Each offset between ``begin`` and ``end`` is one of these, and they add up to ``span``:

- *archived*: its event is in a data file
- *dead*: its event is a dead letter
- *dropped*: the transform left its event out
- *erased*: its event was deleted, before it was read or from the files
- *absent*: it never held an event for readers (compaction, transaction markers)
- in a *gap*: skipped by a decision that is recorded with its reason

If a source's positions are not offsets (Kinesis, Scylla, and files read by row), the pipeline
numbers the events that it reads. Then ``is_numbered`` is true, ``span`` counts what was read, and
nothing is absent. A gap there has positions, but no count.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.model.pipeline import Begin, Gap, Progress, offsets_between

__all__ = ["Account", "account_of", "span_of"]


@dataclass(frozen=True, slots=True)
class Account:
    """What happened to the offsets of one source partition."""

    partition: str
    begin: Begin | None
    end: str
    span: int
    is_numbered: bool
    archived: int = 0
    dead: int = 0
    dropped: int = 0
    erased: int = 0
    absent: int = 0
    gaps: tuple[Gap, ...] = ()

    @property
    def skipped(self) -> int:
        """Returns how many offsets are in gaps."""
        return sum(gap.offsets for gap in self.gaps)

    @property
    def total(self) -> int:
        """Returns the sum of all parts."""
        return self.archived + self.dead + self.dropped + self.erased + self.absent + self.skipped

    @property
    def adds_up(self) -> bool:
        """Returns whether every offset is accounted for, once."""
        parts = (self.archived, self.dead, self.dropped, self.erased, self.absent, self.skipped)
        return self.total == self.span and min(parts) >= 0

    @property
    def problem(self) -> str:
        """Returns what does not add up, in words; empty if all does."""
        if self.adds_up:
            return ""
        return (
            f"{self.span} offsets, but {self.archived} archived, {self.dead} dead, "
            f"{self.dropped} dropped, {self.erased} erased, {self.absent} never there and "
            f"{self.skipped} in gaps, which is {self.total}"
        )


def account_of(partition: str, head: Progress, archived: int, dead: int) -> Account:
    """Returns the account of a head, with what its files contain now: ``archived`` and ``dead``.

    What commits wrote as events or dead letters, and the files no longer contain, was erased.
    """
    totals = head.totals
    stored = head.ordinal - totals.dropped - totals.left_out
    span, is_numbered = span_of(head)
    return Account(
        partition=partition,
        begin=head.begin,
        end=head.position,
        span=span,
        is_numbered=is_numbered,
        archived=archived,
        dead=dead,
        dropped=totals.dropped,
        erased=stored - archived - dead + totals.left_out + totals.deleted,
        absent=totals.absent,
        gaps=head.gaps,
    )


def span_of(head: Progress) -> tuple[int, bool]:
    """Returns how many offsets a head has passed since its begin, and whether they are numbered."""
    begin = head.begin.position if head.begin is not None else head.position
    offsets = offsets_between(begin, head.position)
    if offsets is None or head.begin is None:
        return head.ordinal + head.totals.deleted + head.totals.absent + head.totals.skipped, True
    return offsets, False
