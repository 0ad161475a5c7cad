# ruff: noqa: PLC0415 - archives and Spark take longer to import than the rest
"""What a home does as a whole: maintain itself, drive what it has, trim, sweep and verify.

Archives and pipelines are imported when they are needed: that takes longer than all the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TypedDict, Unpack

from tidelog.api.base import HomeBase
from tidelog.catalog.base import freeing
from tidelog.coordination.audit import record_action
from tidelog.coordination.jobs import Jobs, SupervisedPart
from tidelog.coordination.registry import check_shown
from tidelog.errors import InvalidError
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.scribe import ScribeOptions, Turn
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
from tidelog.settings import check_options
from tidelog.store.wrappers import CachedStore

__all__ = ["MaintenanceCalls", "TrimOptions"]


class TrimOptions(TypedDict, total=False):
    """How a topic is trimmed."""

    dry_run: bool  # change nothing, and return what would be deleted
    incarnation: str  # trim this topic only, and no other that has the name now
    who: str  # for the audit


# What else an unknown option of a trim may have been meant for.
_TRIM_TO = "`before` (a time), `to` (tidelog.ToOffsets({0: 50}) or tidelog.KeepBytes), past_readers"


class MaintenanceCalls(HomeBase):
    """One turn of maintenance, the drivers of all pipelines, trims, sweeps and checks."""

    @property
    def jobs(self) -> Jobs:
        """The jobs that people started in consoles of this home.

        >>> home.jobs.list()
        []
        """
        self._check_open()
        return Jobs(self.context)

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


def _ignore(_: object) -> None:
    """A report that has no reader."""
