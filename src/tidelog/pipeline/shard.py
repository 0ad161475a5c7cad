"""Who drives a shard of a pipeline: one at a time, the others stand by (``log.holding``).

The epoch is what fences: it goes into the heads of all source partitions, and every write there
expects them.
"""

from __future__ import annotations

from tidelog.log.base import Log
from tidelog.log.holding import Holding
from tidelog.model import layout

__all__ = ["Shard"]


class Shard(Holding):
    """One driver's view of one shard."""

    retakes = False  # its cycle goes on under the epoch that it began with

    def __init__(self, log: Log, incarnation: str, number: int) -> None:
        row = layout.shard_row(number)
        super().__init__(log, layout.pipeline_shards(incarnation), row, f"shard `{row}`")
