"""All events of a partition that have one key: only ids, keys and times are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.amended import pending
from tidelog.log.base import Log
from tidelog.log.contents import Cut, describe_run, read_run
from tidelog.log.read import Reader, lost_object, may_have_gone
from tidelog.log.rows import Rows
from tidelog.log.topics import read_head
from tidelog.model.run import Run
from tidelog.model.topic import Topic

__all__ = ["with_key"]

Keyed = tuple[str | None, int, int]
"""The id, the offset and the time of an event."""

_LOSSES_MAX = 5  # of objects one after another that went while they were read


def with_key(
    log: Log,
    topic: Topic,
    partition: int,
    key: bytes,
    bounds: tuple[int, int],
    progress: Callable[[int], None],
) -> Iterator[Keyed]:
    """The events of ``[start, end)`` that have this key.

    ``progress`` is called with the bytes that are done. ``NotFoundError`` once the topic is gone,
    ``CorruptError`` where an object that rows name is missing.
    """
    at, end = bounds
    losses = 0
    while at < end:
        head, _ = read_head(log, topic, partition)
        at = max(at, head.start)
        amendments = pending(log, topic, partition, head, at, end)
        until = end if amendments.end is None else min(end, amendments.end)
        runs: list[Run] = []
        try:
            runs = Reader(log, topic, partition).runs(at) if at < end else []
            for run in runs:
                if run.base >= until:
                    break
                what = describe_run(topic.name, partition, run)
                cut = Cut(at, until, ("id", "key", "timestamp"))
                for rows in read_run(log.store, run, what, cut, amendments):
                    yield from _matches(rows, key, f"{topic.name}/{partition}")
                    at, losses = rows.end, 0
                progress(run.byte_end - run.byte_start)
        except NotFoundError as exc:
            losses += 1
            now, _ = read_head(log, topic, partition)
            if at >= now.start and (losses > _LOSSES_MAX or not may_have_gone(head, now)):
                raise lost_object(topic.name, partition, runs, exc) from exc


def _matches(rows: Rows, key: bytes, name: str) -> Iterator[Keyed]:
    batch = rows.batch
    mask = pc.fill_null(pc.equal(batch.column("key"), pa.scalar(key, pa.binary())), False)
    numbers = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
    if len(numbers):
        found = batch.take(pa.array(numbers))
        times = found.column("timestamp").cast(pa.int64()).to_pylist()
        try:
            ids = found.column("id").to_pylist()
        except UnicodeDecodeError as exc:
            raise CorruptError(
                f"partition `{name}`, offsets {rows.base} to {rows.end}: an id is not valid UTF-8: "
                "run `tidelog verify`, which names its offset"
            ) from exc
        yield from zip(ids, rows.offsets[numbers].tolist(), times, strict=True)
