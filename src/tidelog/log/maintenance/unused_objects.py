"""Rows that list the objects a partition no longer needs, notes of strays, and unfinished writes.

Every write that removes the last mention of an object in a partition also puts a row
``unused/<id>`` that lists it. So an object is garbage because a row says so, never because no row
names it. An object that no row names or lists was never committed, or the catalog has lost that
commit. A process that will not commit an object it uploaded lists that too, in the write that
replaces it or in a separate one. Only uploads of processes that died stay unlisted. A sweep deletes
the objects first and then the row.

A segment may have events of several partitions, and its key says of how many. Each of them commits
one of its copies, so the segment is settled when that many partitions name or list a copy. Journals
and values of updates belong to one partition.

A compile lists the journals that it will write before it writes them, under one name for all, and
its swap deletes that row. So the journals of a compile that died are garbage too, and the next
sweep deletes the erased events in them. Such a row is a **plan**. A copy of the catalog that was
made while the compile ran has it too, and then the journal may be the only copy of events. So a
plan counts only for journals from the partition's start on: existing rows hold the same events.

A note records when a sweep first found a stray. A stray is kept for a week, which begins with the
note: the date of an object says when it was uploaded, which may be long before the catalog lost the
commit. A note has the latest of all known times (this machine's, the store's, those of the topic's
rows, the object's date), since the clock may be behind at the first sweep and right at the next.

A sweep notes only objects that can no longer be committed. So every row that ever named such an
object is older than the note, and a copy of the catalog that has the note has that row too: no
restored copy has a note that is older than the loss. The write of a note expects the head of
partition 0, so that it lands once.

A folder has no clock except the machine's, and that may jump by a year. There the week counts what
sweeps have seen pass: at most a day from one sweep to the next (``STRAY_STEP_MS``), and nothing if
the clock went back. Each sweep writes that into the note. So one jump shortens the week by at most
a day, and it takes at least seven sweeps to end it.

A sweep deletes objects before their notes. It deletes a note whose objects are no longer strays, by
its version, or replaces it with a note of the remaining ones.

**Unfinished writes** are staged batches of Spark, and uploads, that dead writers left. A write that
was killed leaves staged segments that nothing names. A batch is deleted when all of it is older
than a day and than the grace period: a Spark job may run for hours before it commits. The steps:

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
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.codec.event_batch import Contents
from tidelog.context import Context
from tidelog.coordination.trusted_time import has_own_clock, is_old, trusted_now_ms
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.topics import open_head, read_head
from tidelog.model import layout, limits
from tidelog.model.decoding import Persisted
from tidelog.model.topic import Strays, Topic, UnusedObjects, decode_row, encode_row
from tidelog.store.base import ObjectInfo, Store, object_exists

__all__ = [
    "ListedRow",
    "NotedRow",
    "ObjectUses",
    "SinkState",
    "abort_uploads",
    "are_young",
    "is_shared",
    "kept_since",
    "left_by_sinks",
    "list_apart",
    "list_now",
    "list_unused",
    "note_strays",
    "noted_since",
    "origin_of",
    "planned_starts",
    "read_swept",
    "read_unused",
    "remove_unused",
]


@dataclass(frozen=True, slots=True)
class ListedRow:
    """One row that lists unused objects."""

    row: str
    version: str
    objects: tuple[str, ...]
    start: int = sys.maxsize  # the partition's: a plan does not cover journals before it


def list_unused(row_id: str, objects: Iterable[str]) -> list[Put]:
    """Returns the change that lists objects, for the write that removes their last mention.

    Empty for no objects. ``row_id`` must be new, so that no other row is replaced.
    """
    listed = tuple(dict.fromkeys(objects))
    return [Put(layout.unused_row(row_id), encode_row(UnusedObjects(listed)))] if listed else []


def list_apart(context: Context, topic: Topic, partition: int, objects: Sequence[str]) -> bool:
    """Lists objects that a process has stored and will never commit; returns whether it did.

    Best effort: a sweep keeps an unlisted object for a week.
    """
    with contextlib.suppress(NotFoundError, UnavailableError, UnknownOutcomeError):
        list_now(context, topic, partition, objects)
        return True
    return False


def list_now(context: Context, topic: Topic, partition: int, objects: Sequence[str]) -> None:
    """Lists objects with a separate write.

    The write expects the head, so that it lands once, and never after the topic was deleted. Raises
    ``NotFoundError`` if it was deleted, and otherwise what ``update`` raises.
    """
    for listed in list_unused(context.ids.new(), objects):
        _add_row(context, topic, partition, listed)


def _add_row(context: Context, topic: Topic, partition: int, added: Put) -> None:
    """Puts a row of a new name, once, by a write that expects the head. Errors as ``list_now``."""
    where = layout.topic_partition(topic.incarnation, partition)

    def decide(rows: Rows) -> Decision[None]:
        open_head(context, topic, partition, rows["head"])
        put = rows.put(added.row, added.value)
        return Decision(None, () if rows[added.row] else (rows.check("head"), put))

    what = f"partition `{topic.name}/{partition}`"
    update(context, where, ["head", added.row], decide, what, {added.row: None})


def read_unused(context: Context, topic: Topic, partition: int) -> list[ListedRow]:
    """Returns all rows of a partition. Raises ``CorruptError``."""
    where = layout.topic_partition(topic.incarnation, partition)
    start, found = sys.maxsize, []
    for row in context.catalog.scan(where, layout.unused_row(""), "unused0"):
        what = f"row `{row.row}` of `{topic.name}/{partition}`"
        objects = decode_row(row.value, UnusedObjects, what).objects
        if start == sys.maxsize and any(_compile_of(key) for key in objects):
            start = read_head(context, topic, partition)[0].start
        found.append(ListedRow(row.row, row.version, objects, start))
    return found


def remove_unused(
    context: Context,
    partition: tuple[Topic, int],
    rows: Sequence[ListedRow],
    keys: Collection[str],
    deleted: Collection[str],
) -> None:
    """Deletes the rows that list no existing object and no copy of one.

    ``keys`` are the objects that exist, from a listing made after the rows were read, without those
    that were ``deleted`` since. The caller leaves out the row of a compile that may be running.
    """
    listed = {_listed_as(key) for row in rows for key in row.objects}
    left = {name for key in keys for name in _names(key) if name in listed}
    over = [row for row in rows if left.isdisjoint(_listed_as(key) for key in row.objects)]
    gone = [
        row
        for row in over
        if not any(key not in deleted and object_exists(context.store, key) for key in row.objects)
    ]
    topic, number = partition
    where = layout.topic_partition(topic.incarnation, number)
    for first in range(0, len(gone), limits.CHANGES_MAX):
        changes = [Delete(row.row, row.version) for row in gone[first : first + limits.CHANGES_MAX]]
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next sweep tries again
            context.catalog.write(where, *changes, write_id=context.ids.new())


def planned_starts(rows: Iterable[ListedRow]) -> dict[str, int]:
    """Returns the compiles whose plan a partition has, with the partition's start.

    A plan is written before the compile reads the rows. So the events that it finds at an offset
    are those of these rows; what it reads below the start was trimmed.
    """
    return {work: row.start for row in rows for key in row.objects if (work := _compile_of(key))}


def is_shared(key: str) -> bool:
    """Returns whether an object has events of several partitions."""
    return origin_of(key)[1] > 1


class ObjectUses:
    """Which objects are settled: as many partitions name or list them as they have events of."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Tracks only ``keys``."""
        self._partitions: dict[str, set[int]] = {origin_of(key)[0]: set() for key in keys}
        self._plans: dict[str, int] = {}  # compiles, and the first offset that their plan covers

    def add(self, partition: int, objects: Collection[str], start: int = sys.maxsize) -> None:
        """Adds objects that rows of a partition, which has this start, name or list."""
        for key in objects:
            work = _compile_of(key)
            if work:
                self._plans[work] = start
                continue
            found = self._partitions.get(origin_of(key)[0])
            if found is not None:
                found.add(partition)

    def add_rows(self, partition: int, rows: Sequence[ListedRow]) -> None:
        for row in rows:
            self.add(partition, row.objects, row.start)

    def is_known(self, key: str, partition: int) -> bool:
        """Returns whether a partition names or lists an object or a copy of it."""
        return partition in self._partitions.get(origin_of(key)[0], ())

    def is_settled(self, key: str) -> bool:
        origin, partitions = origin_of(key)
        return len(self._partitions.get(origin, ())) >= partitions or self._is_planned(key)

    def _is_planned(self, key: str) -> bool:
        if not key.endswith(".parquet"):
            return False
        try:
            base = layout.journal_base(key)
        except ValueError:
            return False  # not ours
        return base >= self._plans.get("/".join(layout.journal_work(key)), sys.maxsize)


