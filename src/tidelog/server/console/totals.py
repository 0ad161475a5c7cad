"""What a partition's runs come to: counted bit by bit, so that no request reads them all.

A count goes on where it was as runs are added. When the oldest ones are trimmed, or compiled into
journals, it begins anew, and until that is through the one before is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelog.errors import NotFoundError
from tidelog.log.base import Log
from tidelog.log.read import Reader
from tidelog.model.run import Head
from tidelog.model.topic import Topic

__all__ = ["PartitionTotals", "Totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Runs from the start up to an offset."""

    at: int
    runs: int = 0
    bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None


@dataclass(slots=True)
class PartitionTotals:
    """The count of one partition."""

    shown: Totals | None = None  # None: never yet counted to the end
    _mark: tuple[int, int] = (-1, -1)
    _going: Totals = field(default_factory=lambda: Totals(0))

    def count_on(self, log: Log, topic: Topic, partition: int, head: Head, rows: int) -> int:
        """Read so many run rows at most, or a few more; how many were read."""
        mark = (head.start, head.compiled)
        if mark != self._mark:
            self._mark, self._going = mark, Totals(head.start)
        if self._going.at >= head.next:
            self.shown = self._going
            return 0
        read = 0
        reader = Reader(log, topic, partition)
        while self._going.at < head.next and read < rows:
            try:
                runs = reader.runs(self._going.at)
            except NotFoundError:  # trimmed meanwhile: the next head says so
                return read
            if not runs:
                break
            read += len(runs)
            before = self._going
            held = [run for run in runs if run.events]  # an emptied journal has no times
            first = [run.first_ms for run in held]
            last = [run.last_ms for run in held]
            self._going = Totals(
                at=runs[-1].end,
                runs=before.runs + len(runs),
                bytes=before.bytes + sum(run.byte_end - run.byte_start for run in runs),
                first_ms=min([*first, *_known(before.first_ms)], default=None),
                last_ms=max([*last, *_known(before.last_ms)], default=None),
            )
        if self._going.at >= head.next:
            self.shown = self._going
        return read


def _known(time_ms: int | None) -> list[int]:
    return [] if time_ms is None else [time_ms]
