"""Deletes rows that no longer count. No threads, no locks.

- runs and journals that are completely below the start, and their amendments: a trim deleted them
- runs below the head's ``journaled``: journals replaced them
- amendments that the journal of their offset contains
- rows of unnamed producers that have ended

Compile, trim and sweep all call this; the first one deletes the rows. One write deletes a run or a
journal with its slot rows, so there is never one without its slots. The same write lists the
objects of these rows as unused (``unused_objects``), which allows a sweep to delete them. Rows are
deleted by the version that was read: a journal's row may be replaced by another one at the same
offset, and an amendment's by a newer one.

A producer's row has a time of the producer's clock, which may be wrong. So a sweep marks a row that
looks old with its own time, and deletes it if it is unchanged a week after that mark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.ownership import write_repeatedly
from tidelog.errors import (
    ConflictError,
    CorruptError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.topics import raise_head
from tidelog.log.unused_objects import list_unused
from tidelog.model import layout, limits
from tidelog.model.topic import (
    Amendment,
    Head,
    ProducerState,
    Run,
    Topic,
    decode_row,
    encode_row,
    journal_slots,
    slots_of,
)

__all__ = [
    "PRODUCER_EXPIRES_MS",
    "RemovedRows",
    "UnnamedProducerRow",
    "decode_run",
    "forget_producer",
    "narrow_amended",
    "remove_amendments",
    "remove_shadowed",
    "remove_trimmed",
]

PRODUCER_EXPIRES_MS = 7 * 24 * 3600 * 1000  # an unnamed producer that is silent this long has ended
_RUNS_AT_ONCE = 500  # run rows whose slot rows are looked up together
_SLOTS_APART = 16  # slots further apart than this are looked up one by one


@dataclass(frozen=True, slots=True)
class _Removal:
    """A row to delete, with its slot rows and its object."""

    row: Row
    slots: Iterable[str] = ()
    object: str | None = None

    @property
    def changes(self) -> list[Change]:
        return [Delete(self.row.row, self.row.version), *map(Delete, self.slots)]

    def is_as_read(self, rows: Mapping[str, Row | None]) -> bool:
        """Returns whether its row is unchanged, by the rows that a conflict returned."""
        now = rows.get(self.row.row, self.row)
        return now is not None and now.version == self.row.version


@dataclass(frozen=True, slots=True)
class RemovedRows:
    """The rows that were deleted: how many runs, and how many bytes their objects have."""

    runs: int = 0
    bytes: int = 0
    spans: tuple[tuple[int, int], ...] = ()  # the first offset of each, and the one after its last


def remove_trimmed(
    context: Context, topic: Topic, partition: int, head: Head, since: int | None = None
) -> RemovedRows:
    """Deletes the rows of runs and journals that are completely below the head's start.

    Also deletes their amendments. Returns what was deleted, without runs that journals had
    replaced. If offsets from ``since`` on, the start before this trim, had no row, a row was lost.
    Then a scan of all slot rows finds those of the lost row, which would otherwise stay for good.
    """
    remove_shadowed(context, topic, partition, head.journaled)
    removed = _remove_runs(context, topic, partition, head.start)
    journals = list(_journals_below(context, topic, partition, head.start))
    _remove_journals(context, topic, partition, journals)
    _remove_amendments_below(context, topic, partition, head)
    runs = [run for _, run in journals]
    spans = (*((run.base, run.end) for run in runs), *removed.spans)
    if _has_gap(context, topic, partition, spans, (since, head.start)):
        _remove_slots_below(context, topic, partition, head.start)
    return RemovedRows(removed.runs + len(runs), removed.bytes + sum(map(_size, runs)), spans)


def remove_shadowed(context: Context, topic: Topic, partition: int, journaled: int) -> RemovedRows:
    """Deletes the rows of runs that journals have replaced: no reader uses them."""
    return _remove_runs(context, topic, partition, journaled)


def remove_amendments(
    context: Context, topic: Topic, partition: int, rows: Sequence[tuple[str, str, str | None]]
) -> set[str]:
    """Deletes rows of amendments, given as row, version and object; returns those deleted.

    A row that another process has replaced stays, and so do the others of the same write: the next
    sweep tries again. Call ``narrow_amended`` afterwards.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    gone: set[str] = set()
    for first in range(0, len(rows), limits.CHANGES_MAX - 2):
        chunk = rows[first : first + limits.CHANGES_MAX - 2]
        decide = partial(_removal, topic, chunk, set())
        with contextlib.suppress(UnavailableError, UnknownOutcomeError):
            if update(context, where, ["head"], decide, f"partition `{topic.name}/{partition}`"):
                gone.update(row for row, _, _ in chunk)
    return gone


