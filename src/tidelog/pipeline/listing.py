"""Listing the source partitions that a pipeline's creation sees, with the ends that they have.

An archive's creation does it, and the first driver of any other pipeline. One that appears after
that begins at its own first event, whatever start a driver has: nothing that came since is skipped.
Killed half-way, it leaves partitions unlisted, which then begin at their first event too.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.log.archives import list_partitions
from tidelog.log.base import Log
from tidelog.model.pipeline import Listed
from tidelog.sources.base import Bounds, Source, SourcePartition, bounds_apart

__all__ = ["list_seen", "look_at_source"]


def look_at_source(log: Log, pipeline: str, source: Source) -> None:
    """List all partitions of a source, also those of other shards.

    One that cannot be asked now is left out, so it begins at its first event.
    """
    list_seen(log, pipeline, bounds_apart(source, source.partitions(), {}))


def list_seen(log: Log, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
    """List partitions with their ends; one that is listed already keeps what it says."""
    now_ms = log.clock.now_ms()
    list_partitions(
        log,
        pipeline,
        (Listed(each.text, held.end, held.incarnation, now_ms) for each, held in bounds.items()),
    )
