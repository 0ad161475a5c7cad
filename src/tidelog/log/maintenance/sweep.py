"""Sweeps a home: deletes the objects and rows that nothing needs. Starts no threads, takes no
locks.

The sweep lists the incarnations that have objects, then reads the registry. A topic has objects
only once it is ready, and a deletion leaves a ``deleted`` row. So an incarnation with objects and
neither row means that the registry lost a row: the sweep refuses and deletes nothing. It also
refuses a catalog whose own check finds damage: a row that cannot be found would make live objects
look like garbage.

For each topic that is ready:

0. If objects have a higher generation than the registry row, the catalog was restored to an earlier
   state (``lost_commits``). The sweep refuses this topic.
1. Raise the segment generation in the registry row, by a conditional write. From here on, segments
   and the values of updates are uploaded under the new generation.
2. Raise the floor to that generation in every ``head``, by conditional writes. A commit or an
   amendment in progress fails, and nothing of an older generation can be committed any more.
3. Raise the epoch of every ``compile`` row that has an owner, by a conditional write. A swap in
   progress fails, and no journal of a lower epoch can be swapped in any more.
4. Read all references: every row of runs, journals and amendments of every partition, and last the
   rows of unused objects. Runs below the head's ``journaled`` do not count. The sweep refuses this
   topic if a row has an unknown kind or does not decode, or if offsets between the head's start and
   next have no row. Then list the topic's objects. The sweep also refuses if a row's object is
   missing, or if a stray proves that the catalog was restored to an earlier state
   (``lost_commits``). A stray is an object that fewer partitions name or list as unused than it has
   events of. Nothing was deleted so far. Note other strays that can no longer be committed, unless
   they are already noted, with the latest of this machine's time, the store's, the newest in the
   topic's rows and the object's date. Delete notes of objects that are no longer strays
   (``strays``).
5. Delete rows that trims and compiles left, and list their objects as unused (``obsolete_rows``).
6. Delete amendments that the journal of their offset contains and that are older than the grace
   period, by their versions, and list their values as unused. Then narrow the head's range of
   amendments.
7. Read the rows of unused objects again. Delete objects that no row names, that are listed for all
   their partitions, and that are older than the grace period: segments and values of updates below
   the floor, journals below the epoch of their partition. Keep strays for a week after their note,
   or until a person accepts their loss. Also delete witnesses of segments that no longer exist, and
   what Spark writers have staged and no driver will commit (``unfinished_writes``).
8. Of the rows of unused objects that step 4 read, delete those that list no existing object, by
   their versions.
9. Mark rows of unnamed producers that were silent for a week, with the time of the sweep or the
   newest in the topic's own rows. Delete a row that is marked and unchanged a week later. Both
   weeks end no later than the newest time in the topic's own rows.

Then, for deleted topics:

10. Of the incarnations that were listed first, choose those with a ``deleted`` row.
11. Read the registry: a topic that was created in the meantime is not among them.
12. Delete their objects that are older than the grace period.

Then, for the whole store:

13. Abort uploads that started before the grace period and did not finish. Copies with a lost reply
    leave them on S3, and killed processes leave them in a folder.

| crash after | what it leaves                         | repair                                    |
|-------------|----------------------------------------|-------------------------------------------|
| 0           | no change                              | none needed                               |
| 1           | a new generation                       | none needed                               |
| 2, partly   | some heads refuse older segments       | producers upload again if they must       |
| 3, partly   | some compilers lost their row          | they take it again and resume             |
| 4           | the same in every head                 | the same                                  |
| 4, partly   | more or fewer notes of strays          | the next sweep: a week begins later       |
| 5 to 9      | fewer rows, fewer objects              | the next sweep resumes                    |
| 6, partly   | a head with too wide a range           | the next sweep; readers find none there   |
| 7           | rows that list deleted objects         | the next sweep deletes them               |
| 10, 11, 12  | fewer objects                          | the next sweep resumes                    |
| 13          | fewer broken uploads                   | the next sweep resumes                    |

Why nothing is lost: a run of an old generation either was committed before its head's floor was
raised, and step 4 sees its row, or its commit expects a version of the head that never recurs. The
same holds for amendments, and for journals by the ``compile`` row, which every swap expects. A run
that a swap replaces after step 2 still counts. This holds however long a producer stalls, however
many sweeps run at once, and whatever the clocks say. The grace period only spares objects that a
reader may still need. Ages count to the earlier of this machine's time and the store's
(``coordination.trusted_time``), so a clock that is ahead makes nothing old. A note has the latest
known time, so a clock that was behind does not shorten the week. A floor never exceeds the
generation in the registry, since step 1 precedes step 2. An amendment is deleted only when a
journal contains it, and readers read amendments before rows, so they never see an older state.

A catalog that has lost commits no longer names the only copy of acknowledged events. But no row
lists that object as unused either, and only listed objects are garbage. Steps 0 and 4 prove the
loss where they can. Then a person restores the catalog or accepts the loss. An object is deleted
before the row that lists it, so no object becomes a stray because its row was deleted first. What
cannot be proven is kept for a week from when a sweep first finds it. The dates of objects do not
count: they are older than the loss, and may come from a store that was restored.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import msgspec

from tidelog.catalog.base import clear_deleted_rows
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.trusted_time import FUTURE_MS, clock_ahead_ms, is_old, read_times
from tidelog.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
    contained,
)
from tidelog.log.maintenance.incarnations import (
    TOPICS,
    accept_unexplained,
    inspect_catalog,
    is_deleted,
    stored_incarnations,
    unexplained,
)
from tidelog.log.maintenance.lost_commits import (
    Losses,
    LossProof,
    accept_losses,
    accepted_until_ms,
    find_losses,
    newer_than,
    remedy_for_lost,
)
from tidelog.log.maintenance.object_references import (
    References,
    check_objects,
    read_whole,
)
from tidelog.log.maintenance.obsolete_rows import (
    forget_producer,
    narrow_amended,
    remove_amendments,
    remove_shadowed,
    remove_trimmed,
)
from tidelog.log.maintenance.strays import kept_since, note_strays, noted_since
from tidelog.log.maintenance.unfinished_writes import abort_uploads, left_by_sinks
from tidelog.log.producer.staged import is_witness_obsolete, list_witnesses
from tidelog.log.topics import find_topic, list_topics, raise_epoch, raise_head
from tidelog.log.unused_objects import (
    ObjectUses,
    is_shared,
    origin_of,
    read_unused,
    remove_unused,
)
from tidelog.model import layout, limits
from tidelog.model.topic import Head, Topic, decode_row, encode_row
from tidelog.store.base import ObjectInfo

__all__ = ["SkippedTopic", "SweepReport", "sweep_home"]

NEVER_NOTED: Mapping[str, int] = MappingProxyType({})
_DELETES_AT_ONCE = 1_000  # objects; the limit of one S3 request


@dataclass(frozen=True, slots=True)
class SkippedTopic:
    """A topic that was not swept, and why."""

    topic: str
    error: TidelogError


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found and did."""

    topics: int = 0  # swept to the end
    objects_seen: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0  # kept only because of the grace period
    objects_doubted: int = 0  # possible losses, which were kept
    runs_removed: int = 0  # rows that trims and compiles had left
    producers_removed: int = 0  # rows of unnamed producers
    amendments_removed: int = 0  # rows of amendments that a journal contains
    uploads_aborted: int = 0  # multipart uploads left by copies with a lost reply
    clock_ahead_ms: int = 0  # how far this machine's clock is ahead of the store's
    refused: tuple[SkippedTopic, ...] = ()
    unlisted: tuple[TidelogError, ...] = ()  # stores whose broken uploads could not be removed
    pipelines: int = 0  # swept, including those of archives
    commits_merged: int = 0  # rows of archives' commits that were merged into others

    @property
    def is_clean(self) -> bool:
        """Returns whether every topic and every store was swept."""
        return not self.refused and not self.unlisted


