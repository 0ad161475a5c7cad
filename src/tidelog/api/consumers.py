"""Consumers as Python code uses them: ``home.consumers(topic)``, and a handle for each consumer.

**Runs.** A run reads as a member of a consumer until everything is read, batch by batch. A batch is
committed after it was handled, so after a crash the last events may come again, and none is
missing. A run ends when no partition has events left. Partitions whose member died are waited for
until their leases expire; partitions that a living member holds are left to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from tidelog.context import Context
from tidelog.coordination.audit import record_action
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.delete import check_delete, consumer_version, delete_consumer
from tidelog.log.consumer.leases import Start
from tidelog.log.consumer.seek import (
    CursorMove,
    check_consumer,
    consumer_not_found,
    move_cursor,
    plan_move,
    seek_cursor,
)
from tidelog.log.status import Lag, Members, MemberState, consumer_lag, consumer_names
from tidelog.model.address import nearest
from tidelog.model.event import Event, check_timestamp, to_iso
from tidelog.model.topic import Topic

__all__ = [
    "ConsumerHandle",
    "Consumers",
    "DrainOptions",
    "LostOffsets",
    "accept_loss",
]


_WAIT_S = 0.5  # how soon a stop is seen while there are no events


@dataclass(frozen=True, slots=True)
class LostOffsets:
    """Events of a partition that were trimmed before the consumer read them."""

    partition: int
    cursor: int
    start: int  # the first offset that is left


@dataclass
class DrainOptions:
    """How a consumer is read."""

    follow: bool = False  # wait for more events until ``stop`` is set
    max_events: int | None = None  # end after this many; None: no limit
    max_batch: int = 1_000  # events between two commits
    accept_loss: bool = False  # skip events that were trimmed before they were read
    stop: threading.Event = field(default_factory=threading.Event)
    on_open: Callable[[Consumer], None] = lambda _: None  # called before the first poll
    on_loss: Callable[[LostOffsets], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.max_batch < 1 or (self.max_events is not None and self.max_events < 1):
            raise InvalidError("consume: max_batch and max_events: give 1 or more")


def drain(
    open_member: Callable[[], Consumer],
    handle: Callable[[list[Event]], object],
    how: DrainOptions,
) -> int:
    """Calls ``handle`` with each batch and commits it; returns how many events were handled.

    Raises ``NotFoundError`` for events that were trimmed before they were read, unless
    ``accept_loss``. An error of ``handle`` is raised, and its batch comes again.
    """
    run = _Drain(handle, how)
    lost: NotFoundError | None = None
    while True:
        # After a loss a new member joins: it begins at its cursors in all partitions.
        with open_member() as consumer:
            if lost is None:
                how.on_open(consumer)
            try:
                if lost is not None and (skipped := accept_loss(consumer, lost)):
                    how.on_loss(skipped)
                run.drain(consumer)
                return run.events
            except NotFoundError as exc:
                if not how.accept_loss or "cursor" not in exc.context:
                    raise
                lost = exc


def accept_loss(consumer: Consumer, lost: NotFoundError) -> LostOffsets | None:
    """Moves a cursor to the first event that is left; returns what is lost.

    Returns None if another member has accepted the loss and read on: its cursor stays. Also if
    another member has the partition now, or more was trimmed since: the next read says so.
    """
    found = LostOffsets(*(lost.context[name] for name in ("partition", "cursor", "start")))
    if (consumer.lag()[found.partition].cursor or 0) >= found.start:
        return None
    try:
        consumer.seek(found.partition, found.start)
        consumer.commit()
    except (InvalidError, FencedError):
        return None
    return found


class _Drain:
    """Counts what was handled, over all members that one call opens."""

    def __init__(self, handle: Callable[[list[Event]], object], how: DrainOptions) -> None:
        self._handle = handle
        self._how = how
        self.events = 0

    def drain(self, consumer: Consumer) -> None:
        """Polls, handles and commits until everything is read."""
        clock = consumer.context.clock
        patience_s = consumer.context.log_settings.dead_after_s
        joined_s = clock.monotonic_s()
        wait_s = _WAIT_S if self._how.follow else 0.0
        is_last_look = False  # one more after all patience, as this process may have stalled
        while not self._how.stop.is_set() and self.events != self._how.max_events:
            events = consumer.poll(self._room(), wait_s)
            if events:
                self._handle(events)
                # A partition that another member has now is read again by that one.
                with contextlib.suppress(FencedError):
                    consumer.commit()
                self.events += len(events)
                is_last_look = False
            elif not self._how.follow:
                behind = {each.partition for each in consumer.lag() if each.events}
                if not behind or (is_last_look and behind.isdisjoint(consumer.partitions())):
                    return
                is_last_look = clock.monotonic_s() - joined_s > patience_s
                wait_s = _WAIT_S

    def _room(self) -> int:
        if self._how.max_events is None:
            return self._how.max_batch
        return min(self._how.max_batch, self._how.max_events - self.events)


EventList = list[Event]  # ``list`` is a method below


class Consumers:
    """The consumers of a topic: ``home.consumers(topic)``. Iterates over their handles."""

    def __init__(
        self, context: Context, topic: Topic, open_member: Callable[[str, str, Start], Consumer]
    ) -> None:
        self.topic = topic
        self._context = context
        self._open_member = open_member

    def __iter__(self) -> Iterator[ConsumerHandle]:
        for name in consumer_names(self._context, self.topic):
            yield ConsumerHandle(self._context, self.topic, name)

    def get(self, name: str, *, deleting: bool = False) -> ConsumerHandle:
        """Returns the handle of a consumer. Raises ``NotFoundError``.

        With ``deleting`` also of one whose delete did not finish, to delete it again.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        ...     consumer.commit()
        >>> home.consumers("orders").get("billing").behind()
        0
        """
        if not deleting:
            try:
                check_consumer(self._context, self.topic, name)
            except NotFoundError as exc:
                like = nearest(name, consumer_names(self._context, self.topic))
                raise consumer_not_found(self.topic, name, like) from exc
            return ConsumerHandle(self._context, self.topic, name)
        names = consumer_names(self._context, self.topic)
        if name not in names:
            raise consumer_not_found(self.topic, name, nearest(name, names))
        return ConsumerHandle(self._context, self.topic, name)

    def drain(
        self,
        name: str,
        handle: Callable[[EventList], object],
        start: Start = "earliest",
        how: DrainOptions | None = None,
    ) -> int:
        """Reads everything as a member of a consumer; returns how many events were handled.

        Calls ``handle`` with each batch, and commits the batch after that. ``start`` is for a new
        consumer; one that has read before continues at its cursor. ``how`` can follow, limit the
        events, and accept that events were trimmed. Members that run at the same time share the
        partitions.

        >>> home.consumers("orders").drain("billing", lambda events: None)
        3
        """
        return drain(
            lambda: self._open_member(self.topic.name, name, start), handle, how or DrainOptions()
        )

    def list(self) -> list[ConsumerHandle]:
        """Returns the handles of all consumers, by name.

        >>> home.consumers("orders").list()
        []
        """
        return list(self)


class ConsumerHandle:
    """One consumer, seen from outside: how far it is, its cursors, its end."""

    def __init__(self, context: Context, topic: Topic, name: str) -> None:
        self.topic = topic
        self.name = name
        self._context = context
        self._shown = ""  # the fence that was read, to notice a later consumer of this name

    def __repr__(self) -> str:
        return f"ConsumerHandle({self.topic.name!r}, {self.name!r})"

    def lag(self) -> list[Lag]:
        """Returns how far the consumer is behind, partition by partition.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> [lag.events for lag in home.consumers("orders").get("billing").lag()]
        [3]
        """
        self._shown = self._shown or consumer_version(self._context, self.topic, self.name)
        return consumer_lag(self._context, self.topic, self.name)

    def behind(self) -> int:
        """Returns how many events the consumer has not handled, in all partitions.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").behind()
        3
        """
        return sum(each.events for each in self.lag())

    def members(self) -> list[MemberState]:
        """Returns the members that share the partitions, with their hosts and processes.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        ...     len(home.consumers("orders").get("billing").members())
        1
        """
        return Members().list(self._context, self.topic, self.name)

    def plan_seek(self, to: str | int | datetime, partition: int) -> CursorMove:
        """Returns where :meth:`seek` would move one cursor, and what that skips or repeats.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").plan_seek("latest", 0).skipped
        3
        """
        return plan_move(self._context, self.topic, self.name, partition, _place(to))

    def move(self, partition: int, to: int, version: str, *, who: str = "") -> bool:
        """Moves a cursor as a plan says; False if the consumer committed since the plan.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> billing = home.consumers("orders").get("billing")
        >>> plan = billing.plan_seek(2, 0)
        >>> billing.move(plan.partition, plan.to, plan.version)
        True
        """
        what = f"consumer {self.name} of {self.topic.name}/{partition}"
        record_action(self._context, "cursor move", what, f"to {to}", who)
        return move_cursor(self._context, self.topic, self.name, partition, to, version)

    def seek(
        self, to: str | int | datetime, partition: int | None = None, *, who: str = ""
    ) -> list[CursorMove]:
        """Moves the consumer's cursors and returns where they were and are.

        ``to`` is ``earliest``, ``latest``, an offset, or a time. Without ``partition`` all cursors
        move. Members that run go on from there. ``who`` is for the audit. Raises ``InvalidError``
        for an offset that is not there, and ``UnavailableError`` if its leases keep changing
        meanwhile.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        ...     consumer.commit()
        >>> [move.again for move in home.consumers("orders").get("billing").seek("earliest")]
        [3]
        """
        chosen = range(self.topic.partitions) if partition is None else [partition]
        for each in chosen:
            self.plan_seek(to, each)  # what is refused moves no cursor, and is not recorded
        return [self._seek(to, each, who) for each in chosen]

    def delete(self, *, force: bool = False, dry_run: bool = False, who: str = "") -> None:
        """Deletes the consumer with its cursors, so that trims do not wait for it. Events stay.

        Raises ``NotFoundError``, and ``InvalidError`` while a member is alive, unless ``force``: a
        member that goes on then begins again, as a new consumer does. With ``dry_run`` it only
        checks. ``who`` is for the audit.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").delete()
        >>> home.consumers("orders").list()
        []
        """
        if dry_run:
            check_delete(self._context, self.topic, self.name, force=force, shown=self._shown)
            return
        what = f"consumer {self.name} of {self.topic.name}"
        record_action(self._context, "consumer delete", what, who=who)
        delete_consumer(self._context, self.topic, self.name, force=force, shown=self._shown)

    def _seek(self, to: str | int | datetime, partition: int, who: str) -> CursorMove:
        text = _place(to)
        what = f"consumer {self.name} of {self.topic.name}/{partition}"
        record_action(self._context, "cursor move", what, f"to {text}", who)
        return seek_cursor(self._context, self.topic, self.name, partition, text)


def _place(to: str | int | datetime) -> str:
    """Returns where to seek as a text: ``earliest``, ``latest``, an offset, or a time."""
    if not isinstance(to, str | int | datetime):
        kind = type(to).__name__
        raise InvalidError(f"seek: to is {kind}: give earliest, latest, an offset or a time")
    return to_iso(check_timestamp(to)) if isinstance(to, datetime) else str(to)
