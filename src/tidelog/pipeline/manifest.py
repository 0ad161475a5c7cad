"""The manifest of a range: what tasks produced of it, and which offsets have no event.

A source says which offsets it lacks. Those that are known to be erased do not count as lost.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tidelog.connectors.source import (
    MissingOffsets,
    Source,
    SourceRange,
    missing_in,
)
from tidelog.errors import (
    InternalError,
)
from tidelog.model import limits
from tidelog.model.pipeline import (
    Commit,
    Gap,
    Intent,
    Manifest,
    Progress,
    joined_gaps,
    offsets_between,
)
from tidelog.pipeline.source_state import SourceState
from tidelog.pipeline.tasks import ErasedRows, TaskOutput

__all__ = [
    "commit_of",
    "is_idle",
    "manifest_of",
    "missing_from",
]


def manifest_of(
    pipeline: str,
    state: SourceState,
    intent: Intent,
    produced: TaskOutput,
    missing: MissingOffsets,
) -> Manifest:
    """Returns what a range has produced, for its manifest."""
    carried, counted = state.carried, state.carried.counted if state.carried else None
    if counted is not None:  # events keep their numbers, also after deleted ones
        gone = counted.read - counted.dropped - produced.read
        staged = replace(produced.staged, left_out=produced.staged.left_out + gone)
        produced = replace(produced, read=counted.read, staged=staged, note=counted.note)
        missing = counted.missing
    return Manifest(
        pipeline=pipeline,
        partition=state.partition.text,
        start=intent.start,
        end=produced.end,
        ordinal=state.head.ordinal,
        read=produced.read,
        written=produced.staged.events,
        dropped=produced.read
        - produced.staged.events
        - produced.staged.dead
        - produced.staged.left_out,
        dead=produced.staged.dead,
        left_out=produced.staged.left_out,
        files=produced.staged.files,
        lost=(*intent.lost, *missing.gaps),
        note=produced.note or ((carried.note or state.head.note) if carried else b""),
        deleted=missing.deleted,
        absent=missing.absent,
        filled=carried.generation if carried else 0,
        as_is=carried is not None and carried.as_is,
        completed=state.completed,
        copied=len(carried.files) if carried else 0,
        incarnation=intent.incarnation,
    )


def missing_from(
    source: Source, state: SourceState, intent: Intent, produced: TaskOutput
) -> MissingOffsets:
    """Returns why a range has fewer events than offsets."""
    start = intent.lost[-1].end if intent.lost else intent.start
    reached = SourceRange(state.partition, start, produced.end, incarnation=intent.incarnation)
    missing = missing_in(source, reached, produced.read)
    if min(missing.absent, missing.deleted) < 0:
        raise InternalError(
            f"source partition `{state.partition.text}`: {produced.read} events came from "
            f"[{start}, {produced.end}), which are more than it has offsets"
        )
    if offsets_between(start, produced.end) is None:
        return missing
    missing = _with_erased(missing, reached, state.erased, produced.staged.left_out)
    return _with_few_gaps(missing, reached, state.head)


def _with_erased(
    missing: MissingOffsets, range: SourceRange, erased: ErasedRows, left_out: int
) -> MissingOffsets:
    """Returns what is missing, where no offset known to be erased counts as something else.

    A source may know only totals, or no longer know that an offset had an event. At most
    ``left_out`` of the erased offsets were read, and a transform may have dropped others.
    """
    known = erased.count_in(int(range.start), int(range.limit), missing.gaps) - left_out
    known -= sum(gap.offsets for gap in missing.gaps if gap.reason == "transform")
    known = max(0, known - missing.deleted)
    absent = max(0, missing.absent - known)
    known -= missing.absent - absent
    gaps: list[Gap] = []
    for gap in missing.gaps:
        if gap.reason != "files":
            gaps.append(gap)
        elif not gap.is_scattered:
            gaps += _pieces(gap, erased)
        elif gap.offsets > known:
            gaps.append(Gap(gap.start, gap.end, gap.reason, gap.offsets - known))
    deleted = missing.offsets - absent - sum(gap.offsets for gap in gaps)
    return MissingOffsets(absent, deleted, tuple(gaps))


def _pieces(gap: Gap, erased: ErasedRows) -> list[Gap]:
    """Returns the parts of a gap between erased offsets."""
    inside = erased.within(int(gap.start), int(gap.end)).tolist()
    edges = [int(gap.start) - 1, *sorted(set(inside)), int(gap.end)]
    return [
        Gap(str(before + 1), str(after), gap.reason, after - before - 1)
        for before, after in pairwise(edges)
        if before + 1 < after
    ]


def _with_few_gaps(missing: MissingOffsets, range: SourceRange, head: Progress) -> MissingOffsets:
    """Returns what is missing, where what files lack fits into the head: the rest is counted."""
    listed = sum(gap.reason == "files" for gap in head.gaps)
    gaps: list[Gap] = []
    others = 0
    for gap in missing.gaps:
        is_of_files = gap.reason == "files"
        is_short = gap.offsets == 1 and listed >= limits.FILE_GAPS_SHORT
        is_over = is_short or listed >= limits.FILE_GAPS_MAX
        if gap.is_scattered or not (is_of_files and is_over):
            gaps.append(gap)
            listed += is_of_files
        else:
            others += gap.offsets
    if others:
        gaps = list(joined_gaps(tuple(gaps), (Gap(range.start, range.limit, "files", others),)))
    return replace(missing, gaps=tuple(gaps))


def is_idle(intent: Intent, produced: TaskOutput) -> bool:
    """Returns whether a range was empty and ended where it began: the source knows no ends."""
    return not intent.lost and produced.end == intent.start and not produced.read


def commit_of(intent: Intent, manifest: Manifest, now_ms: int) -> Commit:
    """Returns the row of a range that is committed now."""
    return Commit(
        manifest=intent.manifest,
        start=manifest.start,
        end=manifest.end,
        events=manifest.read,
        files=len(manifest.files),
        dead=manifest.dead,
        committed_ms=now_ms,
        left_out=manifest.left_out,
    )