@dataclass(slots=True)
class _Tally:
    """Builds the report."""

    topics: int = 0
    objects_seen: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0
    objects_doubted: int = 0
    runs_removed: int = 0
    producers_removed: int = 0
    amendments_removed: int = 0
    uploads_aborted: int = 0
    clock_ahead_ms: int = 0
    refused: list[SkippedTopic] = field(default_factory=list)
    unlisted: list[TidelogError] = field(default_factory=list)

    def refuse(self, topic: str, error: TidelogError) -> None:
        self.refused.append(SkippedTopic(topic, error))

    def report(self) -> SweepReport:
        values = {name: getattr(self, name) for name in self.__slots__}
        lists = {"refused": tuple(self.refused), "unlisted": tuple(self.unlisted)}
        return SweepReport(**values | lists)


@dataclass(frozen=True, slots=True)
class _Age:
    """The time of a sweep, and its grace period."""

    now_ms: int  # the earlier of this machine's time and the store's
    latest_ms: int  # the later one
    store_ms: int  # by the store
    grace_ms: int

    def is_old(self, then_ms: int) -> bool:
        return is_old(self.now_ms, then_ms, self.grace_ms)

    def is_kept(self, noted_ms: int | None) -> bool:
        """Returns whether a stray with this note, or without one, is still kept."""
        return noted_ms is None or self.now_ms - noted_ms < limits.STRAY_KEEP_MS


