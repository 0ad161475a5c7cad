"""Listing the source partitions that a pipeline's creation sees, with the ends that they have.

An archive's creation does it, and the first driver of any other pipeline. One that appears after
that begins at its own first event, with any start of a driver: nothing that came since is skipped.
Killed half-way, it leaves partitions unlisted, which then begin at their first event too.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.log.archives import list_partitions, read_partitions, read_progress
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

__all__ = ["list_seen", "look_at_source", "track"]


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
    known = dict(heads or {})
    for name in read_partitions(log, pipeline):
        partition = SourcePartition.named(name)
        if partition not in known and (head := read_progress(log, pipeline, name)) is not None:
            known[partition] = head
    seen = read_seen(log, pipeline) if heads is None else {}
    source.track(
        {
            each: Known(
                head.position,
                head.incarnation,
                head.note,
                seen.get(each, ""),
                vanished_end(head),
            )
            for each, head in known.items()
        }
    )
    return known


def list_seen(log: Log, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
    """List partitions with their ends; one that is listed already keeps what it says."""
    now_ms = log.clock.now_ms()
    list_partitions(
        log,
        pipeline,
        (Listed(each.text, held.end, held.incarnation, now_ms) for each, held in bounds.items()),
    )
