"""Sweeping: what nobody refers to any more is deleted. No threads and no locks here.

First the incarnations that have objects are listed, and the registry is read after that. Objects
appear only once a topic is ready, and a deletion leaves a ``deleted`` row. So an incarnation that
has objects and neither row means that the registry lost a row: the sweep refuses, and deletes
nothing at all. It also refuses a catalog whose own check, where it has one, finds damage: a row
that cannot be found would make live objects look like garbage.

For each topic that is ready:

0. objects of a higher generation than its registry row has prove that the catalog went back
   (``losses``): the sweep refuses this topic
1. its segment generation is raised in the registry row, by a conditional write: from here on
   segments and the values of updates are uploaded under the new one
2. the floor is raised to that generation in every ``head``, by conditional writes: a commit or an
   amendment that was under way fails, and nothing of an older generation can be committed any more
3. the epoch of every ``compile`` row that somebody holds is raised, by a conditional write: a swap
   that was under way fails, and no journal of a lower epoch can take its place any more
4. all references are read: every row of runs, journals and amendments of every partition, and last
   the rows of unused objects; runs below the head's ``journaled`` do not count; a row of an unknown
   kind, one that does not decode, or offsets between the head's start and next that no row holds
   make the sweep refuse this topic; then the topic's objects are listed. A row whose object is not
   there makes it refuse too. So does a stray that proves that the catalog went back (``losses``):
   an object that fewer partitions name or list as unused than it is for. Nothing was deleted so
   far. Other strays that can no longer be committed are noted, unless they are noted already,
   with the latest of this machine's time, the store's, the newest in the topic's rows and the date
   of the object; notes of objects that are no longer strays are deleted (``strays``)
5. rows that trims and compiles left behind are deleted, their objects listed as unused
   (``leftovers``)
6. amendments that the journal of their offset has, and that are older than the grace, are deleted,
   by their versions, and their values listed; then the head says where some are left
7. the rows of unused objects are read again. Objects that they list for as many partitions as they
   are for, and that no row names, are deleted, if they are older than the grace: segments and
   values of updates below the floor, journals below the epoch of their partition. Strays are kept
   for a week after their note, or until a person accepts their loss. Witnesses of segments that
   are gone (``witnesses``), and what Spark writers have staged and no driver will commit
   (``sink_sweep``), are deleted too
8. of the rows of unused objects that step 4 has read, those are deleted, by their versions, that
   list no object that still exists
9. rows of unnamed producers that were not seen for a week are marked as silent, with the time of
   the sweep, or the newest that the topic's own rows note; one that is marked and unchanged a week
   later is deleted. Both weeks end at the newest time that the topic's own rows note, or earlier

Then, for topics that are no more:

10. of the incarnations that were listed first, those with a ``deleted`` row are taken
11. the registry is read: a topic that was made meanwhile is not among them
12. their objects are deleted, if they are older than the grace

Then, for the store as a whole:

13. uploads that began before the grace, and did not end, are removed: copies whose reply was lost
    leave them on S3, and killed processes in a folder

| dies after | what is on disk                          | who repairs it                          |
|------------|------------------------------------------|-----------------------------------------|
| 0          | as it was                                | nobody needs to                         |
| 1          | a new generation; all else as it was     | nobody needs to                         |
| 2, partly  | some heads refuse older segments         | producers upload anew where they must   |
| 3, partly  | some compilers lost their row            | they take it anew, and go on            |
| 4          | the same in every head                   | the same                                |
| 4, partly  | some notes of strays, or fewer           | the next sweep: a week begins later     |
| 5 to 9     | fewer rows, fewer objects                | the next sweep resumes                  |
| 6, partly  | a head that names too many amendments    | the next sweep; readers find none there |
| 7          | rows that list deleted objects           | the next sweep deletes them             |
| 10, 11, 12 | fewer objects                            | the next sweep resumes                  |
| 13         | fewer broken uploads                     | the next sweep resumes                  |

Why nothing is lost: a run of an old generation was committed before its head's floor was raised,
and then step 4 sees its row, or its commit expects a version of the head that never comes again.
The same holds for amendments, and for journals by the ``compile`` row, which every swap expects. A
run that a swap replaces after step 2 is still counted. This holds however long a producer stalls
and however many sweeps run at once, whatever the clocks say; the grace only spares objects that
a reader may still look for. Ages are counted to the earlier of this machine's time and the store's
(``ages``), so a clock that is ahead makes nothing old. A note is dated by the latest time that is
known, so a clock that was behind makes no week shorter than the topic itself shows. A floor is at
most the generation in the registry, since step 1 goes before step 2. An amendment goes only when a
journal that has it is there, and readers read amendments before rows, so they never see an older
state.

A catalog that has lost commits no longer names the only copy of acknowledged events. But no row
lists it as unused either, and only what is listed is garbage. Steps 0 and 4 prove the loss where
they can. Then a person decides: restores the catalog, or accepts the loss. An object is deleted
before the row that lists it, so no object is taken for a stray because its row went first. What
cannot be proven is kept for a week that begins when a sweep first meets it: dates of objects are
older than the loss, and may come from a store that was restored.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from tidelog.catalog.base import Put
from tidelog.catalog.deleted_rows import clear_deleted_rows
from tidelog.context import Context
from tidelog.coordination.ages import FUTURE_MS, clock_ahead_ms, is_old, read_times
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.heads import RACE, raise_epoch, raise_head
from tidelog.log.maintenance.ended_producers import forget_producer
from tidelog.log.maintenance.incarnations import (
    TOPICS,
    accept_unexplained,
    inspect_catalog,
    is_deleted,
    stored_incarnations,
    unexplained,
)
from tidelog.log.maintenance.leftovers import (
    abort_uploads,
    narrow_amended,
    remove_amendments,
    remove_shadowed,
    remove_trimmed,
)
from tidelog.log.maintenance.losses import (
    Losses,
    LossProof,
    accept_losses,
    accepted_until_ms,
    find_losses,
    newer_than,
    remedy_for_lost,
)
from tidelog.log.maintenance.references import (
    References,
    UnknownRowError,
    check_objects,
    read_whole,
)
from tidelog.log.maintenance.staged import left_by_sinks
from tidelog.log.maintenance.unused import (
    Uses,
    is_shared,
    kept_since,
    note_strays,
    noted_since,
    origin_of,
    read_unused,
    remove_unused,
)
from tidelog.log.producer.staged import is_over, list_witnesses
from tidelog.log.topics import find_topic, list_topics
from tidelog.model import layout, limits
from tidelog.model.partition_rows import Head, decode_row, encode_row
from tidelog.model.topic import Topic
from tidelog.store.base import ObjectInfo

__all__ = ["SkippedTopic", "SweepReport", "sweep_home"]

NEVER_NOTED: Mapping[str, int] = MappingProxyType({})
_DELETES_AT_ONCE = 1_000  # objects; what S3 takes in one request


@dataclass(frozen=True, slots=True)
class SkippedTopic:
    """A topic that was left alone, and why."""

    topic: str
    error: TidelogError


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found and did."""

    topics: int = 0  # that were swept to the end
    objects_seen: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0  # would have been deleted but for the grace
    objects_doubted: int = 0  # possible losses, which were kept
    runs_removed: int = 0  # rows that trims and compiles had left behind
    producers_removed: int = 0  # rows of unnamed producers
    amendments_removed: int = 0  # rows of those that a journal has
    uploads_aborted: int = 0  # in parts, left behind by copies whose reply was lost
    clock_ahead_ms: int = 0  # how far this machine's clock is ahead of the store's
    refused: tuple[SkippedTopic, ...] = ()
    unlisted: tuple[TidelogError, ...] = ()  # of stores whose broken uploads could not be removed
    pipelines: int = 0  # that were swept, those of archives too
    commits_merged: int = 0  # rows of archives' commits that became part of others