@dataclass(frozen=True, slots=True)
class _TopicObjects:
    """A topic's objects that no row needs, now or soon."""

    unneeded: list[ObjectInfo]
    strays: list[ObjectInfo]  # fewer partitions name or list them than they have events of
    keys: set[str]  # of all objects


def sweep_home(context: Context, grace_ms: int, accept_loss: Collection[str] = ()) -> SweepReport:
    """Deletes what no row needs and is older than the grace period, in all topics.

    Safe at any time, beside producers, trims and other sweeps. Reports a topic that it cannot sweep
    and sweeps the others. For topics in ``accept_loss``, it also deletes objects that are or may be
    the only copy of events (``lost_commits``). An incarnation that has only objects then counts as
    deleted. Raises ``InvalidError`` for a negative grace period, and ``NotFoundError`` for an
    unknown topic in ``accept_loss``.
    """
    if grace_ms < 0:
        raise InvalidError(f"sweep: a grace of {grace_ms} ms: give 0 or more")
    for name in accept_loss:
        if not accept_unexplained(context, name):
            find_topic(context, name)
    times = read_times(context)
    age = _Age(times.earlier_ms, times.later_ms, times.store_ms, grace_ms)
    tally = _Tally(clock_ahead_ms=clock_ahead_ms(context, age.now_ms))
    stored = list(stored_incarnations(context))
    strange = unexplained(context, stored)
    damaged = [CorruptError(problem) for problem in inspect_catalog(context)]
    if strange or damaged:
        tally.refused += [SkippedTopic(error.context["incarnation"], error) for error in strange]
        tally.refused += [SkippedTopic("", error) for error in damaged]
        return tally.report()
    for name in [topic.name for topic in list_topics(context)]:
        with (
            contained(f"topic `{name}`", partial(tally.refuse, name)),
            contextlib.suppress(NotFoundError),  # deleted meanwhile: its incarnation is swept below
        ):
            _sweep_topic(context, name, age, tally, name in accept_loss)
    _sweep_deleted(context, stored, age, tally)
    tally.uploads_aborted += abort_uploads(context.store, age.now_ms - grace_ms, tally.unlisted)
    clear_deleted_rows(context.catalog)
    return tally.report()


