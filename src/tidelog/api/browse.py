"""Looks at topics without a consumer: newest events, events as they come, search, and SQL."""

from __future__ import annotations

import contextlib
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.partition_reader import OffsetEvents, Reader
from tidelog.log.status import PartitionState, partition_ends
from tidelog.model.event import Event
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.pages import SearchQuery, SearchResult, search_partition

__all__ = ["BrowseCalls", "LookBack", "Tail"]

_SEARCH_S = 1.0  # that one search may take
_AT_ONCE = 1_000  # events of a partition before the next partition has its turn


class BrowseCalls(ABC):
    """Looks at topics and archives that leave no name behind."""

    context: Context

    @abstractmethod
    def topic(self, name: str) -> Topic:
        """Returns the topic with a name. Raises ``NotFoundError``."""

    @abstractmethod
    def partitions(self, topic: str, *, runs: bool = True) -> list[PartitionState]:
        """Returns the state of each partition."""

    @abstractmethod
    def _reader(self, topic: str, partition: int, start: int) -> Reader:
        """Returns a reader of a partition. Raises if it does not begin with ``start``."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises ``InvalidError`` if the home is closed."""

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
        from tidelog.api.sql import run_query  # noqa: PLC0415 - archives and DuckDB load slowly

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

    def tail(self, topic: str, *, wait_s: float = 1.0) -> Iterator[Event]:
        """Yields events as they are appended, for ever, beginning with those that come after this.

        Events of one partition come in order. Looks for new events every ``wait_s`` seconds. Skips
        events that are trimmed before it reads them.

        >>> events = home.tail("orders")
        """
        return self._tail(Tail(self, topic), wait_s)

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

    def _tail(self, tail: Tail, wait_s: float) -> Iterator[Event]:
        while True:
            yield from tail.look()
            if not tail.has_more:
                self.context.clock.sleep(wait_s)

    def _read_parts(
        self, topic: str, partition: int | None, start: int | None, end: int | None
    ) -> Iterator[OffsetEvents]:
        """Yields the events of a partition, or of all partitions one after another, in parts."""
        found = self.topic(topic)
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
