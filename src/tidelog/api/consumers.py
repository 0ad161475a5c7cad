"""Consumers as Python code uses them: ``home.consumers(topic)``, and a handle for each consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from tidelog.catalog.update import RACE
from tidelog.context import Context
from tidelog.coordination.actions import record_action
from tidelog.errors import ConflictError, NotFoundError
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.delete import consumer_version, delete_consumer
from tidelog.log.consumer.drain import DrainOptions, drain
from tidelog.log.consumer.leases import Start
from tidelog.log.consumer.move import CursorMove, check_consumer, move_cursor, plan_move
from tidelog.log.status import Lag, consumer_lag, consumer_names
from tidelog.model.address import nearest
from tidelog.model.event import Event, check_timestamp, to_iso
from tidelog.model.topic import Topic

__all__ = ["ConsumerHandle", "Consumers"]

Batch = list[Event]


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
        """Return the handle of a consumer. Raises ``NotFoundError``.

        With ``deleting`` also of one whose delete did not finish, to delete it again.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        ...     consumer.commit()
        >>> home.consumers("orders").get("billing").behind()
        0
        """
        if not deleting:
            check_consumer(self._context, self.topic, name)
            return ConsumerHandle(self._context, self.topic, name)
        names = consumer_names(self._context, self.topic)
        if name not in names:
            raise NotFoundError(
                f"consumer `{name}` of `{self.topic.name}`: not found{nearest(name, names)}: see "
                f"`tidelog lag {self.topic.name}`"
            )
        return ConsumerHandle(self._context, self.topic, name)

    def drain(
        self,
        name: str,
        handle: Callable[[Batch], object],
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
        """Return the handles of all consumers, by name.

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
        """Return how far the consumer is behind, partition by partition.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> [lag.events for lag in home.consumers("orders").get("billing").lag()]
        [3]
        """
        self._shown = self._shown or consumer_version(self._context, self.topic, self.name)
        return consumer_lag(self._context, self.topic, self.name)

    def behind(self) -> int:
        """Return how many events the consumer has not handled, in all partitions.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").behind()
        3
        """
        return sum(each.events for each in self.lag())

    def plan_seek(self, to: str | int | datetime, partition: int) -> CursorMove:
        """Return where :meth:`seek` would move one cursor, and what that skips or repeats.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").plan_seek("latest", 0).skipped
        3
        """
        check_consumer(self._context, self.topic, self.name)
        text = to_iso(check_timestamp(to)) if isinstance(to, datetime) else str(to)
        return plan_move(self._context, self.topic, self.name, partition, text)

    def move(self, partition: int, to: int, version: str, *, who: str = "") -> bool:
        """Move a cursor as a plan says; False if the consumer committed since the plan.

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

    def seek(self, to: str | int | datetime, partition: int | None = None) -> list[CursorMove]:
        """Move the consumer's cursors and return where they were and are.

        ``to`` is ``earliest``, ``latest``, an offset, or a time. Without ``partition`` all cursors
        move. Members that run go on from there. Raises ``InvalidError`` for an offset that is not
        there, and ``ConflictError`` if the consumer keeps committing meanwhile.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        ...     consumer.commit()
        >>> [move.again for move in home.consumers("orders").get("billing").seek("earliest")]
        [3]
        """
        chosen = range(self.topic.partitions) if partition is None else [partition]
        return [self._seek(to, each) for each in chosen]

    def delete(self, *, force: bool = False) -> None:
        """Delete the consumer with its cursors, so that trims do not wait for it. Events stay.

        Raises ``NotFoundError``, and ``InvalidError`` while a member is alive, unless ``force``: a
        member that goes on then begins again, as a new consumer does.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.consumers("orders").get("billing").delete()
        >>> home.consumers("orders").list()
        []
        """
        what = f"consumer {self.name} of {self.topic.name}"
        record_action(self._context, "consumer delete", what)
        delete_consumer(self._context, self.topic, self.name, force=force, shown=self._shown)

    def _seek(self, to: str | int | datetime, partition: int) -> CursorMove:
        for delay_s in RACE.delays_s(self._context.random):
            plan = self.plan_seek(to, partition)
            if self.move(partition, plan.to, plan.version):
                return plan
            self._context.clock.sleep(delay_s)
        raise ConflictError(
            f"consumer `{self.name}` of `{self.topic.name}/{partition}`: keeps committing: stop "
            "its members, then seek again"
        )
