"""Gaps: what a source has lost, whether a person accepted it, and late events that fill a gap.

A source partition that was deleted and created again is another sequence of events. None of it goes
into an archive that has events of the old one. It is an error of that partition until a person
accepts it (``--accept-loss``). Then the head says that the partition has ended; or it begins again,
if nothing of the old topic was ever committed. A source that ends before the position was created
again too, except for an archive of the same incarnation (``source_is_behind``): its positions are
those of its own source, so it only has less of it, and its reader waits.

The same holds for the topic as a whole: if an archive has events of the old topic, it gets none of
the new one, also not of partitions that the old one did not have, or of which nothing was read. So
before the first range of a partition, it is compared with others of its topic that were read, or of
which a range is decided (``is_topic_remade``). While another driver reads a range of the old topic,
it waits. The intent of such a range was put before the topic was deleted, so it is never missed.
Sources give all partitions of a topic one incarnation. Files have one each: nothing is compared.

**Late events** came into an archive after a reader of it had passed the gap they were in. A
generation that is promoted may have events where the one before it had a gap, or was made of a
folder without some files. A pump or a stream that has passed the gap goes back for them: the cycle
plans a range inside of the gap, and its commit leaves the position where it is and removes that
part of the gap. All else is as for any range, so each event comes once. It comes later than its
neighbors.

An archive keeps the gap instead: its files are ordered by offset. A backfill fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

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
from tidelog.coordination.pipeline_rows import read_intent, read_partitions, read_progress
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model import limits
from tidelog.model.pipeline import (
    Begin,
    Commit,
    Gap,
    GapReason,
    Manifest,
    Progress,
    Totals,
    joined_gaps,
    offsets_between,
)
from tidelog.pipeline.source_state import SourceState

__all__ = [
    "REMADE_REMEDY",
    "LostError",
    "RemadeError",
    "TopicHeads",
    "begun_head",
    "check_gaps",
    "committed_head",
    "ended_head",
    "gaps_after",
    "is_topic_remade",
    "late_head",
    "late_spans",
    "lost_before",
    "remade_bounds",
    "source_is_behind",
    "span_to_read",
    "vanished_end",
    "vanished_head",
    "without_remade",
]


_FILLED = ("upstream", "files")  # reasons of gaps that an archive may fill later


_Offsets = tuple[int, int]


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


class TopicHeads:
    """The heads of a pipeline, by topic. Those of other drivers are read once in a cycle."""

    def __init__(self, context: Context, pipeline: str) -> None:
        self._context = context
        self._pipeline = pipeline
        self._others: dict[SourcePartition, Progress | None] | None = None

    def forget(self) -> None:
        """Reads them again when they are next needed."""
        self._others = None

    def with_events(
        self, partition: SourcePartition, incarnation: str, own: Sequence[SourceState]
    ) -> dict[SourcePartition, Progress]:
        """Returns the heads of partitions of the same topic that have events, or soon will.

        A decided range will be committed, so it counts. Raises ``UnavailableError`` while another
        driver reads a range of a topic with another incarnation: it may become either.
        """
        if self._others is None:
            names = map(SourcePartition.named, read_partitions(self._context, self._pipeline))
            known = {state.partition for state in own}
            self._others = {
                each: read_progress(self._context, self._pipeline, each.text)
                for each in names
                if each not in known
            }
        heads = {
            state.partition: state.head
            for state in own
            if state.partition.topic == partition.topic and _has_events(state)
        }
        for each, head in self._others.items():
            if each.topic != partition.topic or head is None:
                continue
            is_read = bool(head.totals.commits)
            if is_read or _has_older_range(self._context, self._pipeline, each, head, incarnation):
                heads[each] = head
        return heads


def _has_events(state: SourceState) -> bool:
    """Returns whether ranges of a partition are committed, or one is decided."""
    is_decided = state.intent is not None and bool(state.intent.manifest)
    return bool(state.head.totals.commits) or is_decided


def _has_older_range(
    context: Context, pipeline: str, partition: SourcePartition, head: Progress, incarnation: str
) -> bool:
    """Returns whether a partition of an older topic without events gets some: a range is decided.

    Raises ``UnavailableError`` while a range of it is under way: it may be decided, or not.
    """
    if head.is_of(incarnation):
        return False
    intent = read_intent(context, pipeline, partition.text)
    now = read_progress(context, pipeline, partition.text)  # after it: is it committed meanwhile?
    if now is not None and now.totals.commits:
        return not now.is_of(incarnation)
    if intent is None or intent.incarnation in ("", incarnation):
        return False
    if not intent.manifest:
        raise UnavailableError(
            f"source partition `{partition.text}`: its topic was deleted and made again while a "
            "range of it was read: wait until its driver ends that, or run it with --accept-loss",
            partition=partition.text,
        )
    return True


def is_topic_remade(
    state: SourceState,
    held: Bounds,
    others: Mapping[SourcePartition, Progress],
    source: Source,
    accept_loss: bool,
) -> bool:
    """Returns whether the topic of a partition without events was created again, as accepted.

    ``others`` are heads of the same topic with events. Raises ``RemadeError`` if it was created
    again and that is not accepted.
    """
    partition, head = state.partition, state.head
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
        if head is None or head.is_of(held.incarnation):
            continue
        is_read = bool(head.totals.commits)
        if is_read or _has_older_range(context, pipeline, partition, head, held.incarnation):
            remade.add(held.incarnation)
    return {each: held for each, held in bounds.items() if held.incarnation not in remade}