@dataclass(slots=True)
class _Tally:
    """The report in the making."""

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

    def report(self) -> SweepReport:
        values = {name: getattr(self, name) for name in self.__slots__}
        lists = {"refused": tuple(self.refused), "unlisted": tuple(self.unlisted)}
        return SweepReport(**values | lists)


@dataclass(frozen=True, slots=True)
class _Age:
    """The time of a sweep, and its grace."""

    now_ms: int  # the earlier of this machine's time and the store's
    latest_ms: int  # the later one
    store_ms: int  # the store's
    grace_ms: int

    def is_old(self, then_ms: int) -> bool:
        return is_old(self.now_ms, then_ms, self.grace_ms)

    def is_kept(self, noted_ms: int | None) -> bool:
        """Whether a stray that was noted then, or never, is still kept."""
        return noted_ms is None or self.now_ms - noted_ms < limits.STRAY_KEEP_MS


@dataclass(frozen=True, slots=True)
class _TopicObjects:
    """A topic's objects that no row needs, or will need soon."""

    unneeded: list[ObjectInfo]
    strays: list[ObjectInfo]  # that fewer partitions name or list than they are for
    keys: set[str]  # of all objects


def sweep_home(context: Context, grace_ms: int, accept_loss: Collection[str] = ()) -> SweepReport:
    """Delete what is not referred to and older than the grace, in all topics.

    Safe at any time, beside producers, trims and other sweeps. ``InvalidError`` for a negative
    grace; a topic that cannot be swept is reported, and the others are. Of the topics in
    ``accept_loss`` it also deletes objects that may be the only copy of events, or are: see
    ``losses``; an incarnation of which only objects are left then counts as deleted.
    ``NotFoundError`` when there is no such topic.
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
        try:
            _sweep_topic(context, name, age, tally, name in accept_loss)
        except NotFoundError:
            continue  # deleted meanwhile; what it left is found by its incarnation
        except (CorruptError, UnknownRowError) as exc:
            tally.refused.append(SkippedTopic(name, exc))
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
            row for row in found.unused if all(_is_over(key, topic, epochs) for key in row.objects)
        ]
        remove_unused(context, (topic, partition), over, listed.keys - gone, gone)
    origins = {origin_of(key)[0] for key in listed.keys - gone}
    _delete_old(context, [each for each in witnesses if is_over(each, origins)], age, tally)
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
    """The possible losses to keep. ``CorruptError`` where objects prove that commits are lost.

    With ``accept`` a person has accepted the loss of all of these, which is remembered up to the
    store's time at most: a date in the future would accept objects that are not there yet.
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
        if age.is_old(info.modified_ms)  # else the grace keeps it
    )


