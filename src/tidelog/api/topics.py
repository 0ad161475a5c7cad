# ruff: noqa: PLC0415 - archives and pipelines take longer to import than the rest
"""Topics as Python code uses them: create, find, change and delete them, and look at their events.

Notifications of new events go to a topic's targets by themselves: :class:`~tidelog.Home` sends them
after each commit. Creating, changing and deleting a topic leaves a record in the home's audit.

:class:`BrowseCalls` looks at topics without a consumer: the newest events, events as they come,
search, and SQL.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

import pyarrow as pa

from tidelog.api.base import HomeBase
from tidelog.catalog.base import freeing
from tidelog.coordination.audit import record_action
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.late_readers import Past, check_all_read
from tidelog.log.notifier import notify_again
from tidelog.log.notify_targets import check_target, open_target
from tidelog.log.partition_reader import OffsetEvents
from tidelog.log.status import PartitionState, partition_ends, partition_states
from tidelog.log.timeline import Histogram, Timelines
from tidelog.log.topics import (
    change_topic,
    create_topic,
    delete_topic,
    find_target,
    list_topics,
)
from tidelog.model import defaults
from tidelog.model.event import Event, check_timestamp, check_whole
from tidelog.model.times import duration_ms, moment_ms
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.pages import SearchQuery, SearchResult, search_partition

__all__ = [
    "BrowseCalls",
    "LookBack",
    "Tail",
    "TopicCalls",
]


class TopicCalls(HomeBase):
    """Topics, and notifications of their events on request."""

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
            partitions=check_whole("topic: partitions", partitions),
            created_ms=self.context.clock.now_ms(),
            slot_ms=duration_ms(slot),
            notify=targets,
            home=self.id,
            max_latency_ms=check_whole("topic: max_latency_ms", max_latency_ms),
        )
        return create_topic(self.context, wanted, self._record_once("create", name, who))

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
        if max_latency_ms is not None:
            max_latency_ms = check_whole("topic: max_latency_ms", max_latency_ms)
        self._record_once("change", name, who)()
        return change_topic(self.context, name, notify=targets, max_latency_ms=max_latency_ms)

    def delete_topic(
        self,
        name: str,
        *,
        past_readers: Past = False,
        incarnation: str = "",
        dry_run: bool = False,
        who: str = "",
    ) -> None:
        """Deletes a topic with all its events and consumers. Raises ``NotFoundError``.

        Raises ``InvalidError`` if a consumer, an archive, a pump or a playback has not read all of
        its events, unless ``past_readers`` accepts that they are lost to it: True for all, or names
        such as ``billing`` or ``consumer:billing``. What was deleted from the topic is erased from
        its archives first; ``UnavailableError`` while a range is under way there that may hold such
        an event: run the archive, then delete the topic again. With an ``incarnation`` it deletes
        no other topic that has the name now. With ``dry_run`` it only checks that all was read.
        ``who`` is for the home's audit, which stays.

        >>> home.delete_topic("orders")
        >>> home.topics()
        []
        """
        from tidelog.maintenance import erase

        self._check_open()
        record = self._record_once("delete", name, who)

        def check(topic: Topic) -> None:
            check_all_read(self.context, topic, past_readers)
            if dry_run:
                return
            erase.finish_deletes(self.context, topic)
            record()

        def closed(topic: Topic) -> None:
            erase.finish_closed_deletes(self.context, topic)

        if dry_run:
            delete_topic(self.context, name, check, shown=incarnation, dry_run=True)
            return
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


_SEARCH_S = 1.0  # that one search may take
_STOP_LOOK_S = 0.2  # between looks at whether a tail is to end
_AT_ONCE = 1_000  # events of a partition before the next partition has its turn


class BrowseCalls(HomeBase):
    """Looks at topics and archives that leave no name behind."""

    def read(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> Iterator[Event]:
        """Yields the events of ``[start, end)`` of a partition, or up to the end that is there now.

        Without a partition, yield the events of all partitions, one partition after another.
        Offsets need a partition if the topic has several. ``playback`` yields events by time.

        >>> [event.id for event in home.read("orders", start=1)]
        ['order-2', 'order-3']
        """
        for part in self._read_parts(topic, partition, start, end):
            yield from part.events()

    def read_arrow(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the same as Arrow batches in event columns.

        >>> sum(batch.num_rows for batch in home.read_arrow("orders"))
        3
        """
        for part in self._read_parts(topic, partition, start, end):
            if part.batch.num_rows:
                yield part.arrow()

    def sql(
        self, query: str, values: Sequence[object] | Mapping[str, object] | None = None
    ) -> pa.RecordBatchReader:
        """Runs a query of topics and archives by name, and returns a reader of its rows.

        DuckDB runs it. ``values`` are for the ``?`` or ``$name`` of the query. A name with other
        characters than letters, digits and ``_`` goes in double quotes; where a topic and an
        archive share it, write ``topic.orders`` or ``archive.orders``. ``as_json(value)`` and
        ``as_text(value)`` are the bytes of an event as JSON and as text, null where they are not.
        Updates and deletes are applied. Filters on time, partition and offset limit what is read.
        Raises ``InvalidError`` for a query that DuckDB refuses.

        >>> query = "select count(*) as events from orders where partition = ?"
        >>> home.sql(query, [0]).read_all().to_pylist()
        [{'events': 3}]
        """
        from tidelog.api.sql import run_query

        self._check_open()
        return run_query(self.context, query, values)

    def peek(self, topic: str, max_events: int = 10) -> list[Event]:
        """Returns the newest events of all partitions, oldest first, by time.

        >>> [event.id for event in home.peek("orders", 2)]
        ['order-2', 'order-3']
        """
        if max_events < 1:
            raise InvalidError(f"peek: {max_events} events: give 1 or more")
        states = self.partitions(topic, runs=False)
        found = [
            event for state in states for event in self._last(topic, state, max_events, state.next)
        ]
        return heapq.nlargest(max_events, found, key=_by_time)[::-1]

    def tail(
        self, topic: str, *, wait_s: float = 1.0, stop: threading.Event | None = None
    ) -> Iterator[Event]:
        """Yields events as they are appended, until ``stop`` is set, beginning with later ones.

        Events of one partition come in order. Looks for new events every ``wait_s`` seconds. Skips
        events that are trimmed before it reads them.

        >>> events = home.tail("orders")
        """
        return self._tail(Tail(self, topic), wait_s, stop or threading.Event())

    def search(
        self,
        topic: str,
        query: SearchQuery,
        *,
        partition: int | None = None,
        start: int | None = None,
        limit: int = 50,
    ) -> SearchResult:
        """Returns events of a partition that fit a query: by key, id, text or fields of their JSON.

        Fields are conditions such as ``amount > 10 and user.id = u-7`` (``SearchQuery.where``).
        Without ``partition`` it looks where the query's key belongs, or in partition 0. It looks
        from ``start`` on for a second at most; ``next`` of the result is where to continue.

        >>> found = home.search("orders", tidelog.SearchQuery(text="ORDER-2"))
        >>> [event.id for event in found.events]
        ['order-2']
        """
        query.check()
        found = self.topic(topic)
        if partition is None:
            partition = 0 if query.key is None else partition_for(query.key, found.partitions)
        found.check_partition(partition)
        if limit < 1:
            raise InvalidError(f"search: limit {limit}: give 1 or more")
        most = (limit, _SEARCH_S)
        return search_partition(self.context, found, partition, start, query, most)

    def timeline(
        self,
        topic: str,
        start: str | int | datetime | None = None,
        end: str | int | datetime | None = None,
    ) -> Histogram:
        """Returns how many events each stretch of a topic's time has, in 400 bars at most.

        ``start`` and ``end`` are times, as milliseconds or text such as ``-1h`` too; without them
        it covers all events. Counts come from the lists of runs: ``is_exact`` is false if long runs
        were spread evenly, and ``is_whole`` if there are too many to read at once.

        >>> sum(home.timeline("orders").counts)
        3
        """
        bounds = (self._time_ms(each) for each in (start, end))
        return Timelines(self.context).histogram(self.topic(topic), *bounds)

    def _time_ms(self, time: str | int | datetime | None) -> int | None:
        if isinstance(time, str):
            return moment_ms(time, self.context.clock.now_ms())
        return None if time is None else check_timestamp(time)

    def _tail(self, tail: Tail, wait_s: float, stop: threading.Event) -> Iterator[Event]:
        clock = self.context.clock
        while not stop.is_set():
            for event in tail.look():
                if stop.is_set():
                    return
                yield event
            until_s = clock.monotonic_s() + (0 if tail.has_more else wait_s)
            while not stop.is_set() and (left_s := until_s - clock.monotonic_s()) > 0:
                clock.sleep(min(left_s, _STOP_LOOK_S))

    def _read_parts(
        self, topic: str, partition: int | None, start: int | None, end: int | None
    ) -> Iterator[OffsetEvents]:
        """Yields the events of a partition, or of all partitions one after another, in parts."""
        found = self.topic(topic)
        if partition is not None:
            found.check_partition(partition)
        start = None if start is None else check_whole("read: start", start)
        end = None if end is None else check_whole("read: end", end)
        has_offsets = start is not None or end is not None
        if partition is None and found.partitions > 1 and has_offsets:
            raise InvalidError(
                f"topic `{topic}`: has {found.partitions} partitions, each with offsets of its "
                "own: give a partition too"
            )
        for each in range(found.partitions) if partition is None else [partition]:
            first = start
            if first is None:
                first = partition_ends(self.context, found, [each])[each][0]
            yield from self._reader(topic, each, first).read(first, end)

    def _last(self, topic: str, state: PartitionState, count: int, end: int) -> list[Event]:
        """Returns the last events before an offset. Reads further back where events were erased."""
        window = count
        while True:
            start = max(state.start, end - window)
            found = list(self.read(topic, state.partition, start, end))
            if len(found) >= count or start == state.start:
                return found[-count:]
            window *= 4