def _sweep_topic(context: Context, name: str, age: _Age, tally: _Tally, accept: bool) -> None:
    topic = _ready_topic(context, name)
    if topic is None:
        return
    newer = newer_than(context, topic)
    if newer:
        what = f"has a generation above {topic.generation}, which is the registry's"
        _settle(context, topic, Losses([LossProof(info, what) for info in newer]), age, accept)
    topic = _raise_generation(context, name)
    if topic is None:
        return
    floor = topic.generation
    partitions = range(topic.partitions)
    heads = [_raise_floor(context, topic, partition, floor) for partition in partitions]
    epochs = [raise_epoch(context, topic, partition) for partition in partitions]
    read = [read_whole(context, topic, partition, head) for partition, head in enumerate(heads)]
    heads, references = [head for head, _ in read], [found for _, found in read]
    witnesses = list_witnesses(context, topic)
    listed = _list_objects(context, topic, references, tally)
    losses = _look_at(context, topic, epochs, listed.strays)
    since = noted_since(references[0].noted)
    kept = kept_since(context, references[0].noted, age.now_ms)
    doubted = _settle(context, topic, losses, age, accept, kept)
    strays = {info.key for info in losses.doubts}
    newest_ms = max((found.newest_ms for found in references), default=0)
    dated = {} if accept else {each.key: _note_ms(each, age, newest_ms) for each in losses.doubts}
    fresh = {key: ms for key, ms in dated.items() if since.get(key, sys.maxsize) > ms}
    note_strays(context, topic, references[0].noted, strays, fresh, age.now_ms)
    for partition, (head, found) in enumerate(zip(heads, references, strict=True)):
        if found.has_leftovers:
            tally.runs_removed += remove_shadowed(context, topic, partition, head.journaled).runs
            tally.runs_removed += remove_trimmed(context, topic, partition, head).runs
        if head.amended is not None:
            _remove_applied(context, topic, partition, found, age, tally)
    lost = strays | {proof.info.key for proof in losses.proofs}
    garbage = _garbage(context, topic, epochs, references, listed, lost - doubted)
    gone = _delete_old(context, garbage, age, tally)
    for partition, found in enumerate(references):
        over = [
            row
            for row in found.unused
            if all(_can_never_be_named(key, topic, epochs) for key in row.objects)
        ]
        remove_unused(context, (topic, partition), over, listed.keys - gone, gone)
    origins = {origin_of(key)[0] for key in listed.keys - gone}
    _delete_old(
        context, [each for each in witnesses if is_witness_obsolete(each, origins)], age, tally
    )
    _delete_old(context, left_by_sinks(context, topic, age.now_ms, age.grace_ms), age, tally)
    tally.objects_doubted += len(doubted)
    until_ms, marked_ms = min(age.now_ms, newest_ms), max(age.latest_ms, newest_ms)
    for partition, found in enumerate(references):
        for row in found.producers:
            gone_too = forget_producer(context, (topic, partition), row, until_ms, marked_ms)
            tally.producers_removed += gone_too
    tally.topics += 1


def _settle(
    context: Context,
    topic: Topic,
    losses: Losses,
    age: _Age,
    accept: bool,
    since: Mapping[str, int] = NEVER_NOTED,
) -> frozenset[str]:
    """Returns the possible losses to keep. Raises ``CorruptError`` if objects prove lost commits.

    With ``accept``, a person has accepted the loss of all of these. That is stored with the store's
    time at most: a date in the future would accept objects that do not exist yet.
    """
    if not losses.proofs and not losses.doubts:
        return frozenset()
    if accept:
        accept_losses(context, topic, min(losses.newest_ms, age.store_ms))
        return frozenset()
    until_ms = accepted_until_ms(context, topic)
    proofs = [proof for proof in losses.proofs if proof.info.modified_ms > until_ms]
    if proofs:
        raise CorruptError(
            f"topic `{topic.name}`: the catalog has lost commits: `{proofs[0].info.key}` "
            f"{proofs[0].what} (objects that show it: {len(proofs)}): nothing was deleted: "
            f"{remedy_for_lost(topic.name)}"
        )
    return frozenset(
        info.key
        for info in losses.doubts
        if info.modified_ms > until_ms and age.is_kept(_kept_since(info, since))
        if age.is_old(info.modified_ms)  # otherwise the grace period keeps it
    )


