"""The history of an archive: when ranges were committed, and how many events each had.

It reads the rows of the newest ranges only, and no object. Of a long history it shows the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.context import Context
from tidelog.coordination.pipeline_rows import newest_commits, read_partitions, replay_pipeline
from tidelog.model.archive import Archive

__all__ = ["ArchiveHistory", "ArchivedRange", "HistoryBar", "read_history"]

_RANGES_MAX = 5_000  # in one answer
_WIDTHS_MS = (
    *(1_000 * seconds for seconds in (1, 5, 10, 30)),
    *(60_000 * minutes for minutes in (1, 5, 15, 30)),
    *(3_600_000 * hours for hours in (1, 3, 6, 12, 24, 7 * 24, 30 * 24)),
)


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """A range of a source partition that is in the archive."""

    partition: str
    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int
    is_replay: bool = False  # of dead letters


@dataclass(frozen=True, slots=True)
class HistoryBar:
    """What was committed in one stretch of time."""

    start_ms: int
    events: int = 0
    files: int = 0
    dead: int = 0
    ranges: int = 0


@dataclass(frozen=True, slots=True)
class ArchiveHistory:
    """Bars of equal width, the oldest first, and the newest ranges, the newest first."""

    width_ms: int
    bars: tuple[HistoryBar, ...]
    ranges: tuple[ArchivedRange, ...]
    is_whole: bool  # otherwise older ranges are left out


def read_history(
    context: Context, archive: Archive, generation: int | None = None, bars: int = 60
) -> ArchiveHistory:
    """Returns the history of a generation in this many bars, the last of which is now."""
    own = archive.pipeline(generation)
    found: list[ArchivedRange] = []
    is_whole = True
    for pipeline in (own, replay_pipeline(own)):
        partitions = read_partitions(context, pipeline)
        most = max(1, _RANGES_MAX // max(1, len(partitions)))
        for partition in partitions:
            commits = newest_commits(context, pipeline, partition, most)
            is_whole = is_whole and len(commits) < most
            found += [
                ArchivedRange(
                    partition=partition,
                    start=each.start,
                    end=each.end,
                    events=each.events,
                    files=each.files,
                    dead=each.dead,
                    committed_ms=each.committed_ms,
                    is_replay=pipeline != own,
                )
                for each in commits
            ]
    found.sort(key=lambda each: (-each.committed_ms, each.partition, each.start))
    width_ms, counted = _bars(found, max(1, bars), context.clock.now_ms())
    return ArchiveHistory(width_ms, counted, tuple(found), is_whole)


def _bars(
    ranges: Sequence[ArchivedRange], most: int, now_ms: int
) -> tuple[int, tuple[HistoryBar, ...]]:
    """Returns the width of the bars up to now, and the bars, also those without a range."""
    times = [each.committed_ms for each in ranges if each.committed_ms > 0]
    if not times:
        return _WIDTHS_MS[0], ()
    first, last = min(times), max(*times, now_ms)
    fitting = (each for each in _WIDTHS_MS if last // each - first // each < most)
    width = next(fitting, -(-(last - first + 1) // most))
    begin = last // width - most + 1
    counts = [[0, 0, 0, 0] for _ in range(most)]
    for each in ranges:
        if each.committed_ms > 0:
            bar = counts[each.committed_ms // width - begin]
            for at, more in enumerate((each.events, each.files, each.dead, 1)):
                bar[at] += more
    return width, tuple(HistoryBar((begin + at) * width, *bar) for at, bar in enumerate(counts))