class LookBack:
    """The newest events of all partitions, and then older ones, page by page.

    Each page takes the last events of partitions, so that the next page, which begins below them,
    misses none. A late event therefore counts as new as the newest event before it.
    """

    def __init__(self, home: BrowseCalls, topic: str, before: Mapping[int, int]) -> None:
        self._home = home
        self._topic = topic
        self._states = home.partitions(topic, runs=False)
        self.ends = {  # offsets below which events were not looked at yet
            each.partition: min(each.next, before.get(each.partition, each.next))
            for each in self._states
        }

    @property
    def has_more(self) -> bool:
        """Whether there are offsets that were not looked at."""
        return any(self.ends[each.partition] > each.start for each in self._states)

    def page(self, query: SearchQuery, limit: int, looked_max: int) -> tuple[list[Event], int]:
        """Returns events that fit, the newest first, and how many events were looked at."""
        looked = self._newest(looked_max)
        found = query.keep(looked)[:limit]
        if len(found) == limit:  # the rest belongs to the next page
            looked = looked[: looked.index(found[-1]) + 1]
        for event in looked:
            at = event.position
            self.ends[at.partition] = min(self.ends[at.partition], at.offset)
        if len(looked) < looked_max and len(found) < limit:
            self.ends = {each.partition: each.start for each in self._states}
        return sorted(found, key=_by_time, reverse=True), len(looked)

    def _newest(self, count: int) -> list[Event]:
        """Returns the last events of the partitions, the newest first."""
        ranked: list[tuple[tuple[int, int, int], Event]] = []
        for state in self._states:
            end, newest_ms = self.ends[state.partition], 0
            if end <= state.start:
                continue
            for event in self._home._last(self._topic, state, count, end):
                rank = _by_time(event)
                newest_ms = max(newest_ms, rank[0])
                ranked.append(((newest_ms, *rank[1:]), event))
        return [event for _, event in heapq.nlargest(count, ranked, key=lambda each: each[0])]