def origin_of(key: str) -> tuple[str, int]:
    """Returns what all copies of an object share, and how many partitions it has events of.

    Journals of one compile that begin at the same offset are copies: the work was done twice.
    """
    if key.endswith(".parquet"):
        folder, _, name = key.rpartition("/")
        return f"{folder}/{name.removesuffix('.parquet').partition('-')[0]}", 1
    if key.endswith(".arrow"):
        with contextlib.suppress(ValueError):
            return layout.segment_origin(key)
    return key, 1


def _compile_of(key: str) -> str:
    """Returns the compile whose journals a listed key means; empty for the key of one object."""
    if not key.endswith(".parquet") or "-" in key.rpartition("/")[2]:
        return ""
    return "/".join(layout.journal_work(key))


def _listed_as(key: str) -> str:
    """Returns how rows of unused objects list a key."""
    work = _compile_of(key)
    return f"plan {work}" if work else origin_of(key)[0]


def _names(key: str) -> Iterable[str]:
    """Returns all names under which a row may list an object."""
    yield origin_of(key)[0]
    if key.endswith(".parquet"):
        yield f"plan {'/'.join(layout.journal_work(key))}"


@dataclass(frozen=True, slots=True)
class NotedRow:
    """One row of notes."""

    row: str
    version: str
    noted: Strays


