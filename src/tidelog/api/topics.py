# ruff: noqa: PLC0415 - archives and pipelines take longer to import than the rest
"""Topics as Python code uses them: create, find, change and delete them; notifications on request.

Notifications of new events go to a topic's targets by themselves: :class:`~tidelog.Home` sends them
after each commit. Creating, changing and deleting a topic leaves a record in the home's audit.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import AbstractContextManager

from tidelog.catalog.disk_reserve import freeing
from tidelog.context import Context
from tidelog.coordination.audit import record_action
from tidelog.errors import InvalidError
from tidelog.log.notifier import Notifier, notify_again
from tidelog.log.notify_targets import check_target, open_target
from tidelog.log.status import PartitionState, Past, check_all_read, partition_states
from tidelog.log.topics import (
    change_topic,
    create_topic,
    delete_topic,
    find_target,
    find_topic,
    list_topics,
)
from tidelog.model import defaults
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic, partition_for

__all__ = ["TopicCalls"]


class TopicCalls(ABC):
    """Topics, and notifications of their events on request."""

    id: str
    context: Context
    _notifier: Notifier
    _pool: Executor

    @abstractmethod
    def _check_open(self) -> None:
        """Raises ``InvalidError`` once the home is closed."""

    @abstractmethod
    def _closing_producer(self, topic: str) -> AbstractContextManager[None]:
        """Closes the producer of a topic once that is deleted; if it is refused, appends go on."""

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        slot: str | int = defaults.TOPIC_SLOT,
        notify: Iterable[str] = (),
        max_latency_ms: int = defaults.NOTIFY_LATENCY_MS,
        who: str = "",
    ) -> Topic:
        """Creates a topic and returns it; its partitions are fixed for good.

        ``slot`` is how finely the index by time is divided. New events are announced to the URLs in
        ``notify``, at most once in ``max_latency_ms`` for a partition. ``who`` is for the audit.
        Raises ``AlreadyExistsError``.

        >>> home.create_topic("clicks", partitions=4).partitions
        4
        """
        self._check_open()
        targets = tuple(notify)
        for url in targets:
            check_target(url)
        wanted = Topic(
            name=name,
            incarnation=self.context.ids.new(),
            partitions=partitions,
            created_ms=self.context.clock.now_ms(),
            slot_ms=duration_ms(slot),
            notify=targets,
            home=self.id,
            max_latency_ms=max_latency_ms,
        )
        return create_topic(self.context, wanted, self._record_once("create", name, who))

    def topic(self, name: str) -> Topic:
        """Returns the topic of this name. Raises ``NotFoundError``.

        >>> home.topic("orders").partitions
        1
        """
        self._check_open()
        return find_topic(self.context, name)

    def topics(self) -> list[Topic]:
        """Returns all topics, by name.

        >>> [topic.name for topic in home.topics()]
        ['orders']
        """
        self._check_open()
        return list(list_topics(self.context))

    def change_topic(
        self,
        name: str,
        *,
        notify: Iterable[str] | None = None,
        max_latency_ms: int | None = None,
        who: str = "",
    ) -> Topic:
        """Changes where the notifications of a topic go, or how often they come; returns the topic.

        ``notify`` are all URLs that it has from now on, none if empty. What is not given stays. A
        process that continues to append notices within ten seconds. A copied home notifies what it
        is given here, never the targets of its original. ``who`` is for the audit. Raises
        ``NotFoundError``.

        >>> home.change_topic("orders", notify=["https://example.com/woken"]).notify
        ('https://example.com/woken',)
        """
        self.topic(name)  # raises unless the home is open
        targets = None if notify is None else tuple(notify)
        for url in targets or ():
            check_target(url)
        self._record_once("change", name, who)()
        return change_topic(self.context, name, notify=targets, max_latency_ms=max_latency_ms)

    def delete_topic(
        self, name: str, *, past_readers: Past = False, incarnation: str = "", who: str = ""
    ) -> None:
        """Deletes a topic with all its events and consumers. Raises ``NotFoundError``.

        Raises ``InvalidError`` if a consumer, an archive, a pump or a playback has not read all of
        its events, unless ``past_readers`` accepts that they are lost to it: True for all, or names
        such as ``billing`` or ``consumer:billing``. What was deleted from the topic is erased from
        its archives first; ``UnavailableError`` while a range is under way there that may hold such
        an event: run the archive, then delete the topic again. With an ``incarnation`` it deletes
        no other topic that has the name now. ``who`` is for the home's audit, which stays.

        >>> home.delete_topic("orders")
        >>> home.topics()
        []
        """
        from tidelog.maintenance import turn

        self._check_open()
        record = self._record_once("delete", name, who)

        def check(topic: Topic) -> None:
            check_all_read(self.context, topic, past_readers)
            turn.finish_deletes(self.context, topic)
            record()

        def closed(topic: Topic) -> None:
            turn.finish_closed_deletes(self.context, topic)

        with self._closing_producer(name), freeing(self.context.catalog):
            delete_topic(self.context, name, check, closed, incarnation)

    def partitions(self, topic: str, *, runs: bool = True) -> list[PartitionState]:
        """Returns what each partition holds; without ``runs`` only where it starts and ends.

        >>> [(each.start, each.next, each.events) for each in home.partitions("orders")]
        [(0, 3, 3)]
        """
        return partition_states(self.context, self.topic(topic), self._pool, runs)

    def partition_for(self, topic: str, key: bytes) -> int:
        """Returns the partition that a key's events go to: ``int(sha256(key)) mod N``.

        >>> home.partition_for("orders", b"customer-7")
        0
        """
        return partition_for(key, self.topic(topic).partitions)

    def watch(self, topic: str) -> None:
        """Lets this process notify a topic's targets of what it commits there by other ways.

        >>> home.watch("orders")
        """
        self._notifier.watch(find_target(self.context, topic))

    def notify(self, topic: str, partition: int) -> int | None:
        """Notifies a topic's targets of a partition's newest event, even if they know it.

        For a function that stops before the end and wants to be called again. Returns the offset,
        None for an empty partition. Raises ``InvalidError`` if there are no targets, or if one
        refuses, and ``UnavailableError`` if one cannot be reached.

        >>> home.create_topic("calls", notify=["https://example.com/woken"]).partitions
        1
        >>> home.notify("calls", 0) is None
        True
        """
        found = self.topic(topic)
        found.check_partition(partition)
        if not found.notify or not self.context.identity.owns(found.home):
            raise InvalidError(
                f"topic `{topic}`: this home notifies no targets of it: give some with `tidelog "
                f"topic change {topic} --notify URL`"
            )
        targets = [open_target(url, self.context.environ) for url in found.notify]
        sent = notify_again(self.context, found, partition, targets)
        return sent.offset if sent else None

    def _record_once(self, op: str, name: str, who: str) -> Callable[[], None]:
        """Returns what puts an action into the audit, once however often it is called.

        A write to the registry that conflicts is decided again.
        """
        return functools.cache(
            lambda: record_action(self.context, f"topic {op}", f"topic {name}", who=who)
        )