def _removal(
    topic: Topic, chunk: Sequence[tuple[str, str, str | None]], tried: set[str], rows: Rows
) -> Decision[bool]:
    """Tries once for each version of the head: after a conflict, it is another one or a row is."""
    head = rows["head"]
    if head is None or not _is_open(topic, head) or head.version in tried:
        return Decision(False)
    tried.add(head.version)
    changes = [Delete(row, expect=version) for row, version, _ in chunk]
    unused = list_unused(rows.write_id, [key for _, _, key in chunk if key is not None])
    return Decision(True, [*changes, *unused, rows.check("head")])


def narrow_amended(context: Context, topic: Topic, partition: int) -> None:
    """Updates the head's range of amendments, or removes it if there are none.

    Reads the head's version before the rows. Every amendment writes the head, so none is missed.
    """
    where = layout.topic_partition(topic.incarnation, partition)

    def narrowed(head: Head) -> Head:
        if head.amended is None:
            return head
        bounds = layout.amend_row(head.amended[0]), layout.amend_row(head.amended[1] + 1)
        ends = [
            layout.amend_offset(row.row)
            for reverse in (False, True)
            for row in context.catalog.scan(where, *bounds, 1, reverse)
        ]
        amended = (ends[0], ends[-1]) if ends else None
        return msgspec.structs.replace(head, amended=amended)

    raise_head(context, topic, partition, narrowed)


def decode_run(row: Row, topic: Topic, partition: int) -> Run:
    """Decodes a run or a journal. Raises ``CorruptError``, also if it has another offset."""
    what = f"row `{row.row}` of `{topic.name}/{partition}`"
    run = decode_row(row.value, Run, what)
    name = layout.run_row(run.base) if run.journal is None else layout.journal_row(run.base)
    if row.row != name:
        raise CorruptError(f"{what}: holds the run of offset {run.base}: keep it, and run verify")
    return run


def _remove_runs(context: Context, topic: Topic, partition: int, end: int) -> RemovedRows:
    """Deletes the rows of runs that are completely below an offset."""
    where = layout.topic_partition(topic.incarnation, partition)
    runs = total = at = 0
    spans: list[tuple[int, int]] = []
    while at < end:
        rows = list(
            context.catalog.scan(where, layout.run_row(at), layout.run_row(end), _RUNS_AT_ONCE)
        )
        decoded = [(row, decode_run(row, topic, partition)) for row in rows]
        pairs = [(row, run) for row, run in decoded if run.end <= end]
        if not pairs:
            break
        below = [run for _, run in pairs]
        slots = _slot_rows(context, topic, where, below)
        gone = (_Removal(row, slots.get(run.base, ()), run.object) for row, run in pairs)
        _delete_rows(context, topic, partition, gone)
        runs += len(below)
        total += sum(map(_size, below))
        spans += [(run.base, run.end) for run in below]
        at = below[-1].base + 1 if len(rows) == _RUNS_AT_ONCE else end
    return RemovedRows(runs, total, tuple(spans))


def _journals_below(
    context: Context, topic: Topic, partition: int, end: int
) -> Iterator[tuple[Row, Run]]:
    where = layout.topic_partition(topic.incarnation, partition)
    for row in context.catalog.scan(where, "journal/", layout.journal_row(end)):
        run = decode_run(row, topic, partition)
        if run.end <= end:
            yield row, run