class Tail:
    """The events that are appended after this was created, as a caller asks for them."""

    def __init__(self, home: BrowseCalls, topic: str) -> None:
        self._home = home
        self._topic = home.topic(topic)
        states = home.partitions(topic, runs=False)
        self._cursors = {each.partition: each.next for each in states}
        self.has_more = False  # whether the last look left events that are there already

    def look(self) -> list[Event]:
        """Returns the events that are there now, up to a number for each partition."""
        name = self._topic.name
        states = self._home.partitions(name, runs=False)
        if self._home.topic(name).incarnation != self._topic.incarnation:
            raise NotFoundError(f"topic `{name}`: was deleted and created again: begin again")
        found: list[Event] = []
        self.has_more = False
        for state in states:
            start = max(self._cursors[state.partition], state.start)
            end = min(state.next, start + _AT_ONCE)
            self.has_more |= end < state.next
            with contextlib.suppress(NotFoundError):  # trimmed since the look
                for event in self._home.read(name, state.partition, start, end):
                    found.append(event)
                    self._cursors[state.partition] = (event.offset or 0) + 1
                self._cursors[state.partition] = end
        return found


def _by_time(event: Event) -> tuple[int, int, int]:
    time_ms = event.timestamp if isinstance(event.timestamp, int) else 0
    return time_ms, event.partition or 0, event.offset or 0
