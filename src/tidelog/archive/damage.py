"""Finds commits of a generation whose files or manifests are missing or damaged.

A backfill skips them after a person accepts that, one whole commit at a time. What is left of such
a commit stays in the files of its generation.
"""

from __future__ import annotations

from tidelog.archive.coverage import Coverage, Interval, read_covered
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.files.objects import fetched
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_commits_to, read_partitions
from tidelog.errors import CorruptError
from tidelog.model.archive import Archive
from tidelog.pipeline.endpoints import store_at
from tidelog.store.base import Store

__all__ = ["damaged_spans", "is_by_offset"]


def is_by_offset(context: Context, archive: Archive) -> bool:
    """Returns whether another generation can skip a damaged commit of the live one.

    It cannot if the pipeline numbers events itself: later events would get other numbers.
    """
    pipeline = archive.pipeline()
    found = (read_covered(context, pipeline, each) for each in read_partitions(context, pipeline))
    return all(covered is None or covered.by_offset for covered in found)


def damaged_spans(
    context: Context,
    archive: Archive,
    source: ArchiveSource,
    partition: SourcePartition,
    old: Coverage,
) -> tuple[Interval, ...]:
    """Returns the offsets of the live generation's commits that cannot be read.

    Merges neighbors. Reads every file once and compares its checksum. Raises ``CorruptError`` while
    an erasure rewrites a file.
    """
    store = store_at(context, archive.store)
    spans: list[Interval] = []
    for commit in read_commits_to(context, archive.pipeline(), partition.text, old.end):
        start, end = int(commit.start), int(commit.end)
        if start == end or _is_whole(
            source, store, SourceRange(partition, commit.start, commit.end)
        ):
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)


def _is_whole(source: ArchiveSource, store: Store, range: SourceRange) -> bool:
    """Returns whether everything a commit names is there and matches its manifest."""
    before = None
    while True:
        try:
            plan = source.reader(range)
        except CorruptError:
            return False  # its manifest, after a second read
        files = [each for commit in plan.commits for each in commit.files]
        entries = [entry for each in files for entry in (each.data, each.sidecar) if entry]
        try:
            for entry in entries:
                with fetched(store, entry):
                    pass
        except CorruptError:
            if plan.is_changing:
                raise
            if plan == before:
                return False
            before = plan  # an erasure may have replaced its files in between
        else:
            return True
