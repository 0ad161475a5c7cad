"""Events that an archive got after a reader of it had passed the gap they were in.

A generation that is promoted may have events where the one before it had a gap, or was made of a
folder without some files. A pump or a stream
that has passed the gap goes back for them: the cycle plans a range inside of the gap, and its
commit leaves the position where it is and removes that part of the gap. All else is as for any
range, so each event comes once. It comes later than its neighbors.

An archive keeps the gap instead: its files are ordered by offset. A backfill fills it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tidelog.connectors.source import Bounds
from tidelog.model.pipeline import Gap, Manifest, Progress, Totals, joined_gaps, offsets_between

__all__ = ["late_head", "late_spans", "span_to_read"]

Span = tuple[int, int]

_FILLED = ("upstream", "files")  # reasons of gaps that an archive may fill later


def span_to_read(head: Progress, held: Bounds) -> tuple[str, Bounds]:
    """Returns where the next range begins, and bounds that end where it must end."""
    for start, end in late_spans(head, held):
        return str(start), replace(held, end=str(end))
    return head.position, held


def late_spans(head: Progress, held: Bounds) -> list[Span]:
    """Returns the offsets in gaps of a head that its source, an archive, has now."""
    if offsets_between(held.first, held.end) is None:
        return []
    passed = [_span(gap) for gap in head.gaps if gap.reason in _FILLED and not gap.is_partial]
    missing = [_span(gap) for gap in held.gaps if not gap.is_partial]
    found: list[Span] = []
    for start, end in passed:
        at, last = max(start, int(held.first)), min(end, int(held.end))
        for first, after in sorted(missing):
            if at < min(first, last):
                found.append((at, min(first, last)))
            at = max(at, after)
        if at < last:
            found.append((at, last))
    return found


def late_head(head: Progress, manifest: Manifest, totals: Totals) -> Progress:
    """Returns the head after a range in one of its gaps; ``totals`` include the range."""
    start, end = int(manifest.start), int(manifest.end)
    gaps: list[Gap] = []
    for gap in head.gaps:
        whole = offsets_between(gap.start, gap.end)
        if whole is None or gap.is_partial or not (int(gap.start) < end and start < int(gap.end)):
            gaps.append(gap)
            continue
        for first, last in ((int(gap.start), start), (end, int(gap.end))):
            if first < last:
                gaps.append(Gap(str(first), str(last), gap.reason, last - first))
    gaps += (gap for gap in manifest.lost if not gap.is_partial)
    gaps = list(joined_gaps(tuple(gaps), tuple(gap for gap in manifest.lost if gap.is_partial)))
    after = tuple(sorted(gaps, key=lambda gap: (int(gap.start), int(gap.end))))
    before = head.totals
    return msgspec.structs.replace(
        head,
        ordinal=manifest.ordinal + manifest.read,
        gaps=after,
        totals=msgspec.structs.replace(
            totals,
            skipped=sum(gap.offsets for gap in after),
            lost=before.lost + _losses(after) - _losses(head.gaps),
            event_ms=before.event_ms,
            path_ms=before.path_ms,
        ),
    )


def _losses(gaps: Iterable[Gap]) -> int:
    return sum(gap.is_loss for gap in gaps)


def _span(gap: Gap) -> Span:
    return int(gap.start), int(gap.end)