def _remove_journals(
    context: Context, topic: Topic, partition: int, journals: Sequence[tuple[Row, Run]]
) -> None:
    gone = (_Removal(row, journal_slots(run, topic.slot_ms), run.object) for row, run in journals)
    _delete_rows(context, topic, partition, gone)


def _remove_amendments_below(context: Context, topic: Topic, partition: int, head: Head) -> None:
    """Deletes the amendments of offsets whose rows are deleted.

    Keeps those of the run or journal that holds the start: its object still contains the deleted
    events until a compile rewrites it.
    """
    if head.amended is None or head.amended[0] >= head.start:
        return
    where = layout.topic_partition(topic.incarnation, partition)
    end = head.start
    for kind in ("journal", "run"):
        for row in context.catalog.scan(where, f"{kind}/", f"{kind}0", 1):
            end = min(end, decode_row(row.value, Run, row.row).base)
    bounds = layout.amend_row(0), layout.amend_row(end)
    gone = (
        _Removal(row, object=decode_row(row.value, Amendment, row.row).object)
        for row in context.catalog.scan(where, *bounds)
    )
    _delete_rows(context, topic, partition, gone)
    narrow_amended(context, topic, partition)


def _has_gap(
    context: Context,
    topic: Topic,
    partition: int,
    spans: Iterable[tuple[int, int]],
    bounds: tuple[int | None, int],
) -> bool:
    """Returns whether the deleted rows, and the one that holds the start, have a gap before it."""
    since, start = bounds
    found = sorted(spans)
    where = layout.topic_partition(topic.incarnation, partition)
    for name in (layout.journal_row, layout.run_row):
        for row in context.catalog.scan(where, name(0), name(start), 1, reverse=True):
            run = decode_run(row, topic, partition)
            found.append((run.base, run.end))
    at = since if since is not None else min((base for base, _ in found), default=start)
    for base, end in sorted(found):
        if base > at:
            return True
        at = max(at, end)
    return at < start


def _remove_slots_below(context: Context, topic: Topic, partition: int, start: int) -> None:
    """Deletes the slot rows below the start whose run or journal has no row."""
    where = layout.topic_partition(topic.incarnation, partition)
    kept: dict[int, bool] = {}
    left: list[Change] = []
    for row in context.catalog.scan(where, "slot/", "slot0"):
        _, base = layout.slot_place(row.row)
        if base < start and base not in kept:
            names = (layout.run_row(base), layout.journal_row(base))
            kept[base] = any(context.catalog.get(where, name) is not None for name in names)
        if base < start and not kept[base]:
            left.append(Delete(row.row, row.version))
    for first in range(0, len(left), limits.CHANGES_MAX):
        with contextlib.suppress(ConflictError):
            write_repeatedly(context, where, *left[first : first + limits.CHANGES_MAX])


def _slot_rows(
    context: Context, topic: Topic, where: str, runs: Sequence[Run]
) -> dict[int, list[str]]:
    """Returns the slot rows of runs, by the run's base; not those of a journal at the same base."""
    bases: dict[str, int] = {}
    levels: dict[int, set[int]] = {}
    for run in runs:
        level, starts = slots_of(run.first_ms, run.last_ms, topic.slot_ms)
        levels.setdefault(level, set()).update(starts)
        bases |= {layout.slot_row(level, start, run.base, ""): run.base for start in starts}
    found: dict[int, list[str]] = {}
    for level, slots in levels.items():
        for first_ms, last_ms in _spans(sorted(slots), _SLOTS_APART * (topic.slot_ms << level)):
            for row in context.catalog.scan(where, *layout.slot_rows(level, first_ms, last_ms)):
                base = bases.get(row.row[: row.row.rindex("/") + 1])
                if base is not None and not row.value.endswith(b"j"):
                    found.setdefault(base, []).append(row.row)
    return found


