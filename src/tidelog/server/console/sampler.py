"""Reads the home's figures again and again, with bounded work, so that pages only show them.

Each sample reads the names, then heads and leases side by side, so many of each at most: in a large
home topics take turns. Runs are counted with what is left. While a page of the console is open a
sample is taken every other second, else seldom, since on a remote catalog each read has its price.

Samples are new values each time; the series that go on are written under :attr:`Sampler.lock`, and
read under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from tidelog.errors import NotFoundError, TidelogError, unexpected
from tidelog.home import Home
from tidelog.log.status import (
    LeaseState,
    Members,
    MemberState,
    PartitionTotals,
    RunTotals,
    consumer_leases,
    consumer_names,
    read_heads,
)
from tidelog.model.topic import Head, Topic
from tidelog.server.console.charts import Series

__all__ = ["ConsumerSample", "Sampler", "Snapshot", "TopicSample"]


@dataclass(frozen=True, slots=True)
class ConsumerSample:
    """A consumer of a topic."""

    topic: str
    name: str
    members: tuple[MemberState, ...]
    held: tuple[LeaseState, ...]
    lags: Series  # over time
    cursors: Series

    @property
    def lag(self) -> int:
        """Returns how many events it has not handled, in all partitions."""
        return sum(each.lag.events for each in self.held)

    @property
    def alive(self) -> int:
        """Returns how many of its members were alive recently."""
        return sum(not member.is_silent for member in self.members)

    @property
    def trimmed(self) -> int:
        """Returns how many events were trimmed before it handled them."""
        below = (each.lag.start - (each.lag.cursor or 0) for each in self.held if each.version)
        return sum(max(0, missed) for missed in below)


@dataclass(frozen=True, slots=True)
class TopicSample:
    """A topic, its ends, and the sums of its runs as far as they are counted."""

    topic: Topic
    heads: tuple[Head, ...]  # none where they were not read yet, or where it is half made
    ends: Series  # the sum of next offsets
    rate: float | None = None  # events a second
    runs: int | None = None
    bytes: int | None = None
    erased: int = 0  # offsets without an event, as far as they are counted
    last_ms: int | None = None
    consumers: tuple[ConsumerSample, ...] = ()

    @property
    def events(self) -> int | None:
        """Returns how many events can be read, with those whose delete is not compiled yet."""
        ends = sum(head.next - head.start for head in self.heads)
        return max(0, ends - self.erased) if self.heads else None

    @property
    def lag(self) -> int | None:
        """Returns the lag of the slowest consumer; None if there is no consumer."""
        return max((each.lag for each in self.consumers), default=None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of a home at one time."""

    read_ms: int
    took_s: float
    topics: dict[str, TopicSample]  # by name
    ends: Series = field(default_factory=Series)  # of all topics
    cursors: Series = field(default_factory=Series)  # of all consumers
    is_whole: bool = True  # all heads were read, not a part of them in their turn

    @property
    def consumers(self) -> list[ConsumerSample]:
        """Returns all consumers, by topic and name."""
        return [each for topic in self.topics.values() for each in topic.consumers]

    @property
    def events(self) -> int:
        return sum(topic.events or 0 for topic in self.topics.values())

    @property
    def bytes(self) -> int | None:
        """Returns the bytes in the store, as far as they are counted."""
        known = [topic.bytes for topic in self.topics.values() if topic.bytes is not None]
        return sum(known) if known else None

    @property
    def bytes_are_whole(self) -> bool:
        return all(topic.bytes is not None for topic in self.topics.values() if topic.heads)


_BUSY_S = 2.0  # between samples while a page is open
_IDLE_S = 30.0
_SHARE = 0.1  # of its time that a sampler works at most; the rest is for requests
_LOOKED_S = 120.0  # how long a page counts as open after its last request
_NEVER_S = float("-inf")
_QUICK_S = 0.1  # a sample that takes no longer is taken again for each page
_FRESH_S = 0.5  # unless the last one is this young
_READS_MAX = 4_000  # heads, and as many leases, in one sample
_ROWS_MAX = 4_000  # of runs that are counted in one sample
_AT_ONCE = 8  # reads side by side
_STOP_S = 5.0  # in which a sample that is under way should have ended


