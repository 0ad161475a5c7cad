"""Topics that were deleted and created again, seen by partitions of which nothing was read yet.

A partition of a recreated topic is another sequence of events (``failures.remade_bounds``). The
same holds for the topic as a whole: if an archive has events of the old topic, it gets none of the
new one, also not of partitions that the old one did not have, or of which nothing was read. So
before the first range of a partition, it is compared with others of its topic that were read.

Sources give all partitions of a topic one incarnation. Files have one each: nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.connectors.source import (
    Bounds,
    Source,
    SourcePartition,
    TrackingSource,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.model.pipeline import Progress
from tidelog.pipeline.base import Track
from tidelog.pipeline.failures import REMADE_REMEDY, RemadeError

__all__ = ["TopicHeads", "is_topic_remade", "without_remade"]


class TopicHeads:
    """The heads of a pipeline, by topic. Those of other drivers are read once in a cycle."""

    def __init__(self, context: Context, pipeline: str) -> None:
        self._context = context
        self._pipeline = pipeline
        self._others: dict[SourcePartition, Progress | None] | None = None

    def forget(self) -> None:
        """Reads them again when they are next needed."""
        self._others = None

    def with_commits(
        self, topic: str, own: Mapping[SourcePartition, Progress]
    ) -> dict[SourcePartition, Progress]:
        """Returns the heads of partitions of a topic from which ranges are committed."""
        if self._others is None:
            names = map(SourcePartition.named, read_partitions(self._context, self._pipeline))
            self._others = {
                each: read_progress(self._context, self._pipeline, each.text)
                for each in names
                if each not in own
            }
        heads = {**self._others, **own}
        return {
            each: head
            for each, head in heads.items()
            if each.topic == topic and head is not None and head.totals.commits
        }


def is_topic_remade(
    track: Track,
    held: Bounds,
    others: Mapping[SourcePartition, Progress],
    source: Source,
    accept_loss: bool,
) -> bool:
    """Returns whether the topic of a partition without events was created again, as accepted.

    ``others`` are heads of the same topic with commits. Raises ``RemadeError`` if it was created
    again and that is not accepted.
    """
    partition, head = track.partition, track.head
    if isinstance(source, TrackingSource) or not held.incarnation:
        return False
    older = {each: other for each, other in others.items() if not other.is_of(held.incarnation)}
    now = bounds_apart(source, [partition, *older], {}) if older else {}
    found = now.get(partition, held).incarnation
    for each, other in older.items():
        is_here = each in now and now[each].incarnation == found != other.incarnation
        if not is_here and not head.incarnation == other.incarnation != found:
            continue
        if accept_loss:
            return True
        raise RemadeError(
            f"source partition `{partition.text}`: its topic was deleted and made again: it is "
            f"{found} now, and was {other.incarnation} when `{each.text}` was read: "
            f"{REMADE_REMEDY}",
            partition=partition.text,
            incarnation=found,
        )
    return False


def without_remade(
    context: Context, pipeline: str, bounds: Mapping[SourcePartition, Bounds]
) -> dict[SourcePartition, Bounds]:
    """Returns what a source holds, without topics that were created again since a pipeline read."""
    remade: set[str] = set()
    for partition, held in bounds.items():
        head = read_progress(context, pipeline, partition.text) if held.incarnation else None
        if head is not None and head.totals.commits and not head.is_of(held.incarnation):
            remade.add(held.incarnation)
    return {each: held for each, held in bounds.items() if held.incarnation not in remade}