def _note_ms(info: ObjectInfo, age: _Age, newest_ms: int) -> int:
    """When a stray is noted: the latest of all times that tell, since clocks may be behind.

    This machine's does not tell where it is so far ahead of the store's that it is wrong.
    """
    is_wrong = age.latest_ms - age.store_ms > FUTURE_MS
    return max(age.store_ms if is_wrong else age.latest_ms, newest_ms, info.modified_ms)


def _kept_since(info: ObjectInfo, since: Mapping[str, int]) -> int | None:
    """When the week of a stray began; None where it begins now."""
    return since.get(info.key)


def _list_objects(
    context: Context, topic: Topic, references: Sequence[References], tally: _Tally
) -> _TopicObjects:
    """The end of step 4. ``CorruptError`` where a row names an object that is not there."""
    needed = set().union(*(found.objects for found in references))
    applied = {each.object for found in references for each in found.applied}
    keys: set[str] = set()
    unnamed, kept, shared = [], [], []
    for folder in (layout.segments, layout.amendments, layout.journals):
        for info in _seen(context, folder(topic.incarnation), tally):
            keys.add(info.key)
            if info.key not in needed:
                unnamed.append(info)
                continue
            if info.key in applied:
                kept.append(info)  # until its amendment goes
            if is_shared(info.key):
                shared.append(info)  # other partitions may have lost it
    if not needed <= keys:
        check_objects(context, topic, needed - keys)
    asked = [*unnamed, *shared]
    uses = Uses(info.key for info in asked)
    for partition, found in enumerate(references):
        uses.add(partition, found.objects)
        uses.add(partition, found.leftovers)
        uses.add_rows(partition, found.unused)
    strays = [info for info in asked if not uses.is_settled(info.key)]
    return _TopicObjects([*unnamed, *kept], strays, keys)


