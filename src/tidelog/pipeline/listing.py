"""Listing the source partitions that a pipeline's creation sees, with the ends that they have.

An archive's creation does it, and the first driver of any other pipeline. One that appears after
that begins at its own first event, with any start of a driver: nothing that came since is skipped.
Killed half-way, it leaves partitions unlisted, which then begin at their first event too.

An end is listed together with what its source knows it by: the incarnation, and in files a mark of
all that is before it. A file of the same name, or with the same first line, may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tidelog.log.archives import list_partitions, read_listed, read_progress
from tidelog.log.base import Log
from tidelog.model.pipeline import Listed, Progress
from tidelog.pipeline.losses import vanished_end
from tidelog.pipeline.seen import read_seen
from tidelog.sources.base import (
    Bounds,
    Known,
    Source,
    SourcePartition,
    Tracking,
    bounds_apart,
)

__all__ = ["list_seen", "look_at_source", "read_known", "track"]


def look_at_source(log: Log, pipeline: str, source: Source) -> None:
    """List all partitions of a source, also those of other shards.

    One that cannot be reached now is left out, so it begins at its first event.
    """
    list_seen(log, pipeline, bounds_apart(source, source.partitions(), {}))


def track(
    log: Log, pipeline: str, source: Source, heads: Mapping[SourcePartition, Progress] | None = None
) -> dict[SourcePartition, Progress]:
    """Pass what the pipeline has read of its partitions to a source that tracks it.

    Returns the heads that it passed; ``heads`` are those that need not be read. Without any, it
    also passes the ends that drivers have seen, which a source remembers.
    """
    if not isinstance(source, Tracking):
        return {}
    found = dict(heads or {})
    known = read_known(log, pipeline, found)
    seen = read_seen(log, pipeline) if heads is None else {}
    source.track({each: replace(one, seen=seen.get(each, "")) for each, one in known.items()})
    return found


def read_known(
    log: Log, pipeline: str, heads: dict[SourcePartition, Progress]
) -> dict[SourcePartition, Known]:
    """Return what a pipeline knows of its source partitions, also of those that it only listed.

    Heads that are not in ``heads`` are read and put there.
    """
    known: dict[SourcePartition, Known] = {}
    for name, listed in read_listed(log, pipeline).items():
        partition = SourcePartition.named(name)
        head = heads.get(partition) or read_progress(log, pipeline, name)
        if head is not None:
            heads[partition] = head
        elif listed.end:  # nothing of it was read
            known[partition] = Known("0", listed.incarnation, listed.note)
    for partition, head in heads.items():
        lost = vanished_end(head)
        known[partition] = Known(head.position, head.incarnation, head.note, lost=lost)
    return known


def list_seen(log: Log, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
    """List partitions with their ends; one that is listed already keeps what it says."""
    now_ms = log.clock.now_ms()
    list_partitions(
        log,
        pipeline,
        (
            Listed(each.text, held.end, held.incarnation, now_ms, held.note)
            for each, held in bounds.items()
        ),
    )