def _spans(slots: Sequence[int], apart_ms: int) -> list[tuple[int, int]]:
    """Returns the first and last slot of each group of slots that are close together."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and slot - spans[-1][1] <= apart_ms:
            spans[-1] = (spans[-1][0], slot)
        else:
            spans.append((slot, slot))
    return spans


def _chunks(groups: Iterable[_Removal]) -> Iterator[list[_Removal]]:
    """Yields as many as fit into one write, beside the head and the row that lists objects."""
    chunk: list[_Removal] = []
    size = 2
    for group in groups:
        own = len(group.changes)
        if size + own > limits.CHANGES_MAX:
            yield chunk
            chunk, size = [], 2
        chunk.append(group)
        size += own
    if chunk:
        yield chunk


def _delete_rows(
    context: Context, topic: Topic, partition: int, groups: Iterable[_Removal]
) -> None:
    """Deletes rows by their versions, so that no write can land twice, and lists their objects.

    Leaves out rows that another process has deleted or replaced. Writes nothing that a delete of
    the topic would leave behind: the list of objects expects a head that is not closed.
    """
    where = layout.topic_partition(topic.incarnation, partition)
    what = f"partition `{topic.name}/{partition}`"
    for chunk in _chunks(groups):
        known = {group.row.row: group.row for group in chunk}
        update(context, where, ["head", *known], partial(_deletion, topic, chunk), what, known)


def _deletion(topic: Topic, chunk: Sequence[_Removal], rows: Rows) -> Decision[None]:
    left = [group for group in chunk if group.is_as_read(rows.found)]
    changes = [change for group in left for change in group.changes]
    objects = [group.object for group in left if group.object is not None]
    if not objects:
        return Decision(None, changes)
    if not _is_open(topic, rows["head"]):
        return Decision(None)  # a delete of the topic deletes these rows, too
    return Decision(None, [*changes, *list_unused(rows.write_id, objects), rows.check("head")])


def _is_open(topic: Topic, head: Row | None) -> bool:
    return head is not None and not decode_row(head.value, Head, f"a head of `{topic.name}`").closed


def _size(run: Run) -> int:
    return run.byte_end - run.byte_start


@dataclass(frozen=True, slots=True)
class UnnamedProducerRow:
    """The row of a producer without a name, decoded."""

    row: str
    version: str
    state: ProducerState


def forget_producer(
    context: Context, place: tuple[Topic, int], row: UnnamedProducerRow, newest_ms: int, now_ms: int
) -> bool:
    """Step 9 for one row: returns whether it was deleted."""
    state = row.state
    if newest_ms - state.seen_ms <= PRODUCER_EXPIRES_MS:
        return False
    if state.silent_ms == 0:  # only the producer's clock dates it, which may be wrong
        _note_silence(context, place, row, now_ms)
        return False
    return newest_ms - state.silent_ms > PRODUCER_EXPIRES_MS and _remove_producer(
        context, *place, row
    )


def _note_silence(
    context: Context, place: tuple[Topic, int], row: UnnamedProducerRow, now_ms: int
) -> None:
    """Marks a row that looks old: the week counts from this mark, which a sweep has dated."""
    where = layout.topic_partition(place[0].incarnation, place[1])
    noted = msgspec.structs.replace(row.state, silent_ms=now_ms)
    change = Put(row.row, encode_row(noted), expect=row.version)
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep tries again
        context.catalog.write(where, change, write_id=context.ids.new())


def _remove_producer(
    context: Context, topic: Topic, partition: int, row: UnnamedProducerRow
) -> bool:
    """Deletes one row; returns whether it did. A changed row belongs to a live producer."""
    where = layout.topic_partition(topic.incarnation, partition)
    try:
        context.catalog.write(
            where, Delete(row.row, expect=row.version), write_id=context.ids.new()
        )
    except (ConflictError, UnknownOutcomeError):
        return False  # if the row is still there, the next sweep tries again
    return True