def _note_ms(info: ObjectInfo, age: _Age, newest_ms: int) -> int:
    """Returns when a stray is noted: the latest of all known times, since clocks may be behind.

    Ignores this machine's time if it is so far ahead of the store's that it is wrong.
    """
    is_wrong = age.latest_ms - age.store_ms > FUTURE_MS
    return max(age.store_ms if is_wrong else age.latest_ms, newest_ms, info.modified_ms)


def _kept_since(info: ObjectInfo, since: Mapping[str, int]) -> int | None:
    """Returns when the week of a stray began; None if it begins now."""
    return since.get(info.key)


def _list_objects(
    context: Context, topic: Topic, references: Sequence[References], tally: _Tally
) -> _TopicObjects:
    """The end of step 4. Raises ``CorruptError`` if a row names an object that is missing."""
    needed = set().union(*(found.objects for found in references))
    applied = {each.object for found in references for each in found.applied}
    keys: set[str] = set()
    unnamed, kept, shared = [], [], []
    for folder in (layout.segments, layout.amendments, layout.journals):
        for info in _list_counted(context, folder(topic.incarnation), tally):
            keys.add(info.key)
            if info.key not in needed:
                unnamed.append(info)
                continue
            if info.key in applied:
                kept.append(info)  # until its amendment is deleted
            if is_shared(info.key):
                shared.append(info)  # other partitions may have lost it
    if not needed <= keys:
        check_objects(context, topic, needed - keys)
    asked = [*unnamed, *shared]
    uses = ObjectUses(info.key for info in asked)
    for partition, found in enumerate(references):
        uses.add(partition, found.objects)
        uses.add(partition, found.leftovers)
        uses.add_rows(partition, found.unused)
    strays = [info for info in asked if not uses.is_settled(info.key)]
    return _TopicObjects([*unnamed, *kept], strays, keys)


def _look_at(
    context: Context, topic: Topic, epochs: Sequence[int], strays: list[ObjectInfo]
) -> Losses:
    """Returns what strays show that can no longer be committed, and journals of any epoch."""
    journals = layout.journals(topic.incarnation)
    over = {info.key for info in strays if _can_never_be_named(info.key, topic, epochs)}
    asked = [info for info in strays if info.key in over or info.key.startswith(journals)]
    losses = find_losses(context, topic, asked, accepted_until_ms(context, topic))
    return Losses(losses.proofs, [info for info in losses.doubts if info.key in over])


def _garbage(
    context: Context,
    topic: Topic,
    epochs: Sequence[int],
    references: Sequence[References],
    listed: _TopicObjects,
    lost: Collection[str],
) -> Iterator[ObjectInfo]:
    """Step 7: yields what rows now list as unused, or was ``lost`` and is no longer kept."""
    needed = set().union(*(found.objects for found in references))
    uses = ObjectUses(info.key for info in listed.unneeded)
    for partition, found in enumerate(references):
        uses.add(partition, found.objects)
        uses.add_rows(partition, read_unused(context, topic, partition))
    for info in listed.unneeded:
        if info.key in needed or not _can_never_be_named(info.key, topic, epochs):
            continue
        if info.key in lost or uses.is_settled(info.key):
            yield info


def _can_never_be_named(key: str, topic: Topic, epochs: Sequence[int]) -> bool:
    """Returns whether no row can ever name an object again; False for a name that is not ours."""
    if key.startswith(layout.journals(topic.incarnation)):
        return _is_below(key, epochs)
    return _generation(key, topic.generation) < topic.generation


def _ready_topic(context: Context, name: str) -> Topic | None:
    """Returns the topic as the registry has it; None if it is not ready."""
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(name))
    if row is None:
        return None
    topic = decode_row(row.value, Topic, f"registry row `{row.row}`")
    return topic if topic.state == "ready" else None


