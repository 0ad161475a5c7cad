# ruff: noqa: PLC0415 - archives, erasure and Spark take longer to import than the rest
"""What a home does as a whole: erase events for good, maintain itself, drive what it has.

Archives and pipelines are imported when they are needed: that takes longer than all the rest.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from tidelog.api.journal import unknown_id
from tidelog.catalog import Catalog
from tidelog.catalog.base import freeing
from tidelog.concurrency import TaskRunner
from tidelog.context import Context
from tidelog.coordination.audit import Owner, Why, record_action
from tidelog.coordination.jobs import Jobs, SupervisedPart
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.coordination.registry import check_shown
from tidelog.errors import InvalidError
from tidelog.journal.amend import Amender
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.lookup import Lookups, check_id
from tidelog.journal.scribe import Scribe, ScribeOptions, Turn
from tidelog.log.late_readers import Past, check_readers
from tidelog.log.maintenance.incarnations import inspect_home
from tidelog.log.maintenance.sweep import SweepReport
from tidelog.log.maintenance.trim import (
    BeforeTime,
    TrimResult,
    TrimTo,
    before_time,
    explain_kept,
    plan_trim,
    trim_topic,
)
from tidelog.log.maintenance.verify import VerifyReport, verify_topic
from tidelog.log.status import read_heads
from tidelog.model import defaults
from tidelog.model.event import check_timestamp
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic
from tidelog.settings import check_options
from tidelog.store import Store
from tidelog.store.wrappers import CachedStore

if TYPE_CHECKING:
    from tidelog.erasure.delete import DeleteResult
    from tidelog.erasure.proof import Proof
    from tidelog.erasure.updates import ArchiveUpdate
    from tidelog.maintenance.purge import Erasure, ErasureWatch

__all__ = ["EraseOptions", "MaintenanceCalls", "ProveOptions", "TrimOptions"]


class ProveOptions(TypedDict, total=False):
    """How bytes are removed and searched for."""

    who: str | None  # for the audit; default: user@host
    wait: str | int | None  # for ranges of archives under way; default: 10 seconds
    watch: ErasureWatch | None  # follows it, and may stop it
    spark: str | None  # Spark master; tasks there search and rewrite files of archives
    spark_conf: Mapping[str, str] | None  # settings of Spark


class EraseOptions(ProveOptions, total=False):
    """How events are erased."""

    incarnation: str  # erase from this topic only, and from no other that has the name now
    progress: Callable[[int], None]  # gets the bytes of each step of a search by key


class TrimOptions(TypedDict, total=False):
    """How a topic is trimmed."""

    dry_run: bool  # change nothing, and return what would be deleted
    incarnation: str  # trim this topic only, and no other that has the name now
    who: str  # for the audit


# What else an unknown option of a trim may have been meant for.
_TRIM_TO = "`before` (a time), `to` (tidelog.ToOffsets({0: 50}) or tidelog.KeepBytes), past_readers"


class MaintenanceCalls(ABC):
    """Erasure with its proof, one turn of maintenance, and the drivers of all pipelines."""

    context: Context
    _pool: Executor
    _lookups: Lookups

    @property
    @abstractmethod
    def store(self) -> Store:
        """Where objects are."""

    @property
    @abstractmethod
    def catalog(self) -> Catalog:
        """Where rows are."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises ``InvalidError`` once the home is closed."""

    @abstractmethod
    def topic(self, name: str) -> Topic:
        """Returns the topic with a name. Raises ``NotFoundError``."""

    @abstractmethod
    def amender(self, topic: str, why: Why) -> Amender:
        """What amends events of a topic."""

    @abstractmethod
    def reason(self, why: str = "", who: str | None = None) -> Why:
        """What audit records say of a call."""

    @abstractmethod
    def scribe(
        self,
        how: ScribeOptions | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tasks: TaskRunner | None = None,
    ) -> Scribe:
        """What does turns of maintenance."""

    @abstractmethod
    def spark_tasks(self, spark: str, spark_conf: Mapping[str, str] | None = None) -> TaskRunner:
        """What runs heavy work on Spark."""

    @abstractmethod
    def _with_tasks(self, name: str, spark: str | None, conf: Mapping[str, str] | None) -> Context:
        """The context, with tasks on Spark if a master is given."""

    @property
    def jobs(self) -> Jobs:
        """The jobs that people started in consoles of this home.

        >>> home.jobs.list()
        []
        """
        self._check_open()
        return Jobs(self.context)

    def update_archives(self, topic: str, ids: Iterable[str]) -> list[ArchiveUpdate]:
        """Gives archived events the values that the topic has now; returns what was changed.

        Rewrites the files of the topic's archives that hold these ids, under their names, and
        corrects their tables. ``unchanged`` of a result says why files keep the old values. An
        event keeps its folder. Safe to kill and to repeat: files with the values stay as they are.
        Raises ``NotFoundError`` if the topic has none of these events.

        >>> home.update("orders", "order-2", b"corrected")
        >>> [each.events for each in home.update_archives("orders", ["order-2"])]
        [1]
        """
        from tidelog.erasure.updates import update_archives

        wanted = [ids] if isinstance(ids, str) else list(ids)
        return update_archives(self.context, self._lookups.of(self.topic(topic)), wanted)

    @overload
    def erase(
        self,
        topic: str,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[True] = ...,
        **options: Unpack[EraseOptions],
    ) -> Proof: ...

    @overload
    def erase(
        self,
        topic: str,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[False],
        **options: Unpack[EraseOptions],
    ) -> DeleteResult: ...

    def erase(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        key: bytes | None = None,
        why: str = "",
        prove: bool = True,
        **options: Unpack[EraseOptions],
    ) -> Proof | DeleteResult:
        """Erases events for good, from a topic and its archives, and returns the proof.

        Give ids, or the key of the events. All readers stop seeing them, the topic is compiled,
        files of archives are rewritten, what is left over is swept, and then every object that
        could hold them is searched (:meth:`purge_and_prove`). ``Proof.is_erased`` is True if
        nothing is left, and ``Proof.deleted`` says how many events were deleted and which ids had
        none. With ``spark``, a Spark master, tasks there read, search and rewrite.

        ``why`` and the proof's hash go to the audit, and ``Proof.save`` writes the proof to a file.
        With ``prove=False`` it returns once the events are deleted; maintenance removes their bytes
        later. An erasure that fails can be repeated.

        >>> proof = home.erase("orders", ["order-2", "order-9"], why="request 1234")
        >>> proof.is_erased, proof.deleted.events, proof.deleted.missing
        (True, 1, ('order-9',))
        """
        from tidelog.erasure.delete import delete_events, delete_key

        check_options("erase", options, EraseOptions, ("key", "why", "prove"))
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if bool(wanted) == (key is not None):
            raise _ids_or_key("erase")
        shown = options.get("incarnation", "")
        check_shown(f"topic `{topic}`", shown, self.topic(topic).incarnation)
        amender = self.amender(topic, self.reason(why, options.get("who")))
        spark, conf = options.get("spark"), options.get("spark_conf")
        context = self._with_tasks(f"erase {topic}", spark, conf)
        if key is not None:
            progress = options.get("progress", _ignore)
            deleted = delete_key(context, amender, key, progress)
        else:
            deleted = delete_events(context, amender, wanted)
        if not prove:
            return deleted
        how = ProveOptions(
            who=options.get("who"),
            wait=options.get("wait"),
            watch=options.get("watch"),
            spark=spark,
            spark_conf=conf,
        )
        keys = () if key is None else (key,)
        return self.purge_and_prove(topic, ids=wanted, keys=keys, why=why, deleted=deleted, **how)

    def purge_and_prove(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        why: str = "",
        deleted: DeleteResult | None = None,
        **options: Unpack[ProveOptions],
    ) -> Proof:
        """Removes the bytes of deleted events, searches for what is left, and records the proof.

        Waits for ranges of archives that were planned before the delete. Searches again if all
        that is left may be an append under way. ``deleted`` is the result of a delete of these ids
        and keys, for the proof: what it did not find, but a recovery of the topic would append, is
        then deleted too.

        >>> deleted = home.erase("orders", ids=["order-2"], prove=False)
        >>> home.purge_and_prove("orders", ids=["order-2"], deleted=deleted).is_erased
        True
        """
        from tidelog.erasure.delete import erase_strays
        from tidelog.maintenance.purge import ErasureWatch, purge_and_prove

        check_options("purge_and_prove", options, ProveOptions, ("keys", "why", "deleted"))
        context = self._with_tasks(
            f"erase {topic}", options.get("spark"), options.get("spark_conf")
        )
        wait_ms = duration_ms(options.get("wait") or defaults.ERASE_WAIT)
        watch = options.get("watch") or ErasureWatch()
        wanted = [ids] if isinstance(ids, str) else list(ids)
        found = self.topic(topic)
        given = list(keys)
        if deleted is not None:
            amender = self.amender(topic, self.reason(why, options.get("who")))
            deleted = erase_strays(context, amender, deleted, wanted, given)
        proof = purge_and_prove(context, found, wanted, given, wait_ms, watch)
        proof.deleted = deleted
        self.record_proof(proof, why=why, who=options.get("who"))
        return proof

    def delete(
        self,
        topic: str,
        ids: str | Iterable[str] | None = None,
        *,
        key: bytes | None = None,
        why: str = "",
        who: str | None = None,
    ) -> DeleteResult:
        """Hides all events that have one of these ids, or a key, from readers; bytes go later.

        Give ids, or ``key``, as to :meth:`delete_key`. No reader that starts after this returned
        sees the events. Maintenance removes their bytes from the topic and from files of archives;
        ``erase`` does so at once, and proves it. For a single id, raises ``NotFoundError`` if there
        is no such event. For several, the result lists the ids without an event.

        >>> home.delete("orders", ["order-2", "order-3"], why="entered twice").events
        2
        """
        if (ids is None) == (key is None):
            raise _ids_or_key("delete")
        if key is not None:
            return self.delete_key(topic, key, why=why, who=who)
        wanted = [ids] if isinstance(ids, str) else list(ids or ())
        for each in wanted:
            check_id(each)
        if not wanted:
            return _nothing_deleted(self.topic(topic))
        done = self.erase(topic, ids=wanted, why=why, who=who, prove=False)
        if isinstance(ids, str) and done.missing:
            raise unknown_id(topic, ids, "nothing was deleted")
        return done

    def delete_key(
        self,
        topic: str,
        key: bytes,
        *,
        why: str = "",
        who: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> DeleteResult:
        """Deletes all events that have this key, up to the current ends, as ``delete`` does.

        Reads the keys of the whole topic, and calls ``progress`` with the bytes read so far.

        >>> home.delete_key("orders", b"customer-1").events
        2
        """
        if not isinstance(key, bytes):
            raise InvalidError(f"key: is {type(key).__name__}: give bytes")
        how = EraseOptions(who=who, progress=progress or _ignore)
        return self.erase(topic, key=key, why=why, prove=False, **how)

    def purge(
        self,
        topic: str,
        grace: str | int = "0s",
        *,
        wait: str | int = defaults.ERASE_WAIT,
        watch: ErasureWatch | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Erasure:
        """Removes the bytes of all deleted events of a topic and returns what was done.

        Compiles the topic, rewrites files of its archives, and sweeps. Objects younger than
        ``grace`` stay for readers that are under way. Waits for ranges of archives that may still
        write such an event; ``watch`` follows that. With ``spark``, a Spark master, tasks there
        make journals and rewrite files.

        >>> _ = home.delete("orders", "order-2")
        >>> home.purge("orders").compiled.journals
        1
        """
        from tidelog.maintenance.purge import ErasureWatch, purge

        context = self._with_tasks(f"erase {topic}", spark, spark_conf)
        waits = (duration_ms(grace), duration_ms(wait))
        return purge(context, self.topic(topic), waits, watch or ErasureWatch())

    def prove_erased(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        progress: Callable[[int], None] | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Proof:
        """Searches all objects that could hold erased events and returns what is left of them.

        ``progress`` gets the bytes of each object. With ``spark``, a Spark master, tasks there
        search the topic's objects and the files of archives. Changes nothing.

        >>> home.prove_erased("orders", ids=["order-1"]).is_erased
        False
        """
        from tidelog.erasure.proof_search import prove_erased

        wanted = [ids] if isinstance(ids, str) else list(ids)
        found = self.topic(topic)
        context = self._with_tasks(f"prove {topic}", spark, spark_conf)
        return prove_erased(context, found, wanted, list(keys), progress or _ignore)

    def record_proof(self, proof: Proof, *, why: str = "", who: str | None = None) -> None:
        """Writes the hash of a proof to the audit of its topic or archive, as ``erase`` does.

        A file of the proof can then be checked against the home: :meth:`has_proof`.

        >>> proof = home.prove_erased("orders", ids=["order-1"])
        >>> home.record_proof(proof, why="yearly check")
        >>> [record.proof.verdict for record in home.audit("orders")]
        ['not erased']
        """
        from tidelog.erasure.proof import record_proof

        record_proof(self.context, self._proved(proof), proof, self.reason(why, who))

    def has_proof(self, proof: Proof) -> bool:
        """Returns whether the audit of this home has the hash of a proof, such as a loaded one.

        >>> home.has_proof(home.erase("orders", ids=["order-2"]))
        True
        """
        from tidelog.erasure.proof import is_recorded

        return is_recorded(self.context, self._proved(proof), proof)

    def _proved(self, proof: Proof) -> Owner:
        """Returns the topic or archive that a proof is about."""
        if proof.archive:
            return read_archive(self.context, proof.archive)
        return self.topic(proof.topic)

    def maintain(
        self,
        budget_s: float = 300.0,
        *,
        grace: str | int | None = defaults.SWEEP_GRACE,
        policy: CompilePolicy | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Turn | None:
        """Does one turn of what a home needs: compile, erase from archives, sweep.

        Returns what was done, or None while another process does it. After ``budget_s`` the next
        turn goes on where this one ended. Sweeps leave what is younger than ``grace``; with None
        there is no sweep. With ``spark``, a Spark master, tasks there make journals and rewrite
        files. Call it from cron or a function; ``tidelog up`` calls it for you.

        >>> turn = home.maintain(budget_s=60)
        >>> turn.succeeded
        True
        """
        how = ScribeOptions(
            policy=policy or CompilePolicy(),
            budget_ms=round(budget_s * 1000),
            grace_ms=None if grace is None else duration_ms(grace),
            sweep_every_ms=0,
        )
        tasks = None if spark is None else self.spark_tasks(spark, spark_conf)
        return self.scribe(how, tasks=tasks).once()

    def follow(
        self,
        stop: threading.Event,
        *,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        report: Callable[[SupervisedPart], None] | None = None,
    ) -> None:
        """Drives all archives and pumps of the home until ``stop`` is set.

        One that fails is tried again and does not stop the others. What is created meanwhile is
        found within seconds. All share one Spark session where ``spark`` is a master; it starts
        when there is something to do, and is replaced if it dies. ``report`` gets the state of
        each, from any thread.

        >>> import threading
        >>> stop = threading.Event()
        >>> stop.set()
        >>> home.follow(stop)
        """
        from tidelog.api.spark_workers import open_late
        from tidelog.maintenance.follower import Follower

        workers = open_late("follow", spark, spark_conf)
        Follower(self.context, workers, report or _ignore, stop).run()

    def trim(
        self,
        topic: str,
        to: TrimTo | str | None = None,
        *,
        before: str | int | datetime | None = None,
        past_readers: Past = False,
        **options: Unpack[TrimOptions],
    ) -> list[TrimResult]:
        """Deletes the oldest events of a topic and returns what each partition lost.

        ``before`` is a time: text such as ``-30d`` or ``2026-11-01``, milliseconds, or an aware
        ``datetime``. Instead, ``to`` is one of :class:`BeforeTime`, :class:`ToOffsets` and
        :class:`KeepBytes`, or a time as text. Raises ``InvalidError`` if a consumer, an archive, a
        pump or a playback has not read the events, unless ``past_readers`` accepts that they are
        lost to it: True for all, or names such as ``billing`` or ``consumer:billing``. With
        ``dry_run`` it changes nothing and returns what it would delete. With ``incarnation``, that
        of ``home.topic(topic)``, it refuses a topic that was created again since. The audit records
        a trim that deletes something, with ``who``.

        >>> [done.new_start for done in home.trim("orders", before="2026-01-01")]
        [0]
        >>> [done.new_start for done in home.trim("orders", tidelog.ToOffsets({0: 2}))]
        [2]
        """
        check_options("trim", options, TrimOptions, others=_TRIM_TO)
        wanted = to if before is None else before
        if wanted is None or None not in (to, before):
            raise InvalidError("trim: give one of `to` and `before`")
        found = self.topic(topic)
        check_shown(f"topic `{topic}`", options.get("incarnation", ""), found.incarnation)
        if isinstance(wanted, str):
            wanted = before_time(self.context, found, wanted)
        elif not isinstance(wanted, TrimTo):
            wanted = BeforeTime(check_timestamp(wanted))

        if options.get("dry_run"):
            plan = plan_trim(self.context, found, wanted)
            starts = {each.partition: each.new_start for each in plan}
            check_readers(self.context, found, past_readers, starts)
            return explain_kept(self.context, found, wanted, plan)

        def check(starts: Mapping[int, int]) -> None:
            check_readers(self.context, found, past_readers, starts)
            heads = read_heads(self.context, found)
            moved = {each: start for each, start in starts.items() if start > heads[each].start}
            if moved:
                note = ", ".join(f"{each} to {start}" for each, start in sorted(moved.items()))
                who = options.get("who", "")
                record_action(self.context, "topic trim", f"topic {topic}", note, who)

        with freeing(self.catalog):
            done = trim_topic(self.context, found, wanted, check)
            return explain_kept(self.context, found, wanted, done)

    def sweep(
        self, grace: str | int = defaults.SWEEP_GRACE, *, accept_loss: Iterable[str] = ()
    ) -> SweepReport:
        """Deletes objects that nothing refers to and that are older than ``grace``.

        Covers topics, archives and pipelines. An error of an archive is raised when the rest is
        done. Where a topic's objects show that the catalog has lost commits, nothing of it is
        deleted, unless the topic is in ``accept_loss``. Raises ``NotFoundError`` for an unknown
        topic there.

        >>> home.sweep("0s").refused
        ()
        """
        from tidelog.maintenance import turn

        self._check_open()
        with freeing(self.catalog):
            return turn.sweep_everything(self.context, duration_ms(grace), frozenset(accept_loss))

    def verify(
        self,
        topic: str,
        progress: Callable[[int], None] | None = None,
        *,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> VerifyReport:
        """Reads every event of a topic, past the cache, and returns what is damaged or lost.

        ``progress`` gets the bytes of each step. With ``spark``, a Spark master, tasks there read
        the objects. Changes nothing.

        >>> report = home.verify("orders")
        >>> report.events, report.errors
        (3, 0)
        """
        store = self.store.inner if isinstance(self.store, CachedStore) else self.store
        context = replace(self._with_tasks(f"verify {topic}", spark, spark_conf), store=store)
        return verify_topic(context, self.topic(topic), self._pool, progress)

    def inspect(self) -> list[str]:
        """Returns what is wrong with the catalog as a whole, beside what :meth:`verify` finds.

        >>> home.inspect()
        []
        """
        self._check_open()
        return list(inspect_home(self.context))


def _ids_or_key(call: str) -> InvalidError:
    return InvalidError(f"{call}: give ids or a key")


def _ignore(_: object) -> None:
    """A report that has no reader."""


def _nothing_deleted(topic: Topic) -> DeleteResult:
    """Returns the result of a delete of no ids from a topic that exists."""
    from tidelog.erasure.delete import DeleteResult

    return DeleteResult()
