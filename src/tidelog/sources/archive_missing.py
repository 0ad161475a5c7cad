"""What a range of an archive lacks: offsets that its commits counted, and its files do not hold.

A range may begin and end inside of a commit. Gaps are cut exactly. How many offsets of a piece of a
commit were dropped or never there is not known, only how many of the whole: so these are counted as
far as they fit, what was dropped first, and the rest was erased. All of it adds up in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.model.pipeline import Gap, GapReason, Manifest, joined_gaps, offsets_between
from tidelog.sources.base import Missing, Range

__all__ = ["cut_gap", "missing_in_commits"]


def missing_in_commits(
    range: Range, read: int, manifests: Sequence[Manifest], reason: GapReason | None = "upstream"
) -> Missing:
    """Returns why a range has fewer events than offsets, by the manifests that it touches.

    Gaps have the reason that is given, or without one their own. What a transform dropped, here or
    in an archive further up, is some of the offsets only, and keeps that reason.
    """
    span = offsets_between(range.start, range.limit)
    if span is None:
        span = sum(_numbers(each) for each in manifests)
    left = span - read
    gaps: tuple[Gap, ...] = ()
    some = [each.dropped for each in manifests]  # offsets that are some of a range
    for manifest in manifests:
        for gap in manifest.lost:
            cut = cut_gap(gap, range.start, range.limit, reason=reason)
            if cut is not None and gap.is_partial:
                some.append(cut.offsets)
            elif cut is not None:
                gaps = joined_gaps(gaps, (cut,))
    left -= sum(gap.offsets for gap in gaps)
    dropped = min(max(0, left), sum(some))
    if dropped:
        gaps = (*gaps, Gap(range.start, range.limit, "transform", dropped))
        left -= dropped
    absent = min(max(0, left), sum(each.absent for each in manifests))
    return Missing(absent, left - absent, gaps)


def cut_gap(gap: Gap, start: str, end: str, reason: GapReason | None = None) -> Gap | None:
    """Returns the part of a gap between two positions; None if there is none.

    A gap whose offsets are spread over its range keeps as many as fit.
    """
    why = gap.reason if reason is None else reason
    whole = offsets_between(gap.start, gap.end)
    if whole is None or offsets_between(start, end) is None:
        return Gap(gap.start, gap.end, why, gap.offsets)
    first, last = max(int(gap.start), int(start)), min(int(gap.end), int(end))
    if first >= last:
        return None
    return Gap(str(first), str(last), why, min(gap.offsets, last - first))


def _numbers(manifest: Manifest) -> int:
    """How many events a range has numbers for, where its positions are not offsets."""
    skipped = sum(gap.offsets for gap in manifest.lost)
    return manifest.read + manifest.deleted + manifest.absent + skipped