def _raise_generation(context: Context, name: str) -> Topic | None:
    """Step 1: returns the topic with its new generation; None if it is not ready.

    After a conflict or a lost reply it is enough that the generation has grown, through this sweep
    or another one.
    """
    before: list[Topic] = []

    def decide(rows: Rows) -> Decision[Topic | None]:
        row = rows[layout.topic_row(name)]
        if row is None:
            return Decision(None)
        topic = decode_row(row.value, Topic, f"registry row `{row.row}`")
        if topic.state != "ready":
            return Decision(None)  # no objects yet, or `topic delete` deletes them
        if before and _has_grown(before[-1], topic):
            return Decision(topic)
        before.append(topic)
        raised = msgspec.structs.replace(topic, generation=topic.generation + 1)
        return Decision(raised, [rows.put(row.row, encode_row(raised))])

    return update(context, layout.REGISTRY, [layout.topic_row(name)], decide, f"topic `{name}`")


def _has_grown(before: Topic, now: Topic) -> bool:
    return now.incarnation == before.incarnation and now.generation > before.generation


def _raise_floor(context: Context, topic: Topic, partition: int, floor: int) -> Head:
    """Step 2, for one partition: returns its head, which refuses older segments from now on."""

    def raised(head: Head) -> Head:
        return msgspec.structs.replace(head, floor=max(head.floor, floor))

    return raise_head(context, topic, partition, raised)[1]


def _remove_applied(
    context: Context, topic: Topic, partition: int, found: References, age: _Age, tally: _Tally
) -> None:
    """Step 6, for one partition. The values of deleted amendments are no longer needed."""
    old = [each for each in found.applied if age.is_old(each.at_ms)]
    gone = remove_amendments(
        context, topic, partition, [(each.row, each.version, each.object) for each in old]
    )
    tally.amendments_removed += len(gone)
    found.objects -= {each.object for each in old if each.object and each.row in gone}
    narrow_amended(context, topic, partition)


def _generation(key: str, unknown: int) -> int:
    """Returns the generation of a segment or a value; ``unknown`` for a name that is not ours."""
    try:
        return layout.segment_generation(key)
    except ValueError:
        return unknown


def _is_below(key: str, epochs: Sequence[int]) -> bool:
    """Returns whether a journal's epoch is over; False for a name that is not ours."""
    try:
        partition, epoch = layout.journal_place(key)
    except ValueError:
        return False
    return 0 <= partition < len(epochs) and epoch < epochs[partition]


def _list_counted(context: Context, prefix: str, tally: _Tally) -> Iterator[ObjectInfo]:
    for info in context.store.list(prefix):
        tally.objects_seen += 1
        yield info


def _delete_old(
    context: Context, garbage: Iterable[ObjectInfo], age: _Age, tally: _Tally
) -> frozenset[str]:
    """Steps 7 and 12: deletes what is older than the grace period, in batches; returns the keys."""
    batch: list[ObjectInfo] = []
    gone: set[str] = set()

    def delete() -> None:
        if batch:
            context.store.delete([info.key for info in batch])
            gone.update(info.key for info in batch)
            tally.objects_deleted += len(batch)
            tally.bytes_deleted += sum(info.size for info in batch)
            batch.clear()

    for info in garbage:
        if not age.is_old(info.modified_ms):
            tally.objects_young += 1
            continue
        batch.append(info)
        if len(batch) == _DELETES_AT_ONCE:
            delete()
    delete()
    return frozenset(gone)


def _sweep_deleted(context: Context, stored: Iterable[str], age: _Age, tally: _Tally) -> None:
    """Step 12."""
    known = {topic.incarnation for topic in list_topics(context)}
    for incarnation in stored:
        with contained(f"deleted topic `{incarnation}`", partial(tally.refuse, incarnation)):
            if incarnation not in known and is_deleted(context, incarnation):
                objects = _list_counted(context, f"{TOPICS}{incarnation}/", tally)
                _delete_old(context, objects, age, tally)