def noted_since(rows: Iterable[NotedRow]) -> dict[str, int]:
    """Returns when each object was noted."""
    since: dict[str, int] = {}
    for row in rows:
        for key in row.noted.objects:
            since[key] = min(row.noted.at_ms, since.get(key, row.noted.at_ms))
    return since


def kept_since(context: Context, rows: Iterable[NotedRow], now_ms: int) -> dict[str, int]:
    """Returns when each object's week began; if clocks may jump, by what sweeps have seen pass."""
    if has_own_clock(context.store):
        return noted_since(rows)
    since: dict[str, int] = {}
    for row in rows:
        begun_ms = now_ms - _advance(context, row.noted, now_ms).kept_ms
        for key in row.noted.objects:
            since[key] = min(begun_ms, since.get(key, begun_ms))
    return since


def _advance(context: Context, noted: Strays, now_ms: int) -> Strays:
    """Returns a note with the time that this sweep has seen pass."""
    if has_own_clock(context.store):
        return noted
    step_ms = now_ms - (noted.seen_ms or noted.at_ms)
    kept_ms = noted.kept_ms + min(max(step_ms, 0), limits.STRAY_STEP_MS)
    return msgspec.structs.replace(noted, kept_ms=kept_ms, seen_ms=now_ms)


def note_strays(
    context: Context,
    topic: Topic,
    rows: Sequence[NotedRow],
    strays: Collection[str],
    fresh: Mapping[str, int],
    now_ms: int,
) -> None:
    """Notes ``fresh`` strays with their times, and removes what is no longer a stray.

    If it fails, the next sweep starts the week.
    """
    where = layout.topic_partition(topic.incarnation, 0)
    changes: list[Change] = []
    for row in rows:
        left = tuple(key for key in row.noted.objects if key in strays)
        if not left:
            changes.append(Delete(row.row, row.version))
            continue
        moved = msgspec.structs.replace(_advance(context, row.noted, now_ms), objects=left)
        if moved != row.noted:
            changes.append(Put(row.row, encode_row(moved), expect=row.version))
    for change in changes:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            context.catalog.write(where, change, write_id=context.ids.new())
    for at_ms in sorted(set(fresh.values())):
        keys = sorted(key for key, ms in fresh.items() if ms == at_ms)
        for first in range(0, len(keys), limits.STRAYS_AT_ONCE):
            _note(context, topic, Strays(at_ms, tuple(keys[first : first + limits.STRAYS_AT_ONCE])))


def _note(context: Context, topic: Topic, noted: Strays) -> None:
    note = Put(layout.stray_row(context.ids.new()), encode_row(noted))
    with contextlib.suppress(UnknownOutcomeError):  # the next sweep notes what is not noted
        _add_row(context, topic, 0, note)


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
