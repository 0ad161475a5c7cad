"""Offsets that no file of a folder has: gaps with the reason ``files``.

A folder does not show whether such an offset ever held an event. A file may be missing. The longest
holes of a range, where a file may have been, become gaps of their own. If an archive of the folder
gets the events later, its readers go back for them. The other holes are counted in one gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tidelog.connectors.source import MissingOffsets, SourceRange
from tidelog.model.limits import FILE_GAPS_PER_RANGE
from tidelog.model.pipeline import Gap

__all__ = ["holes_between", "holes_between_files", "missing_in_files"]

Hole = tuple[int, int]
"""Offsets without an event: from the first up to, not including, the second."""


def holes_between_files(spans: Iterable[Hole], start: int, limit: int) -> list[Hole]:
    """Returns the offsets of ``[start, limit)`` that are outside of all spans, in order."""
    holes: list[Hole] = []
    at = start
    filled = sorted((first, end) for first, end in spans if first < end)
    for first, end in [*filled, (limit, limit)]:
        if at < min(first, limit):
            holes.append((at, min(first, limit)))
        at = max(at, end)
    return holes


def holes_between(offsets: npt.NDArray[np.int64], start: int, limit: int) -> list[Hole]:
    """Returns the offsets of ``[start, limit)`` that are not among these, which are in order."""
    inside = offsets[np.searchsorted(offsets, start) : np.searchsorted(offsets, limit)]
    edges = np.concatenate([[start - 1], inside, [limit]])
    before = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[at]) + 1, int(edges[at + 1])) for at in before]


def missing_in_files(range: SourceRange, holes: Sequence[Hole], offsets: int) -> MissingOffsets:
    """Returns the holes of a range as gaps; ``offsets`` is how many offsets have no event.

    The two differ if files came or vanished since the range was read. Then only the number is
    known.
    """
    if sum(end - first for first, end in holes) != offsets:
        holes = ()
    longest = sorted(holes, key=lambda hole: hole[0] - hole[1])[:FILE_GAPS_PER_RANGE]
    gaps = [Gap(str(first), str(end), "files", end - first) for first, end in sorted(longest)]
    if others := offsets - sum(gap.offsets for gap in gaps):
        gaps.append(Gap(range.start, range.limit, "files", others))
    return MissingOffsets(gaps=tuple(gaps))
