"""What a source partition has lost, or has become: what a person must decide.

A source partition that was deleted and made again is another sequence of events. None of it is
written to an archive that has events of the one before. It is an error of that partition until a
person accepts it (``--accept-loss``). Then the head says that the partition has ended; or it begins
again, if nothing of the one before was ever committed.
"""

from __future__ import annotations

import msgspec

from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.pipeline import Begin, Gap, Progress, joined_gaps
from tidelog.sources.base import Bounds, KnowsEnds, Source, SourcePartition

__all__ = [
    "LostError",
    "RemadeError",
    "check_gaps",
    "ended_head",
    "gaps_after",
    "remade_bounds",
    "vanished_end",
    "vanished_head",
]

_REMEDY = (
    "create a new archive or pump for what is there now; run this one with --accept-loss to record "
    "that it ends there"
)


class LostError(InvalidError):
    """A source no longer holds what was to be read next: a person must decide."""

    kind = "lost"


class RemadeError(LostError):
    """A source partition was deleted and made again: what is there now is another one."""

    kind = "remade"


def remade_bounds(
    partition: SourcePartition, head: Progress, bounds: Bounds, source: Source, accept_loss: bool
) -> Bounds | None:
    """Returns what a source partition holds that is another one than the head knows.

    None for the same one. Bounds that were read before the head prove nothing, since another driver
    may have moved the head on: they are read again before anything is decided. ``RemadeError``
    where it is another one, and that is not accepted.
    """
    if not _difference(head, bounds, source):
        return None
    now = source.bounds([partition])[partition]
    what = _difference(head, now, source)
    if what and not accept_loss:
        raise RemadeError(
            f"source partition `{partition.text}`: was deleted and made again: {what}, and "
            f"{head.position} is committed: {_REMEDY}",
            partition=partition.text,
            incarnation=now.incarnation,
        )
    return now if what else None


def _difference(head: Progress, bounds: Bounds, source: Source) -> str:
    """How a source partition differs from the one that the head knows; empty if it does not."""
    if not head.is_of(bounds.incarnation):
        return f"it is {bounds.incarnation} now, and was {head.incarnation}"
    return f"it ends at {bounds.end} now" if source.before(bounds.end, head.position) else ""


def ended_head(
    partition: SourcePartition, head: Progress, bounds: Bounds, source: Source, now_ms: int
) -> Progress:
    """Returns the head of a source partition that was made again, as a person accepted.

    It has ended if anything was committed, else it begins again in what is there now. The gap
    behind the position goes up to where the one before had ended, if the source knows that.
    """
    end = source.ended_at(partition, head.incarnation) if isinstance(source, KnowsEnds) else ""
    totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
    until = end if end and head.totals.commits else head.position
    gaps = joined_gaps(head.gaps, (Gap(head.position, until, "remade"),))
    if head.totals.commits:
        return msgspec.structs.replace(head, ended="remade", totals=totals, gaps=gaps)
    return msgspec.structs.replace(
        head,
        position=bounds.first,
        incarnation=bounds.incarnation,
        begin=Begin(bounds.first, bounds.begins, now_ms),
        note=b"",
        totals=totals,
        gaps=gaps,
    )


def vanished_head(head: Progress, end: str, now_ms: int) -> Progress:
    """Returns the head of a source partition whose file vanished before its end, as was accepted.

    The gap is behind the position. If the file comes back, reading resumes where it was.
    """
    totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
    gaps = (*_without_vanished(head.gaps), Gap(head.position, end, "vanished"))
    return msgspec.structs.replace(head, totals=totals, gaps=gaps)


def gaps_after(head: Progress, more: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Returns the gaps of a head after a range with some; what vanished has come back then."""
    return joined_gaps(_without_vanished(head.gaps), more)


def vanished_end(head: Progress) -> str:
    """Returns up to where the loss of a file was accepted; empty where none was."""
    return next((gap.end for gap in head.gaps if gap.reason == "vanished"), "")


def _without_vanished(gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
    return tuple(gap for gap in gaps if gap.reason != "vanished")


def check_gaps(partition: SourcePartition, head: Progress, more: tuple[Gap, ...]) -> None:
    """Raise ``LostError`` for gaps that the head has no room for."""
    if len(joined_gaps(head.gaps, more)) > limits.GAPS_MAX:
        raise LostError(
            f"source partition `{partition.text}`: has {limits.GAPS_MAX} gaps already: "
            "make its files again with `tidelog archive backfill`, or create a new archive",
            partition=partition.text,
        )
