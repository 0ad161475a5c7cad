"""Failures of a running pipeline: retry waits, rows that show them, losses to accept, and gaps.

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

A source partition that was deleted and created again is another sequence of events. None of it goes
into an archive that has events of the old one. It is an error of that partition until a person
accepts it (``--accept-loss``). Then the head says that the partition has ended; or it begins again,
if nothing of the old topic was ever committed. A source that ends before the position was created
again too, except for an archive of the same incarnation (``source_is_behind``): its positions are
those of its own source, so it only has less of it, and its reader waits.

The same holds for the topic as a whole: if an archive has events of the old topic, it gets none of
the new one, also not of partitions that the old one did not have, or of which nothing was read. So
before the first range of a partition, it is compared with others of its topic that were read
(``is_topic_remade``). Sources give all partitions of a topic one incarnation. Files have one each:
nothing is compared.

**Late events** came into an archive after a reader of it had passed the gap they were in. A
generation that is promoted may have events where the one before it had a gap, or was made of a
folder without some files. A pump or a stream that has passed the gap goes back for them: the cycle
plans a range inside of the gap, and its commit leaves the position where it is and removes that
part of the gap. All else is as for any range, so each event comes once. It comes later than its
neighbors.

An archive keeps the gap instead: its files are ordered by offset. A backfill fills it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tidelog.catalog.base import Change, Delete, Put, prefix_end
from tidelog.catalog.update import Decision, Rows, update
from tidelog.connectors.source import (
    Bounds,
    KnowsEnds,
    ResumingSource,
    Source,
    SourcePartition,
    TrackingSource,
    bounds_apart,
)
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import CorruptError, InternalError, InvalidError, TidelogError, unexpected
from tidelog.model import layout, limits
from tidelog.model.pipeline import (
    Begin,
    Commit,
    DriverFailure,
    Gap,
    GapReason,
    Manifest,
    Progress,
    Totals,
    joined_gaps,
    offsets_between,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.base import ClaimedError, Track

__all__ = [
    "REMADE_REMEDY",
    "LostError",
    "PipelineFailures",
    "RemadeError",
    "TopicHeads",
    "begun_head",
    "check_gaps",
    "close_failures",
    "committed_head",
    "contain_errors",
    "ended_head",
    "gaps_after",
    "is_topic_remade",
    "late_head",
    "late_spans",
    "lost_before",
    "quoted_event",
    "read_failures",
    "remade_bounds",
    "remove_failures",
    "source_is_behind",
    "span_to_read",
    "vanished_end",
    "vanished_head",
    "without_remade",
]

_WAIT_S = 0.5  # after the first failure
_WAIT_MAX_S = 15.0
_MESSAGE_CHARS_MAX = 500
_ROWS_AT_ONCE = 25
_WHOLE = ""  # means the source as a whole
_FILLED = ("upstream", "files")  # reasons of gaps that an archive may fill later
_CLOSED = b"closed"  # content of the row ``failures`` of an archive that was ended

_Offsets = tuple[int, int]


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

    def taken(self) -> None:
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


REMADE_REMEDY = (
    "create a new archive or pump for what is there now; run this one with --accept-loss to record "
    "that it ends there"
)


class LostError(InvalidError):
    """A source no longer has what was to be read next: a person must decide."""

    kind = "lost"


class RemadeError(LostError):
    """A source partition was deleted and created again: it is another one now."""

    kind = "remade"


def remade_bounds(
    partition: SourcePartition, head: Progress, bounds: Bounds, source: Source, accept_loss: bool
) -> Bounds | None:
    """Returns the bounds of a source partition that is not the one in the head.

    Returns None if it is the same. Bounds read before the head prove nothing, because another
    driver may have moved the head: they are read again first. Raises ``RemadeError`` if it is
    another one and that is not accepted.
    """
    if not _difference(head, bounds, source):
        return None
    now = source.bounds([partition])[partition]
    what = _difference(head, now, source)
    if what and not accept_loss:
        raise RemadeError(
            f"source partition `{partition.text}`: was deleted and made again: {what}, and "
            f"{head.position} is committed: {REMADE_REMEDY}",
            partition=partition.text,
            incarnation=now.incarnation,
        )
    return now if what else None


def source_is_behind(head: Progress, bounds: Bounds, source: Source) -> bool:
    """Returns whether a source, an archive, must first reach what a reader of it has read."""
    if not bounds.may_be_behind or head.incarnation != bounds.incarnation:
        return False
    return source.before(bounds.end, head.position)


def _difference(head: Progress, bounds: Bounds, source: Source) -> str:
    """Returns how a source partition differs from the one in the head; empty if it does not."""
    if not head.is_of(bounds.incarnation):
        return f"it is {bounds.incarnation} now, and was {head.incarnation}"
    if source_is_behind(head, bounds, source):
        return ""
    return f"it ends at {bounds.end} now" if source.before(bounds.end, head.position) else ""


def lost_before(
    partition: SourcePartition, head: Progress, bounds: Bounds, source: Source, accept_loss: bool
) -> tuple[Gap, ...]:
    """Returns the gap between the position and what the source still holds, if accepted.

    Raises ``LostError`` if it is not accepted.
    """
    start = head.position
    if not source.before(start, bounds.first):
        return ()
    if not accept_loss:
        raise LostError(
            f"source partition `{partition.text}`: holds nothing before {bounds.first}, committed "
            f"is {start}: what is between is lost; run with --accept-loss to record that and "
            "continue",
            partition=partition.text,
            start=start,
            first=bounds.first,
        )
    first = bounds.first
    if isinstance(source, ResumingSource):
        first = source.resume_at(start, first)
    skipped = offsets_between(start, first) or 0
    # Explicit: the live generation of a backfill was moved past them.
    why: GapReason = "seek" if bounds.begins == "explicit" else "retention"
    lost = (Gap(start, first, why, skipped),)
    check_gaps(partition, head, lost)
    return lost


def ended_head(partition: SourcePartition, head: Progress, source: Source, now_ms: int) -> Progress:
    """Returns the head of a recreated source partition that ends, as a person accepted.

    The gap after the position reaches to where the old one ended, if the source knows that.
    """
    end = source.ended_at(partition, head.incarnation) if isinstance(source, KnowsEnds) else ""
    until = end if end and head.totals.commits else head.position
    return msgspec.structs.replace(_remade_head(head, until, now_ms), ended="remade")


def begun_head(head: Progress, bounds: Bounds, now_ms: int) -> Progress:
    """Returns the head of a recreated source partition that begins again, as a person accepted."""
    return msgspec.structs.replace(
        _remade_head(head, head.position, now_ms),
        position=bounds.first,
        incarnation=bounds.incarnation,
        begin=Begin(bounds.first, bounds.begins, now_ms),
        note=b"",
    )


def _remade_head(head: Progress, until: str, now_ms: int) -> Progress:
    """Returns a head with the gap of a recreated source partition."""
    totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
    gaps = joined_gaps(head.gaps, (Gap(head.position, until, "remade"),))
    return msgspec.structs.replace(head, totals=totals, gaps=gaps)


def vanished_head(head: Progress, end: str, now_ms: int) -> Progress:
    """Returns the head of a source partition whose file vanished before its end, as accepted.

    The gap is after the position. If the file comes back, reading resumes where it was.
    """
    totals = msgspec.structs.replace(head.totals, lost=head.totals.lost + 1, lost_ms=now_ms)
    gaps = (*_without_vanished(head.gaps), Gap(head.position, end, "vanished"))
    return msgspec.structs.replace(head, totals=totals, gaps=gaps)


def committed_head(head: Progress, manifest: Manifest, done: Commit, note: bytes) -> Progress:
    """Returns the head after a range; ``note`` identifies the partition for its source."""
    totals = head.totals.plus(manifest, done.committed_ms)
    if manifest.start != head.position:
        return late_head(head, manifest, totals)
    return msgspec.structs.replace(
        head,
        position=manifest.end,
        ordinal=manifest.ordinal + manifest.read,
        totals=totals,
        gaps=gaps_after(head, manifest.lost),
        note=note,
    )


def span_to_read(head: Progress, held: Bounds) -> tuple[str, Bounds]:
    """Returns where the next range begins, and bounds that end where it must end."""
    for start, end in late_spans(head, held):
        return str(start), replace(held, end=str(end))
    return head.position, held


def late_spans(head: Progress, held: Bounds) -> list[_Offsets]:
    """Returns the offsets in gaps of a head that its source, an archive, has now."""
    if offsets_between(held.first, held.end) is None:
        return []
    passed = [_span(gap) for gap in head.gaps if gap.reason in _FILLED and not gap.is_partial]
    missing = [_span(gap) for gap in held.gaps if not gap.is_partial]
    found: list[_Offsets] = []
    for start, end in passed:
        at, last = max(start, int(held.first)), min(end, int(held.end))
        for first, after in sorted(missing):
            if at < min(first, last):
                found.append((at, min(first, last)))
            at = max(at, after)
        if at < last:
            found.append((at, last))
    return found


def late_head(head: Progress, manifest: Manifest, totals: Totals) -> Progress:
    """Returns the head after a range in one of its gaps; ``totals`` include the range."""
    start, end = int(manifest.start), int(manifest.end)
    gaps: list[Gap] = []
    for gap in head.gaps:
        whole = offsets_between(gap.start, gap.end)
        if whole is None or gap.is_partial or not (int(gap.start) < end and start < int(gap.end)):
            gaps.append(gap)
            continue
        for first, last in ((int(gap.start), start), (end, int(gap.end))):
            if first < last:
                gaps.append(Gap(str(first), str(last), gap.reason, last - first))
    gaps += (gap for gap in manifest.lost if not gap.is_partial)
    gaps = list(joined_gaps(tuple(gaps), tuple(gap for gap in manifest.lost if gap.is_partial)))
    after = tuple(sorted(gaps, key=lambda gap: (int(gap.start), int(gap.end))))
    before = head.totals
    return msgspec.structs.replace(
        head,
        ordinal=manifest.ordinal + manifest.read,
        gaps=after,
        totals=msgspec.structs.replace(
            totals,
            skipped=sum(gap.offsets for gap in after),
            lost=before.lost + _losses(after) - _losses(head.gaps),
            event_ms=before.event_ms,
            path_ms=before.path_ms,
        ),
    )


def _losses(gaps: Iterable[Gap]) -> int:
    return sum(gap.is_loss for gap in gaps)


def _span(gap: Gap) -> _Offsets:
    return int(gap.start), int(gap.end)


def gaps_after(head: Progress, more: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Returns the gaps of a head after a range; a vanished file has come back by then."""
    return joined_gaps(_without_vanished(head.gaps), more)


def vanished_end(head: Progress) -> str:
    """Returns up to where the loss of a file was accepted; empty if none was."""
    return next((gap.end for gap in head.gaps if gap.reason == "vanished"), "")


def _without_vanished(gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
    return tuple(gap for gap in gaps if gap.reason != "vanished")


def check_gaps(partition: SourcePartition, head: Progress, more: tuple[Gap, ...]) -> None:
    """Raises ``LostError`` for gaps that do not fit into the head."""
    if len(joined_gaps(head.gaps, more)) > limits.GAPS_MAX:
        raise LostError(
            f"source partition `{partition.text}`: has {limits.GAPS_MAX} gaps already: "
            "make its files again with `tidelog archive backfill`, or create a new archive",
            partition=partition.text,
        )


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
