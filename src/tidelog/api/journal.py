"""The part of ``Home`` that works with events by id: lookup, update, delete, compile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypedDict, Unpack

from tidelog.api.base import HomeBase
from tidelog.concurrency import TaskRunner
from tidelog.context import Context
from tidelog.coordination.audit import (
    Action,
    AuditRecord,
    read_actions,
    read_audit,
    record_action,
)
from tidelog.errors import InvalidError, NotFoundError
from tidelog.journal.amend import Amender, AmendResult
from tidelog.journal.compile import CompileReport, compile_topic, waiting_bytes
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.compile_tasks import compile_by_tasks
from tidelog.journal.listing import JournalEntry, amendments_waiting, list_journals
from tidelog.journal.lookup import Lookups
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.journal.scribe import Scribe, ScribeOptions, Turn
from tidelog.log.maintenance.incarnations import LostTopic
from tidelog.log.topics import list_topics
from tidelog.model import defaults
from tidelog.model.event import Event
from tidelog.model.limits import PRESIGN_SECONDS_MAX
from tidelog.model.playback import Time, whole_range
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic
from tidelog.settings import check_options

__all__ = ["CompileOptions", "JournalCalls", "presign_s"]


class CompileOptions(TypedDict, total=False):
    """How topics are compiled."""

    go_on: Callable[[], bool]  # asked between two swaps; False ends it
    on_swap: Callable[[CompileReport], None]  # gets what each swap did


class JournalCalls(HomeBase):
    """Lookup, update, delete, and their audit."""

    def get(self, topic: str, id: str) -> Event:
        """Returns the newest event that has this id. Raises ``NotFoundError``.

        >>> home.get("orders", "order-2").offset
        1
        """
        return self._lookups.of(self.topic(topic)).get(id)

    def event_exists(self, topic: str, id: str) -> bool:
        """Returns whether the topic has an event with exactly this id, which was not deleted.

        >>> home.event_exists("orders", "order-2"), home.event_exists("orders", "order")
        (True, False)
        """
        try:
            self._lookups.of(self.topic(topic)).get(id)
        except NotFoundError:
            self.topic(topic)  # a topic that is not there is an error
            return False
        return True

    def update(
        self,
        topic: str,
        id: str,
        value: bytes | None,
        *,
        archives: bool = False,
        why: str = "",
        who: str | None = None,
    ) -> None:
        """Replaces the value of every event that has the id. Raises ``NotFoundError``.

        All other fields stay. Every reader that starts after this returned sees the new value.
        With ``archives``, files of the topic's archives get it too (:meth:`update_archives`).

        >>> home.update("orders", "order-2", b"corrected", why="wrong price")
        >>> home.get("orders", "order-2").value
        b'corrected'
        """
        amended = self._amender(topic, why, who).update({id: value})
        if amended.missing:
            raise NotFoundError(
                f"topic `{topic}`: has no event with id `{id[:200]}`: nothing was updated; it may "
                "have been deleted or trimmed: check the id",
                topic=topic,
            )
        if archives:
            self.update_archives(topic, [id])

    def update_many(
        self,
        topic: str,
        values: Mapping[str, bytes | None],
        *,
        why: str = "",
        who: str | None = None,
    ) -> AmendResult:
        """Replaces the values of many events, by id; the result lists ids without an event.

        >>> home.update_many("orders", {"order-2": b"corrected", "order-9": b"new"}).missing
        ('order-9',)
        """
        return self._amender(topic, why, who).update(values)

    def audit(
        self,
        topic: str,
        since: Time = None,
        event_id: str | None = None,
        *,
        key: bytes | None = None,
    ) -> Iterator[AuditRecord]:
        """Yields who amended what, when and why, oldest first.

        With an id, only its records; with a key, only deletes and proofs by this key. Records
        contain hashes of ids and keys, so that they do not keep what was erased.

        >>> home.update("orders", "order-2", b"corrected", why="wrong price")
        >>> [(record.op, record.why) for record in home.audit("orders")]
        [('update', 'wrong price')]
        """
        times = whole_range(since, None, self.context.clock.now_ms())
        return read_audit(self.context, self.topic(topic), times.start_ms, event_id, key)

    def actions(self, since: Time = None) -> Iterator[Action]:
        """Yields who did what to the home as a whole, oldest first: the home's audit.

        That is what was done to topics, archives, pumps, consumers and tokens, logins, playbacks to
        a sink, and reads over HTTP where the server was started with ``--audit-reads``.

        >>> token, _ = home.tokens.create(["read"], who="ops")
        >>> [(action.op, action.who) for action in home.actions()][-1]
        ('token create', 'ops')
        """
        times = whole_range(since, None, self.context.clock.now_ms())
        return read_actions(self.context, times.start_ms)

    def journals(
        self,
        topic: str,
        start: Time = None,
        end: Time = None,
        *,
        begin: tuple[int, int] = (0, 0),
        presign: str | int | None = None,
    ) -> Iterator[JournalEntry]:
        """Yields the journals and runs with events of ``[start, end)``, for readers without
        Tidelog.

        By default of all times. They come by partition and offset, from the partition and offset
        ``begin`` on. ``presign`` is how long their URLs stay valid, such as ``1h``.

        >>> [entry.events for entry in home.journals("orders")]
        [3]
        >>> list(home.journals("orders", begin=(0, 3)))
        []
        """
        times = whole_range(start, end, self.context.clock.now_ms())
        expires_s = None if presign is None else presign_s(presign)
        return list_journals(self.context, self.topic(topic), times, begin, expires_s)

    def recover_topic(
        self,
        topic: str,
        *,
        dry_run: bool = False,
        incarnation: str | None = None,
        partitions: int | None = None,
        slot: str | int = defaults.TOPIC_SLOT,
        include: Collection[str] = (),
    ) -> RecoverReport:
        """Appends events of objects that the catalog has lost, except those that the topic has.

        Use it after restoring a catalog from an older copy. A second call duplicates nothing. With
        ``dry_run``, it counts what it would do and changes nothing.

        Events of named writers (producers, pumps, playbacks, Spark sinks) wait in their objects
        until the topic has them: let these writers resume first. ``include=["writers"]`` appends
        what they have not sent again. ``include=["trimmed"]`` appends trimmed events that a journal
        of a compile that died still contains.

        With ``incarnation``, first registers a topic of this name for an incarnation that has lost
        its registry row, with ``slot`` and ``partitions``. By default it has as many partitions as
        its objects and rows show.

        >>> home.recover_topic("orders", dry_run=True).appended
        0
        """
        unknown = sorted(set(include) - {"writers", "trimmed"})
        if unknown:
            raise InvalidError(f"recover: include `{unknown[0][:80]}`: give writers or trimmed")
        also = {"writers_resumed": "writers" in include, "include_trimmed": "trimmed" in include}
        if incarnation is None and partitions is not None:
            raise InvalidError("recover: partitions go with an incarnation: give both or neither")
        if incarnation is not None:
            lost = LostTopic(self.context, topic, incarnation)
            if not lost.is_registered and dry_run:
                context, there = lost.as_if(partitions, duration_ms(slot))
                return recover_topic(
                    context, Lookups(context, self._pool).of(there), dry_run=True, **also
                )
            if not dry_run:
                lost.register(partitions, duration_ms(slot))
        found = self.topic(topic)
        if not dry_run:
            record_action(self.context, "topic recover", f"topic {topic}", who=self._who)
        return recover_topic(self.context, self._lookups.of(found), dry_run=dry_run, **also)

    def compile(
        self,
        topic: str,
        policy: CompilePolicy | None = None,
        *,
        go_on: Callable[[], bool] = lambda: True,
        on_swap: Callable[[CompileReport], None] = lambda _: None,
    ) -> CompileReport:
        """Compiles a topic's runs into journals, with amendments applied; by default all of them.

        Calls ``go_on`` between two swaps to ask whether to continue, and ``on_swap`` after each.

        >>> home.compile("orders").events
        3
        """
        wanted = policy or CompilePolicy.everything()
        return compile_topic(self.context, self.topic(topic), wanted, self._pool, go_on, on_swap)

    def compile_all(
        self,
        topics: Iterable[str] | None = None,
        policy: CompilePolicy | None = None,
        *,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        **options: Unpack[CompileOptions],
    ) -> CompileReport:
        """Compiles topics, by default all that are ready, and returns what was done.

        Runs become fewer, larger objects, with updates and deletes applied; ``policy`` says when
        that is worth it, and is always by default. With ``spark``, a Spark master, tasks run there.
        ``busy`` in the result counts partitions that another process compiles.

        >>> home.compile_all().journals
        1
        """
        check_options("compile", options, CompileOptions, self.compile_all)
        wanted = policy or CompilePolicy.everything()
        found = self._compiled_topics(topics)
        go_on, on_swap = options.get("go_on", lambda: True), options.get("on_swap", lambda _: None)
        context = self._with_tasks("compile", spark, spark_conf)
        if context.tasks is not None:
            return compile_by_tasks(context, context.tasks, found, wanted, go_on, on_swap)
        report = CompileReport()
        for topic in found:
            try:
                report += compile_topic(self.context, topic, wanted, self._pool, go_on, on_swap)
            except NotFoundError:
                if len(found) == 1:
                    raise
                continue  # deleted meanwhile
        return report

    def compile_bytes(
        self, topics: Iterable[str] | None = None, policy: CompilePolicy | None = None
    ) -> int:
        """Returns how many bytes of these topics a compile by this policy would read.

        >>> home.compile_bytes(["orders"]) > 0
        True
        """
        wanted = policy or CompilePolicy.everything()
        found = self._compiled_topics(topics)
        return sum(waiting_bytes(self.context, each, wanted) for each in found)

    def amendments_waiting(self, topics: Iterable[str] | None = None) -> int:
        """Returns how many updates and deletes of these topics are not compiled in yet.

        >>> home.update("orders", "order-1", b"{}")
        >>> home.amendments_waiting(["orders"])
        1
        """
        return sum(amendments_waiting(self.context, each) for each in self._compiled_topics(topics))

    def _compiled_topics(self, topics: Iterable[str] | None) -> list[Topic]:
        if topics is None:
            return [each for each in list_topics(self.context) if each.state == "ready"]
        return [self.topic(each) for each in topics]

    def scribe(
        self,
        how: ScribeOptions | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tasks: TaskRunner | None = None,
    ) -> Scribe:
        """Returns a scribe. Only one works at a time for a home.

        It compiles all topics, applies deletes to archives, and sweeps the whole home. ``tasks``,
        such as :meth:`Home.spark_tasks`, make journals and rewrite files.

        >>> home.scribe().tick().finished
        True
        """
        wanted = how or ScribeOptions()
        context = self.context if tasks is None else replace(self.context, tasks=tasks)
        after = self._after_turns(context, wanted)
        return Scribe(context, wanted, self._pool, stopped, after)

    def scribe_once(self, how: ScribeOptions | None = None) -> Turn | None:
        """Runs one turn of the scribe, for cron or a function; None if another one is working.

        >>> home.scribe_once().finished
        True
        """
        return self.scribe(how).once()

    def _after_turns(self, context: Context, how: ScribeOptions) -> Callable[[Turn], Turn]:
        """Returns what a scribe does after each turn over topics."""
        from tidelog.maintenance import turn  # noqa: PLC0415 - archives load slowly

        return turn.ArchiveTurns(context, how)

    def _amender(self, topic: str, why: str, who: str | None) -> Amender:
        return self.amender(topic, self.reason(why, who))


def presign_s(text: str | int) -> int:
    """Returns how many seconds a URL stays valid. Raises ``InvalidError``."""
    seconds = duration_ms(text) // 1000
    if not 1 <= seconds <= PRESIGN_SECONDS_MAX:
        raise InvalidError(
            f"presign `{text}`: give 1s to {PRESIGN_SECONDS_MAX // 86_400}d: no store signs longer"
        )
    return seconds
