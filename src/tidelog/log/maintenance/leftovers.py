"""Deletes rows that no longer count, and uploads that did not finish. No threads, no locks.

- runs and journals that are completely below the start, and their amendments: a trim deleted them
- runs below the head's ``journaled``: journals replaced them
- amendments that the journal of their offset contains

Compile, trim and sweep all call this; the first one deletes the rows. One write deletes a run or a
journal with its slot rows, so there is never one without its slots. The same write lists the
objects of these rows as unused (``unused``), which allows a sweep to delete them. Rows are deleted
by the version that was read: a journal's row may be replaced by another one at the same offset, and
an amendment's by a newer one.

Sweeps what Spark writers have staged and no driver will commit any more.

A write that was killed leaves staged segments that nothing names. A batch is deleted when all of it
is older than a day and than the grace period: a Spark job may run for hours before it commits. The
steps:

1. List what is staged; choose batches that are completely old.
2. Raise ``swept`` in the topic's ``staged`` row to the topic's generation, which the sweep has just
   raised. From here on, no batch with segments of an older generation can be decided, unless they
   are younger than half a day, so that no sweep can have chosen them.
3. Read the rows of sinks: keep a batch that is decided and not yet in the topic.
4. Delete the chosen segments of older generations, and the manifests beside them.

| crash after | what it leaves                            | repair                     |
|-------------|-------------------------------------------|----------------------------|
| 1           | no change                                 | none needed                |
| 2           | batches that can no longer commit         | Spark runs the batch again |
| 4, partly   | fewer objects                             | the next sweep             |

A driver decides a batch by a write that expects the ``staged`` row as it has read it. So either the
batch was decided before step 2, and step 3 sees it, or the driver reads that its segments may be
deleted. A write without a name has no row to decide by: it reads ``staged`` first, and fails if a
segment is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import msgspec

from tidelog.catalog.base import Change, Delete, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.codec.event_batch import Contents
from tidelog.context import Context
from tidelog.coordination.ages import is_old, trusted_now_ms
from tidelog.coordination.ownership import write_repeatedly
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.unused import list_unused
from tidelog.log.topics import raise_head
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import Amendment, Head, Run, decode_row, encode_row
from tidelog.model.times import journal_slots, slots_of
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo, Store

__all__ = [
    "RemovedRows",
    "SinkState",
    "abort_uploads",
    "are_young",
    "decode_run",
    "left_by_sinks",
    "narrow_amended",
    "read_swept",
    "remove_amendments",
    "remove_shadowed",
    "remove_trimmed",
]

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


def abort_uploads(store: Store, before_ms: int, unlisted: list[TidelogError]) -> int:
    """Aborts uploads that started before a time; returns how many.

    ``unlisted`` gets an error if our credentials may not list or abort uploads. Then the bucket's
    own rule aborts them, as in the template of ``deploy/aws``. No proof of an erasure is clean
    there, since parts contain events.
    """
    try:
        return store.abort_uploads(before_ms)
    except InvalidError as exc:
        unlisted.append(
            InvalidError(
                f"store `{store.url}`: uploads that did not end were not removed ({exc}): give "
                "these credentials the rights s3:ListBucketMultipartUploads and "
                "s3:AbortMultipartUpload",
                store=store.url,
            )
        )
        return 0


STAGED_MS = 24 * 3_600_000  # a younger staged batch may belong to a running job


class SinkState(Persisted, frozen=True):
    """The row of a sink: its latest batch."""

    query: str  # the Spark query; "" for batch writes
    batch: int  # the number from Spark or from the user
    ordinal: int  # how many batches were decided before it
    manifest: str  # key of the object that lists its contents
    done: bool = False  # whether all of it is in the topic
    left_out: int = 0  # events of all its batches that were erased from the topic before
    contents: Contents = Contents()  # of the batch, as its tasks got it


class SweptStaging(Persisted, frozen=True):
    """The topic's ``staged`` row."""

    swept: int = 0  # segments that were staged in a lower generation may be deleted


def read_swept(context: Context, topic: Topic) -> tuple[SweptStaging, str | None]:
    """Returns the topic's ``staged`` row and its version; None as version if there is none."""
    where = layout.topic_partition(topic.incarnation, 0)
    return _swept_of(context.catalog.get(where, layout.STAGED_ROW))


def _swept_of(row: Row | None) -> tuple[SweptStaging, str | None]:
    if row is None:
        return SweptStaging(), None
    return decode_row(row.value, SweptStaging, f"row `{row.row}`"), row.version


def are_young(context: Context, keys: Sequence[str]) -> bool:
    """Returns whether staged segments exist and are so young that no sweep can have chosen them.

    A stream may stage under a generation that it read long ago. Both ages are by the store's time.
    """
    now_ms = trusted_now_ms(context)
    try:
        return all(now_ms - context.store.head(key).modified_ms < STAGED_MS // 2 for key in keys)
    except NotFoundError:
        return False


def left_by_sinks(context: Context, topic: Topic, now_ms: int, grace_ms: int) -> list[ObjectInfo]:
    """Steps 1 to 3: returns what can be deleted, after the sweep has raised the generation."""
    chosen = list(_old_batches(context, topic, now_ms, max(grace_ms, STAGED_MS)))
    if not chosen:
        return []
    _raise_swept(context, topic)
    undone = set(_undone(context, topic))
    return [
        info
        for place, infos in chosen
        if place not in undone
        for info in infos
        if _is_below(info.key, topic.generation)
    ]


def _old_batches(
    context: Context, topic: Topic, now_ms: int, age_ms: int
) -> Iterator[tuple[tuple[str, str], list[ObjectInfo]]]:
    """Step 1: yields old objects by sink and batch."""
    staged = context.store.list(layout.sinks(topic.incarnation, "")[:-1])
    for place, found in groupby(staged, lambda info: tuple(info.key.split("/")[3:5])):
        infos = list(found)
        if all(is_old(now_ms, info.modified_ms, age_ms) for info in infos):
            yield (place[0], place[-1]), infos


def _raise_swept(context: Context, topic: Topic) -> None:
    """Step 2."""
    where = layout.topic_partition(topic.incarnation, 0)

    def decide(rows: Rows) -> Decision[None]:
        found, _ = _swept_of(rows[layout.STAGED_ROW])
        if found.swept >= topic.generation:
            return Decision(None)
        raised = encode_row(msgspec.structs.replace(found, swept=topic.generation))
        return Decision(None, [rows.put(layout.STAGED_ROW, raised)])

    update(context, where, [layout.STAGED_ROW], decide, f"topic `{topic.name}`")


def _undone(context: Context, topic: Topic) -> Iterator[tuple[str, str]]:
    """Step 3: yields the sinks and batches that are decided and not yet in the topic."""
    where = layout.topic_partition(topic.incarnation, 0)
    for row in context.catalog.scan(where, layout.sink_row(""), "sink0"):
        state = decode_row(row.value, SinkState, f"row `{row.row}`")
        if not state.done:
            yield row.row.partition("/")[2], f"{state.batch:020}"


def _is_below(key: str, generation: int) -> bool:
    """Returns whether a segment was staged in an older generation; manifests count as older.

    False for a name that is not ours.
    """
    if key.endswith(".json"):
        return True
    try:
        return layout.sink_generation(key) < generation
    except ValueError:
        return False
