"""Whole erasures: delete events, remove their bytes from topics and archives, and prove it.

``erase_and_prove`` is what ``Home.erase`` does:

1. delete the events: no reader that starts later sees them (``erasure.delete``);
2. delete what only objects hold that no row names (``delete_strays``);
3. ``purge``: compile the topic, erase from archives, repair their tables, and sweep;
4. search every object that could hold the events (``erasure.proof_search``);
5. write the hash of the proof to the audit.

Each step may crash and be repeated. The scribe does step 3 in the background, after its grace
period, by turns (``turn``). A range of an archive that was planned before the delete may still
write an event, so ``purge`` waits for it. An append under way has an object that no row names yet,
so steps 3 and 4 are repeated if a proof finds one. Events of archives without topic are erased and
proved by ``erase_archived_and_prove``, with the same steps except the compile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from tidelog.archive.derived_archives import copies_of, reachable_archives_of
from tidelog.archive.erased_events import Deletions, PartitionOffsets
from tidelog.archive.tables import repair_tables
from tidelog.clock import looks
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.coordination.pipeline_rows import is_detached
from tidelog.erasure.delete import DeleteResult, delete_events, delete_key, delete_strays
from tidelog.erasure.delete_archived import (
    closed_offsets,
    erase_archived,
    keep_deletions,
    settled_offsets,
)
from tidelog.erasure.proof import Proof, record_proof
from tidelog.erasure.proof_search import prove_erased, prove_erased_from_archive
from tidelog.erasure.redaction import redact_seeks
from tidelog.erasure.rewrite import ArchiveErasure, erase_from_archives
from tidelog.errors import (
    CorruptError,
    InvalidError,
    TidelogError,
    UnavailableError,
    raise_first,
)
from tidelog.journal.amend import Amender
from tidelog.journal.compile import CompileReport, compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.compile_tasks import compile_by_tasks
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.topics import find_topic
from tidelog.maintenance.pipeline_sweep import PipelineSweep, sweep_archives
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic

__all__ = [
    "ArchivedEvents",
    "Erasure",
    "ErasureWatch",
    "TopicEvents",
    "erase_and_prove",
    "erase_archived_and_prove",
    "erase_until_settled",
    "finish_closed_deletes",
    "finish_deletes",
    "purge",
    "purge_and_prove",
]


WAIT_MS = 10_000  # for unfinished ranges; a proof names those that take longer


_LOOK_S = 0.5


_SEARCHES_MAX = 3  # of one proof


_LOOK_AGAIN_S = 2.0


_Swept = TypeVar("_Swept", SweepReport, PipelineSweep)


@dataclass(slots=True)
class Erasure:
    """What was done to delete erased bytes."""

    compiled: CompileReport = field(default_factory=CompileReport)
    archives: list[ArchiveErasure] = field(default_factory=list)
    swept: SweepReport = field(default_factory=SweepReport)
    staging: PipelineSweep = field(default_factory=PipelineSweep)

    def add(self, later: Erasure) -> None:
        """Adds what a later removal did; what is left is what that found."""
        self.compiled += later.compiled
        _add_archives(self.archives, later.archives)
        self.swept = _with_deleted(later.swept, self.swept)
        self.staging = _with_deleted(later.staging, self.staging)

    @property
    def files(self) -> int:
        """Returns how many files of archives were rewritten.

        >>> home.purge("orders").files
        0
        """
        return sum(each.files for each in self.archives)

    @property
    def waiting(self) -> int:
        """Returns how many ranges of archives were under way that may hold an erased event.

        >>> home.purge("orders").waiting
        0
        """
        return sum(each.waiting for each in self.archives)

    @property
    def objects_deleted(self) -> int:
        """Returns how many objects were swept.

        >>> home.purge("orders").objects_deleted >= 0
        True
        """
        return self.swept.objects_deleted + self.staging.objects_deleted


@dataclass(frozen=True, slots=True)
class TopicEvents:
    """Events of a topic, by ids or by keys."""

    ids: Collection[str] = ()
    keys: Collection[bytes] = ()


@dataclass(frozen=True, slots=True)
class ArchivedEvents:
    """Events of an archive without topic, by ids or by one key."""

    archive: Archive
    ids: Collection[str] = ()
    key: bytes | None = None

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Returns the key, if there is one."""
        return () if self.key is None else (self.key,)


def _add_archives(total: list[ArchiveErasure], later: Iterable[ArchiveErasure]) -> None:
    """Adds what a later look did to each archive; what the look does not name has ended."""
    known = {(each.archive, each.generation): each for each in total}
    for each in total:
        each.add(ArchiveErasure(each.archive, each.generation))
    for each in later:
        name = each.archive, each.generation
        if name not in known:
            known[name] = ArchiveErasure(*name)
            total.append(known[name])
        known[name].add(each)


