"""Flush now: ask the driver of a pipeline to lay down what waits, whatever its policy says.

A request is a new version of one row, which a following driver looks at in every cycle. Requests
that come together are one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.log.archives import read_progress
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.sources.base import Range, SourcePartition

__all__ = ["flush_version", "request_flush", "wait_until_done"]

_LOOK_S = 0.5

Waits = Callable[[Range], bool]  # whether anything is left to do in a range


def request_flush(log: Log, pipeline: str) -> None:
    """Whoever follows this pipeline flushes at its next look."""
    where = layout.pipeline_shards(pipeline)
    row = log.catalog.get(where, layout.FLUSH_ROW)
    change = Put(layout.FLUSH_ROW, b"", expect=row.version if row else ABSENT)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # then somebody else has asked
        log.catalog.write(where, change, write_id=log.ids.new())


def flush_version(log: Log, pipeline: str) -> str:
    """Changes with each request."""
    row = log.catalog.get(layout.pipeline_shards(pipeline), layout.FLUSH_ROW)
    return row.version if row else ""


def wait_until_done(
    log: Log, pipeline: str, ends: Mapping[str, str], waits: Waits, timeout_s: float
) -> list[str]:
    """Until every source partition is committed up to its end; those that are not in time."""
    deadline_s = log.clock.monotonic_s() + timeout_s
    while True:
        behind = []
        for partition, end in ends.items():
            head, source = read_progress(log, pipeline, partition), SourcePartition.named(partition)
            if head is None or waits(Range(source, head.position, end)):
                behind.append(partition)
        if not behind or log.clock.monotonic_s() > deadline_s:
            return behind
        log.clock.sleep(_LOOK_S)