def _look_at(
    context: Context, topic: Topic, epochs: Sequence[int], strays: list[ObjectInfo]
) -> Losses:
    """What strays say: those that can no longer be committed, and journals, of any epoch."""
    journals = layout.journals(topic.incarnation)
    over = {info.key for info in strays if _is_over(info.key, topic, epochs)}
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
    """Step 7: what rows list as unused by now, or was ``lost`` and is no longer kept."""
    needed = set().union(*(found.objects for found in references))
    uses = Uses(info.key for info in listed.unneeded)
    for partition, found in enumerate(references):
        uses.add(partition, found.objects)
        uses.add_rows(partition, read_unused(context, topic, partition))
    for info in listed.unneeded:
        if info.key in needed or not _is_over(info.key, topic, epochs):
            continue
        if info.key in lost or uses.is_settled(info.key):
            yield info


def _is_over(key: str, topic: Topic, epochs: Sequence[int]) -> bool:
    """Whether no row can come to name an object any more; False for a name that is not ours."""
    if key.startswith(layout.journals(topic.incarnation)):
        return _is_below(key, epochs)
    return _generation(key, topic.generation) < topic.generation


def _ready_topic(context: Context, name: str) -> Topic | None:
    """The topic as the registry has it; None when it is not ready."""
    row = context.catalog.get(layout.REGISTRY, layout.topic_row(name))
    if row is None:
        return None
    topic = decode_row(row.value, Topic, f"registry row `{row.row}`")
    return topic if topic.state == "ready" else None


def _raise_generation(context: Context, name: str) -> Topic | None:
    """Step 1: the topic with its new generation; None when it is not ready.

    After a conflict or a lost reply it is enough that the generation has grown, be it by this
    sweep or by another one.
    """
    before: Topic | None = None
    for delay_s in RACE.delays_s(context.random):
        row = context.catalog.get(layout.REGISTRY, layout.topic_row(name))
        if row is None:
            return None
        topic = decode_row(row.value, Topic, f"registry row `{row.row}`")
        if topic.state != "ready":
            return None  # no objects yet, or `topic delete` removes them
        if before is not None and _has_grown(before, topic):
            return topic
        before = topic
        raised = msgspec.structs.replace(topic, generation=topic.generation + 1)
        try:
            change = Put(row.row, encode_row(raised), expect=row.version)
            context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            context.clock.sleep(delay_s)
        else:
            return raised
    raise UnavailableError(f"topic `{name}`: too many writers at once: sweep again")


def _has_grown(before: Topic, now: Topic) -> bool:
    return now.incarnation == before.incarnation and now.generation > before.generation


def _raise_floor(context: Context, topic: Topic, partition: int, floor: int) -> Head:
    """Step 2, for one partition: its head, which refuses older segments from now on."""

    def raised(head: Head) -> Head:
        return msgspec.structs.replace(head, floor=max(head.floor, floor))

    return raise_head(context, topic, partition, raised)[1]


def _remove_applied(
    context: Context, topic: Topic, partition: int, found: References, age: _Age, tally: _Tally
) -> None:
    """Step 6, for one partition; the values of amendments that went are needed no more."""
    old = [each for each in found.applied if age.is_old(each.at_ms)]
    gone = remove_amendments(
        context, topic, partition, [(each.row, each.version, each.object) for each in old]
    )
    tally.amendments_removed += len(gone)
    found.objects -= {each.object for each in old if each.object and each.row in gone}
    narrow_amended(context, topic, partition)


def _generation(key: str, unknown: int) -> int:
    """The generation of a segment or a value; ``unknown`` for a name that is not ours."""
    try:
        return layout.segment_generation(key)
    except ValueError:
        return unknown


def _is_below(key: str, epochs: Sequence[int]) -> bool:
    """Whether a journal's epoch is over; False for a name that is not ours."""
    try:
        partition, epoch = layout.journal_place(key)
    except ValueError:
        return False
    return 0 <= partition < len(epochs) and epoch < epochs[partition]


def _seen(context: Context, prefix: str, tally: _Tally) -> Iterator[ObjectInfo]:
    for info in context.store.list(prefix):
        tally.objects_seen += 1
        yield info


def _delete_old(
    context: Context, garbage: Iterable[ObjectInfo], age: _Age, tally: _Tally
) -> frozenset[str]:
    """Steps 7 and 12: delete what is older than the grace, in batches; returns their keys."""
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
        if incarnation not in known and is_deleted(context, incarnation):
            objects = _seen(context, f"{TOPICS}{incarnation}/", tally)
            _delete_old(context, objects, age, tally)