def _with_deleted(later: _Swept, earlier: _Swept) -> _Swept:
    """Returns a sweep, with what earlier sweeps of the same erasure deleted."""
    return replace(
        later,
        objects_deleted=earlier.objects_deleted + later.objects_deleted,
        bytes_deleted=earlier.bytes_deleted + later.bytes_deleted,
    )


class ErasureWatch:
    """Follows a long erasure: override what you want to know."""

    total: Erasure | None = None  # what was removed so far

    def deleted(self, result: DeleteResult) -> None:
        """Called once the events of a topic are deleted, before their bytes are removed."""

    def purging(self) -> None:
        """Called before bytes are removed, each time."""

    def purged(self, done: Erasure) -> None:
        """Called with what was removed, each time; adds it to ``total``."""
        if self.total is None:
            self.total = Erasure()
        self.total.add(done)

    def waiting(self, archive: str) -> None:
        """Called while an archive has a range under way that may hold the events."""

    def searched(self, size: int) -> None:
        """Called with the bytes of each object that a proof has searched."""

    def is_stopped(self) -> bool:
        """Returns True to end the waiting; the proof then lists what is left."""
        return False


def erase_and_prove(
    context: Context,
    open_amender: Callable[[], Amender],
    events: TopicEvents,
    wait_ms: int,
    watch: ErasureWatch,
    progress: Callable[[int], None],
) -> Proof:
    """Erases events from a topic and its archives, and returns the proof: all steps.

    ``open_amender`` opens the topic as it is then: a delete of a key may take long. ``progress``
    gets the bytes of each step of a search by key. Raises ``InvalidError`` for several keys, and
    for ids together with a key: one delete cannot find both.
    """
    if bool(events.ids) == bool(events.keys) or len(events.keys) > 1:
        raise InvalidError("erase: give ids or one key")
    if events.keys:
        (key,) = events.keys
        deleted = delete_key(context, open_amender(), key, progress)
    else:
        deleted = delete_events(context, open_amender(), events.ids)
    watch.deleted(deleted)
    return purge_and_prove(context, open_amender(), events, wait_ms, watch, deleted)


def purge_and_prove(
    context: Context,
    amender: Amender,
    events: TopicEvents,
    wait_ms: int,
    watch: ErasureWatch,
    deleted: DeleteResult | None,
) -> Proof:
    """Does steps 2 to 5 for deleted events; without the result of a delete, 3 to 5."""
    topic, ids, keys = amender.topic, events.ids, events.keys
    if deleted is not None:
        deleted = delete_strays(context, amender, deleted, ids, keys)
    _redact_seeks(context, ids, keys)
    for searches in range(1, _SEARCHES_MAX + 1):
        purge(context, topic, 0, wait_ms, watch)
        proof = prove_erased(context, topic, ids, keys, watch.searched)
        is_passing = all(each.object.startswith("topics/") for each in proof.traces)
        if proof.is_erased or not is_passing or watch.is_stopped() or searches == _SEARCHES_MAX:
            break
        context.clock.sleep(_LOOK_AGAIN_S)
    proof.deleted = deleted
    record_proof(context, find_topic(context, topic.name), proof, amender.why)
    return proof


def purge(
    context: Context,
    topic: Topic,
    grace_ms: int = 0,
    wait_ms: int = WAIT_MS,
    watch: ErasureWatch | None = None,
) -> Erasure:
    """Removes the bytes of a topic's deleted events, again until no range may bring one back.

    With a grace of 0, erased bytes are deleted on return; running readers read the catalog again.
    Waits for ranges that were planned before the deletes; ``archives`` of the result has those that
    take longer than ``wait_ms``. An error of an archive or of the sweep does not stop the rest: it
    is raised at the end.
    """
    watch = watch or ErasureWatch()
    for is_last in looks(context.clock, wait_ms / 1000, _LOOK_AGAIN_S):
        watch.purging()
        done = _remove_bytes(context, topic, grace_ms, min(wait_ms, WAIT_MS))
        watch.purged(done)
        waiting = sorted({each.archive for each in done.archives if each.waiting})
        if not waiting or watch.is_stopped() or is_last:
            break
        watch.waiting(waiting[0])
    return done