@dataclass(slots=True)
class _TopicMemory:
    """What is kept of a topic from sample to sample."""

    heads: tuple[Head, ...] = ()
    ends: Series = field(default_factory=Series)
    totals: dict[int, PartitionTotals] = field(default_factory=dict)
    consumers: dict[str, ConsumerSample] = field(default_factory=dict)
    members: Members = field(default_factory=Members)


class Sampler:
    """The figures of a home. Start it, and stop it at the end."""

    def __init__(self, home: Home) -> None:
        self.lock = threading.Lock()  # of all series
        self.trouble: TidelogError | None = None  # why the last sample failed
        self._home = home
        self._context = home.context
        self._now_s = home.context.clock.monotonic_s
        self._known: dict[str, _TopicMemory] = {}  # by incarnation
        self._ends, self._cursors = Series(), Series()
        self._turn = 0  # the topic whose heads are read first
        self._snapshot: Snapshot | None = None
        self._sampled_s = self._looked_s = _NEVER_S
        self._sampling = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "tidelog-console")
        self._thread = threading.Thread(target=self._run, name="tidelog-sampler", daemon=True)

    def start(self) -> None:
        """Starts taking samples."""
        self._thread.start()

    def stop(self) -> None:
        """Stops taking samples."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """Returns whether a page of the console is open."""
        return self._now_s() - self._looked_s < _LOOKED_S

    def totals(self, topic: Topic) -> dict[int, RunTotals]:
        """Returns the sums of a topic's runs, if they are known."""
        known = self._known.get(topic.incarnation)
        found = dict(known.totals) if known else {}
        return {number: each.shown for number, each in found.items() if each.shown is not None}

    def consumer(self, topic: Topic, name: str) -> ConsumerSample:
        """Returns a consumer of a topic: as last sampled, or as it is now if it is new."""
        sample = self.look().topics.get(topic.name)
        for each in sample.consumers if sample is not None else ():
            if each.name == name and sample and sample.topic.incarnation == topic.incarnation:
                return each
        heads = tuple(read_heads(self._context, topic))
        return self._read_consumer(topic, _TopicMemory(heads), name)

    def expire(self) -> None:
        """Makes the last sample old, since a person has changed something and wants to see it."""
        with self._sampling:  # one that is being taken may have missed the change
            self._sampled_s = _NEVER_S
        self._wake.set()

    def look(self) -> Snapshot:
        """The newest sample; one of just now where that is quick, or where something has changed
        something. Raises before there is any.
        """
        was_idle = not self.is_busy
        self._looked_s = self._now_s()
        last = self._snapshot
        is_old = self._now_s() - self._sampled_s > _FRESH_S
        is_expired = self._sampled_s == _NEVER_S
        if last is None or is_expired or (is_old and last.took_s < _QUICK_S):
            self._sample(_FRESH_S)
        elif was_idle:
            self._wake.set()
        if self._snapshot is None:
            raise self.trouble or TidelogError("console: has read nothing yet: try again")
        return self._snapshot

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            took_s = self._snapshot.took_s if self._snapshot is not None else 0.0
            self._wake.wait(max(_BUSY_S if self.is_busy else _IDLE_S, took_s / _SHARE))
            self._wake.clear()

    def _sample(self, young_s: float = 0.0) -> None:
        """Takes a sample, unless another thread has just taken one."""
        with self._sampling:
            if self._stop.is_set() or self._now_s() - self._sampled_s < young_s:
                return
            began_s = self._now_s()
            try:
                taken = self._take()
                self._snapshot = replace(taken, took_s=self._now_s() - began_s)
                self.trouble = None
            except Exception as exc:  # noqa: BLE001 - a failure must not end the thread
                if not self._stop.is_set():  # else the pool is closed
                    # What is known stays so, and pages tell how old it is.
                    self.trouble = unexpected("console", exc)
            self._sampled_s = self._now_s()

    def _take(self) -> Snapshot:
        topics = self._home.topics()
        there = {topic.incarnation for topic in topics}
        self._known = {key: known for key, known in self._known.items() if key in there}
        chosen, is_whole = self._in_turn([topic for topic in topics if topic.state == "ready"])
        now_ms = self._context.clock.now_ms()
        for topic, heads in self._read_heads(chosen):
            self._known.setdefault(topic.incarnation, _TopicMemory()).heads = heads
        for topic in chosen:
            known = self._known.get(topic.incarnation)
            if known is not None and known.heads:
                names = consumer_names(self._context, topic)
                read = self._read_consumers(topic, known, names)
                known.consumers = {each.name: each for each in read}
        self._count_runs(chosen)
        with self.lock:
            return self._note(topics, chosen, now_ms, is_whole)

    def _note(
        self, topics: list[Topic], chosen: list[Topic], now_ms: int, is_whole: bool
    ) -> Snapshot:
        """Adds what was read to the series, and returns it as a sample."""
        for topic in chosen:
            known = self._known.get(topic.incarnation)
            if known is None or not known.heads:
                continue
            known.ends.add(now_ms, sum(head.next for head in known.heads))
            for each in known.consumers.values():
                each.lags.add(now_ms, each.lag)
                each.cursors.add(now_ms, sum(held.lag.cursor or 0 for held in each.held))
        found = {topic.name: self._sample_of(topic) for topic in topics}
        ends = sum(known.ends.last or 0 for known in self._known.values())
        self._ends.add(now_ms, ends)
        consumers = [each for topic in found.values() for each in topic.consumers]
        self._cursors.add(now_ms, sum(each.cursors.last or 0 for each in consumers))
        return Snapshot(now_ms, 0.0, found, self._ends, self._cursors, is_whole)

    def _sample_of(self, topic: Topic) -> TopicSample:
        known = self._known.get(topic.incarnation)
        if known is None:
            return TopicSample(topic, (), Series())
        counted = [each.shown for each in known.totals.values()]
        totals = [each for each in counted if each is not None]
        whole = len(totals) == topic.partitions
        times = [each.last_ms for each in totals if each.last_ms is not None]
        return TopicSample(
            topic,
            known.heads,
            known.ends,
            known.ends.rate(),
            sum(each.runs for each in totals) if whole else None,
            sum(each.bytes for each in totals) if whole else None,
            sum(each.erased for each in totals),
            max(times, default=None),
            tuple(sorted(known.consumers.values(), key=lambda each: each.name)),
        )

    def _in_turn(self, topics: list[Topic]) -> tuple[list[Topic], bool]:
        """Returns the topics whose turn it is, and whether these are all."""
        chosen: list[Topic] = []
        room = _READS_MAX
        for step in range(len(topics)):
            topic = topics[(self._turn + step) % len(topics)]
            if chosen and topic.partitions > room:
                break
            chosen.append(topic)
            room -= topic.partitions
        is_whole = len(chosen) == len(topics)
        self._turn = 0 if is_whole else (self._turn + len(chosen)) % len(topics)
        return chosen, is_whole

    def _read_heads(self, topics: list[Topic]) -> Iterable[tuple[Topic, tuple[Head, ...]]]:
        def read(topic: Topic) -> tuple[Head, ...]:
            try:
                return tuple(read_heads(self._context, topic))
            except NotFoundError:  # deleted meanwhile
                return ()

        return zip(topics, self._pool.map(read, topics), strict=True)

    def _read_consumers(
        self, topic: Topic, known: _TopicMemory, names: Iterable[str]
    ) -> Iterable[ConsumerSample]:
        """Reads a limited number of a topic's leases; the others keep what was read before."""
        room = _READS_MAX
        chosen: list[str] = []
        others: list[str] = []
        for name in names:
            room -= topic.partitions
            (chosen if room >= 0 or not chosen else others).append(name)
        yield from self._pool.map(lambda name: self._read_consumer(topic, known, name), chosen)
        yield from (known.consumers[name] for name in others if name in known.consumers)

    def _read_consumer(self, topic: Topic, known: _TopicMemory, name: str) -> ConsumerSample:
        before = known.consumers.get(name)
        return ConsumerSample(
            topic.name,
            name,
            tuple(known.members.list(self._context, topic, name)),
            tuple(consumer_leases(self._context, topic, name, known.heads)),
            before.lags if before else Series(),
            before.cursors if before else Series(),
        )

    def _count_runs(self, topics: list[Topic]) -> None:
        room = _ROWS_MAX
        for topic in topics:
            known = self._known.get(topic.incarnation)
            for partition, head in enumerate(known.heads if known else ()):
                if known is None or room <= 0:
                    return
                totals = known.totals.setdefault(partition, PartitionTotals())
                room -= totals.count_on(self._context, topic, partition, head, room)
