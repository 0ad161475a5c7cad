"""Finds ranges under way of archives, which may hold an event that is to be erased.

No file of such a range can be searched yet. An erasure waits for it, or reports what finishes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from tidelog.archive.verify_remedies import replay_command
from tidelog.clock import looks
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import generation_pipeline, read_intent, read_partitions
from tidelog.model.archive import Archive

__all__ = [
    "UnfinishedRange",
    "are_some_between",
    "finish_remedy",
    "is_under_way",
    "ranges_under_way",
    "still_under_way",
]

_WAIT_S = 10.0
_LOOK_S = 0.2

UnfinishedRange = tuple[str, str, str, int]
"""A range in progress: pipeline, source partition, start and time."""


def ranges_under_way(context: Context, pipelines: Iterable[str]) -> set[UnfinishedRange]:
    """Returns the ranges of some pipelines that drivers read or have read."""
    found: set[UnfinishedRange] = set()
    for pipeline in pipelines:
        for partition in read_partitions(context, pipeline):
            intent = read_intent(context, pipeline, partition)
            ranges = () if intent is None else filter(None, (intent, intent.ahead))
            found |= {(pipeline, partition, each.start, each.began_ms) for each in ranges}
    return found


def still_under_way(
    context: Context, pipelines: Collection[str], slow: Collection[UnfinishedRange] = ()
) -> set[UnfinishedRange]:
    """Returns the ranges under way that take longer than ten seconds.

    Does not wait for ``slow`` ones, which took that long before.
    """
    left = ranges_under_way(context, pipelines)
    for _ in looks(context.clock, _WAIT_S, _LOOK_S) if left.difference(slow) else ():
        left &= ranges_under_way(context, pipelines)
        if not left.difference(slow):
            break
    return left


def is_under_way(
    context: Context, pipeline: str, partition: str, wanted: npt.NDArray[np.int64]
) -> bool:
    """Returns whether a range with some of the offsets is being done now."""
    intent = read_intent(context, pipeline, partition)
    return intent is not None and are_some_between(intent.start, intent.reach, wanted)


def are_some_between(start: str, end: str, wanted: npt.NDArray[np.int64]) -> bool:
    """Returns whether some offsets may be between two positions; True if these are no offsets."""
    if not all(text.isascii() and text.isdecimal() for text in (start, end)):
        return True
    first, after = (int(np.searchsorted(wanted, int(text))) for text in (start, end))
    return first < after


def finish_remedy(archive: Archive, pipeline: str) -> str:
    """Returns what a person does about a range under way of a generation, or of its replays."""
    if archive.ended is not None:
        return f"run `tidelog archive delete {archive.name}`"
    own = generation_pipeline(pipeline)
    number = int(own.rpartition(".")[2])
    state = archive.state_of(number) if number in archive.formats else "removing"
    drop = f"run `tidelog archive drop {archive.name} {number}`"
    if state == "removing":
        return "run `tidelog sweep`"
    if state == "kept":
        return f"finish it with `tidelog archive rollback {archive.name}`, or {drop}"
    if own != pipeline:  # no other driver finishes a replay
        return f"run `{replay_command(archive, number)}`"
    if number == archive.generation:
        return f"run `tidelog archive run {archive.name}`"
    return f"finish it with `tidelog archive backfill {archive.name}`, or {drop}"