def _remove_bytes(context: Context, topic: Topic, grace_ms: int, wait_ms: int) -> Erasure:
    """Carries all deletes of a topic into its journals and archives, and sweeps what is left."""
    errors: list[TidelogError] = []
    policy = CompilePolicy.everything()
    if context.tasks is None:
        compiled = compile_topic(context, topic, policy)
    else:
        compiled = compile_by_tasks(context, context.tasks, [topic], policy)
    deleted = settled_offsets(context, topic)
    archives = erase_until_settled(context, topic, deleted, wait_ms, errors.append)
    made = {each.name: each for each, _ in reachable_archives_of(context, topic)}.values()
    swept, staging = _repair_and_sweep(context, made, grace_ms, errors)
    # Damage keeps the sweep from deleting, and a proof names what is left. Other errors are new.
    failed = [each.error for each in swept.refused if each.topic == topic.name]
    errors += [each for each in failed if not isinstance(each, CorruptError | InvalidError)]
    raise_first(errors)
    return Erasure(compiled, archives, swept, staging)


def _repair_and_sweep(
    context: Context, archives: Iterable[Archive], grace_ms: int, errors: list[TidelogError]
) -> tuple[SweepReport, PipelineSweep]:
    """Repairs the tables of archives, and sweeps topics, archives and pipelines."""
    for archive in archives:
        errors += repair_tables(context, archive)
    return sweep_home(context, grace_ms), sweep_archives(context, grace_ms)


def erase_archived_and_prove(
    context: Context, events: ArchivedEvents, why: Why, wait_ms: int, watch: ErasureWatch
) -> Proof:
    """Erases events from an archive without topic, and returns the proof, which it also records.

    Erases again while a range is under way that may hold such events, for ``wait_ms`` at most. A
    call that dies can be repeated: what it had erased is proved too.
    """
    archive, total, ids, unseen = events.archive, 0, set[str](), dict[str, None]()
    for is_last in looks(context.clock, wait_ms / 1000, _LOOK_AGAIN_S):
        watch.purging()
        found = erase_archived(context, archive, why, events.ids, events.key)
        total, unseen = total + found.events, unseen | dict.fromkeys(found.unseen)
        ids |= found.ids
        errors: list[TidelogError] = []
        copies = [each.archive for each in copies_of(context, archive)]
        own = [each for each in copies if not is_detached(context, each)]
        swept = _repair_and_sweep(context, own, 0, errors)
        raise_first(errors)
        watch.purged(Erasure(CompileReport(), list(found.archives), *swept))
        if not found.is_waiting or watch.is_stopped() or is_last:
            break
        watch.waiting(archive.name)
    _redact_seeks(context, events.ids, events.keys)
    proof = prove_erased_from_archive(context, archive, events.ids, events.keys, watch.searched)
    missing = tuple(each for each in events.ids if each not in ids)
    proof.deleted = DeleteResult(archived=total, missing=missing, unseen=tuple(unseen))
    record_proof(context, archive, proof, why)
    return proof


def _redact_seeks(context: Context, ids: Collection[str], keys: Collection[bytes]) -> None:
    """Takes ids and keys out of the home's audit, where people wrote them as reasons."""
    redact_seeks(context, Deletions.anywhere(ids, keys))


def erase_until_settled(
    context: Context,
    topic: Topic,
    deleted: PartitionOffsets,
    wait_ms: int,
    on_error: Callable[[TidelogError], None],
) -> list[ArchiveErasure]:
    """Erases from all archives until no unfinished range may hold an event.

    Returns what was erased, also after ``wait_ms``: then some report an unfinished range.
    """
    total: list[ArchiveErasure] = []
    for is_last in looks(context.clock, wait_ms / 1000, _LOOK_S):
        errors: list[TidelogError] = []
        found = erase_from_archives(context, topic, deleted, errors.append)
        _add_archives(total, found)
        if is_last or not any(each.waiting for each in found):
            for error in errors:
                on_error(error)
            break
    return total


def finish_deletes(context: Context, topic: Topic) -> None:
    """Erases from archives what was deleted from a topic, before the topic itself is deleted.

    Its audit is deleted with it, and nothing else says what archives still have to erase. Raises
    ``UnavailableError`` while an unfinished range may hold such an event.
    """
    _check_settled(topic, erase_from_archives(context, topic, settled_offsets(context, topic)))


def finish_closed_deletes(context: Context, topic: Topic) -> None:
    """Does the same after the heads of the topic are closed, for deletes that ended since.

    No later delete can reach the topic, so this is all that archives ever have to erase.
    """
    errors: list[TidelogError] = []
    deleted = closed_offsets(context, topic)
    keep_deletions(context, topic)
    done = erase_until_settled(context, topic, deleted, WAIT_MS, errors.append)
    raise_first(errors)
    _check_settled(topic, done)


def _check_settled(topic: Topic, done: Iterable[ArchiveErasure]) -> None:
    waiting = min((each for each in done if each.waiting), key=attrgetter("archive"), default=None)
    if waiting is not None:
        raise UnavailableError(
            f"topic `{topic.name}`: a range of archive `{waiting.archive}` is under way that may "
            f"hold a deleted event: {min(waiting.unfinished.values())}, then delete the topic again"
        )
