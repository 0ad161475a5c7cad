"""What fails while a pipeline is driven: how long to wait, and rows by which others see it.

One source partition that fails does not stop the others: it is tried again after waits that double
from half a second to fifteen seconds. The same holds for a source that cannot be reached at all.
Each failure is kept as a row until the source partition commits again, has nothing to commit, or is
no longer one of the source, as a folder that may be read again.
A driver that was replaced writes none: no driver would remove it.
Rows are for display only: a row that cannot be written is left out, and no driver decides by one.
Each write expects and changes the row ``failures``, which is never deleted. So a packet that is
repeated, or arrives late, brings back no failure that was removed: its message may quote an event
that has been erased since. A row whose removal failed is removed later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidelog.catalog.base import ABSENT, Change, Delete, Put
from tidelog.errors import ConflictError, TidelogError
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import Failure
from tidelog.model.run import decode_row, encode_row
from tidelog.sources.base import SourcePartition

__all__ = ["Failures", "read_failures"]

_WAIT_S = 0.5  # after the first failure
_WAIT_MAX_S = 15.0
_MESSAGE_CHARS_MAX = 500
_ROWS_AT_ONCE = 25
_ATTEMPTS = 5  # of a write, while drivers of other shards write theirs
_WHOLE = ""  # means the source as a whole


@dataclass
class _Failing:
    since_ms: int
    attempts: int = 0
    due_s: float = 0.0


@dataclass
class Failures:
    """The failures of one pipeline, as one driver sees them."""

    log: Log
    pipeline: str
    _failing: dict[str, _Failing] = field(default_factory=dict)  # by source partition
    _stored: set[str] = field(default_factory=set)  # of which a row may be there

    def __post_init__(self) -> None:
        """Learn which rows an earlier driver left, so that they are removed in time."""
        with contextlib.suppress(TidelogError):
            self._stored.update(read_failures(self.log, self.pipeline))

    def attempts(self, partition: SourcePartition) -> int:
        """How often in a row a source partition has failed."""
        known = self._failing.get(partition.text)
        return known.attempts if known else 0

    def is_failing(self, partition: SourcePartition) -> bool:
        return partition.text in self._failing

    def is_due(self, partition: SourcePartition) -> bool:
        """Whether a source partition may be tried now."""
        known = self._failing.get(partition.text)
        return known is None or self.log.clock.monotonic_s() >= known.due_s

    def add(self, errors: Iterable[tuple[SourcePartition, TidelogError]]) -> None:
        """Note errors of source partitions."""
        self._note({partition.text: error for partition, error in errors})

    def add_whole(self, error: TidelogError) -> float:
        """Note that the source cannot be reached at all; returns how long to wait, in seconds."""
        self._note({_WHOLE: error})
        return max(0.0, self._failing[_WHOLE].due_s - self.log.clock.monotonic_s())

    def partitions(self) -> list[SourcePartition]:
        """The source partitions that fail, or failed when an earlier driver ended."""
        names = {*self._failing, *self._stored} - {_WHOLE}
        return [SourcePartition.named(name) for name in sorted(names)]

    def remove(self, partitions: Iterable[SourcePartition]) -> None:
        """Forget failures of source partitions that work again, and delete their rows."""
        self._forget(partition.text for partition in partitions)

    def remove_whole(self) -> None:
        """Forget the failure of a source that answers again."""
        self._forget([_WHOLE])

    def _note(self, errors: dict[str, TidelogError]) -> None:
        now_ms, now_s = self.log.clock.now_ms(), self.log.clock.monotonic_s()
        rows: list[Change] = []
        for name, error in errors.items():
            known = self._failing.setdefault(name, _Failing(now_ms))
            ceiling_s = min(_WAIT_MAX_S, _WAIT_S * 2 ** min(known.attempts, 10))
            known.due_s = now_s + self.log.random.uniform(ceiling_s / 2, ceiling_s)
            known.attempts += 1
            message = error.message[:_MESSAGE_CHARS_MAX]
            found = Failure(name, error.kind, message, known.since_ms, now_ms, known.attempts)
            rows.append(Put(layout.failure_row(name), encode_row(found)))
        self._stored.update(errors)
        self._write(rows)

    def _forget(self, names: Iterable[str]) -> None:
        known = [name for name in names if name in self._failing or name in self._stored]
        for name in known:
            self._failing.pop(name, None)
        if self._write([Delete(layout.failure_row(name)) for name in known]):
            self._stored.difference_update(known)

    def _write(self, rows: list[Change]) -> bool:
        """Write rows; returns whether all are known to be written."""
        lots = [rows[at : at + _ROWS_AT_ONCE] for at in range(0, len(rows), _ROWS_AT_ONCE)]
        try:
            return all(self._write_lot(lot) for lot in lots)
        except TidelogError:  # shown less, and nothing else
            return False

    def _write_lot(self, rows: list[Change]) -> bool:
        where = layout.pipeline_shards(self.pipeline)
        for _ in range(_ATTEMPTS):
            row = self.log.catalog.get(where, layout.FAILURES_ROW)
            guard = Put(layout.FAILURES_ROW, b"", expect=row.version if row else ABSENT)
            with contextlib.suppress(ConflictError):
                self.log.catalog.write(where, guard, *rows, write_id=self.log.ids.new())
                return True
        return False


def read_failures(log: Log, pipeline: str) -> dict[str, Failure]:
    """What fails now, by source partition; the empty name is the source as a whole."""
    where = layout.pipeline_shards(pipeline)
    rows = log.catalog.scan(where, layout.FAILURE_ROWS, f"{layout.FAILURE_ROWS}\uffff")
    found = [decode_row(row.value, Failure, f"failure `{row.row}`") for row in rows]
    return {each.partition: each for each in found}
