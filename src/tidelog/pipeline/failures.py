"""Failures of a running pipeline: retry waits, and the rows that show them.

A failing source partition does not stop the others: it is retried after waits that double from half
a second to fifteen seconds. So is a source that cannot be reached at all.

Each failure is a row until the source partition commits again, has nothing to commit, or no longer
belongs to the source. A driver that was stopped writes none, because no driver would delete it. The
next driver of a source partition deletes the row of the one before. Rows are only for display: no
driver decides by one, and a row that cannot be written is skipped.
Each write expects and changes the row ``failures``, which is never deleted. So a repeated or late
packet never brings back a deleted failure, whose message may quote an erased event. A row whose
deletion failed is deleted later. When an archive ends, ``close_failures`` deletes its rows, and no
driver that stalled writes another one.

Messages quote values that a parser or a target refused, so each row has the offset of that event,
by which a proof of its erasure recognizes the row (``quoted_event``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tidelog.catalog.base import Change, Delete, Put, prefix_end
from tidelog.catalog.update import Decision, Rows, update
from tidelog.connectors.source import (
    Bounds,
    SourcePartition,
)
from tidelog.context import Context
from tidelog.errors import CorruptError, InternalError, InvalidError, TidelogError, unexpected
from tidelog.model import layout
from tidelog.model.pipeline import (
    DriverFailure,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.gaps import LostError
from tidelog.pipeline.source_state import ClaimedError

__all__ = [
    "PipelineFailures",
    "close_failures",
    "contain_errors",
    "quoted_event",
    "read_failures",
    "remove_failures",
]

_WAIT_S = 0.5  # after the first failure
_WAIT_MAX_S = 15.0
_MESSAGE_CHARS_MAX = 500
_ROWS_AT_ONCE = 25
_WHOLE = ""  # means the source as a whole
_CLOSED = b"closed"  # content of the row ``failures`` of an archive that was ended


@dataclass
class _FailingPartition:
    since_ms: int
    attempts: int = 0
    due_s: float = 0.0


@dataclass
class PipelineFailures:
    """The failures of one pipeline, as seen by one driver."""

    context: Context
    pipeline: str
    _failing: dict[str, _FailingPartition] = field(default_factory=dict)  # by source partition
    _stored: set[str] = field(default_factory=set)  # may have a row

    def __post_init__(self) -> None:
        """Reads the rows of an earlier driver, so that they are deleted in time."""
        with contextlib.suppress(TidelogError):
            self._stored.update(read_failures(self.context, self.pipeline))

    def claimed(self) -> None:
        """Reads the rows of source partitions that another driver had, to delete them in time."""
        self.__post_init__()

    def released(self, partition: SourcePartition) -> None:
        """Leaves the failures of a source partition to its next driver."""
        self._failing.pop(partition.text, None)
        self._stored.discard(partition.text)

    def attempts(self, partition: SourcePartition) -> int:
        """Returns how many times in a row a source partition has failed."""
        known = self._failing.get(partition.text)
        return known.attempts if known else 0

    def is_failing(self, partition: SourcePartition) -> bool:
        return partition.text in self._failing

    def is_due(self, partition: SourcePartition) -> bool:
        """Returns whether a source partition may be tried now."""
        known = self._failing.get(partition.text)
        return known is None or self.context.clock.monotonic_s() >= known.due_s

    def add(self, errors: Iterable[tuple[SourcePartition, TidelogError]]) -> None:
        """Records errors of source partitions."""
        self._note({partition.text: error for partition, error in errors})

    def add_whole(self, error: TidelogError) -> float:
        """Records that the source cannot be reached. Returns how long to wait, in seconds."""
        self._note({_WHOLE: error})
        return max(0.0, self._failing[_WHOLE].due_s - self.context.clock.monotonic_s())

    def partitions(self) -> list[SourcePartition]:
        """Returns the source partitions that fail, or failed when an earlier driver ended."""
        names = {*self._failing, *self._stored} - {_WHOLE}
        return [SourcePartition.named(name) for name in sorted(names)]

    def remove(self, partitions: Iterable[SourcePartition]) -> None:
        """Removes failures of source partitions that work again, and deletes their rows."""
        self._forget(partition.text for partition in partitions)

    def remove_whole(self) -> None:
        """Removes the failure of a source that responds again."""
        self._forget([_WHOLE])

    def _note(self, errors: dict[str, TidelogError]) -> None:
        now_ms, now_s = self.context.clock.now_ms(), self.context.clock.monotonic_s()
        rows: list[Change] = []
        for name, error in errors.items():
            known = self._failing.setdefault(name, _FailingPartition(now_ms))
            ceiling_s = min(_WAIT_MAX_S, _WAIT_S * 2 ** min(known.attempts, 10))
            known.due_s = now_s + self.context.random.uniform(ceiling_s / 2, ceiling_s)
            known.attempts += 1
            message = error.message[:_MESSAGE_CHARS_MAX]
            times = known.since_ms, now_ms
            quotes = quoted_event(error)
            found = DriverFailure(name, error.kind, message, *times, known.attempts, quotes)
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
        """Writes rows. Returns whether all are known to be written."""
        lots = [rows[at : at + _ROWS_AT_ONCE] for at in range(0, len(rows), _ROWS_AT_ONCE)]
        try:
            return all(self._write_lot(lot) for lot in lots)
        except TidelogError:  # only the display is incomplete
            return False

    def _write_lot(self, changes: list[Change]) -> bool:
        return _write_failures(self.context, self.pipeline, changes)


def _write_failures(
    context: Context, pipeline: str, changes: Sequence[Change], closes: bool = False
) -> bool:
    """Writes some rows, in one write with the row that all drivers of the pipeline change.

    Returns False, and writes nothing, after the rows were closed; ``closes`` closes them.
    """

    def decide(rows: Rows) -> Decision[bool]:
        known = rows[layout.FAILURES_ROW]
        is_closed = known is not None and known.value == _CLOSED
        if is_closed and not (closes and changes):
            return Decision(closes)
        mark = rows.put(layout.FAILURES_ROW, _CLOSED if closes else b"")
        return Decision(True, [mark, *changes])

    where, what = layout.pipeline_members(pipeline), f"failures of pipeline `{pipeline}`"
    return update(context, where, [layout.FAILURES_ROW], decide, what)


def remove_failures(context: Context, pipeline: str, names: Iterable[str]) -> None:
    """Deletes the rows of failures of some source partitions. Raises if that is impossible."""
    for lot in _deletes(names):
        _write_failures(context, pipeline, lot)


def close_failures(context: Context, pipeline: str) -> None:
    """Deletes all failures of a pipeline that has ended; no driver adds one later. Idempotent."""
    _write_failures(context, pipeline, (), closes=True)
    for lot in _deletes(read_failures(context, pipeline)):
        _write_failures(context, pipeline, lot, closes=True)


def _deletes(names: Iterable[str]) -> list[list[Change]]:
    """Returns deletes of the rows of source partitions, in lots for one write each."""
    rows: list[Change] = [Delete(layout.failure_row(name)) for name in names]
    return [rows[at : at + _ROWS_AT_ONCE] for at in range(0, len(rows), _ROWS_AT_ONCE)]


def quoted_event(error: TidelogError) -> str:
    """Returns the offset of the event that an error quotes; empty if it quotes none.

    Returns ``any`` for an error that does not know: it may have the text of a parser, a transform
    or a library.
    """
    offset = error.context.get("offset")
    if isinstance(error, InvalidError) and isinstance(offset, int):
        return str(offset)
    if isinstance(error, LostError):
        return ""
    quotes = isinstance(error, (InvalidError, CorruptError, InternalError))
    return "any" if quotes or "job" in error.context else ""


def read_failures(context: Context, pipeline: str) -> dict[str, DriverFailure]:
    """Returns current failures by source partition; the empty name is the whole source."""
    where, prefix = layout.pipeline_members(pipeline), layout.FAILURE_ROWS
    rows = context.catalog.scan(where, prefix, prefix_end(prefix))
    found = [decode_row(row.value, DriverFailure, f"failure `{row.row}`") for row in rows]
    return {each.partition: each for each in found}


@contextlib.contextmanager
def contain_errors(
    partition: SourcePartition,
    bounds: dict[SourcePartition, Bounds],
    errors: dict[SourcePartition, TidelogError],
) -> Iterator[None]:
    """Turns any exception into an error of one source partition, and skips it."""
    try:
        yield
    except ClaimedError:  # another driver was faster
        bounds.pop(partition, None)
    except Exception as exc:  # noqa: BLE001 - one source partition must not stop the others
        errors[partition] = unexpected(f"source partition `{partition.text}`", exc)
        bounds.pop(partition, None)
