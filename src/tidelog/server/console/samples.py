"""What the sampler has seen: plain values that pages show, and series that grow beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelog.log.status import Lag
from tidelog.model.partition_rows import Head
from tidelog.model.topic import Topic
from tidelog.server.console.format import Series

__all__ = ["ConsumerSample", "LeaseSample", "MemberSample", "Snapshot", "TopicSample"]


@dataclass(frozen=True, slots=True)
class MemberSample:
    """A member of a consumer, as its heartbeat told last."""

    id: str
    mark: str  # its host and process
    seen_ms: int
    is_silent: bool  # for longer than its leases last


@dataclass(frozen=True, slots=True)
class LeaseSample:
    """A consumer's lease on one partition, beside how far it is."""

    lag: Lag
    epoch: int
    version: str  # of the lease; empty where there is none


@dataclass(frozen=True, slots=True)
class ConsumerSample:
    """A consumer of a topic."""

    topic: str
    name: str
    members: tuple[MemberSample, ...]
    held: tuple[LeaseSample, ...]
    lags: Series  # over time
    cursors: Series

    @property
    def lag(self) -> int:
        """Events that it has not handled, in all partitions."""
        return sum(each.lag.events for each in self.held)

    @property
    def alive(self) -> int:
        """How many of its members were heard of lately."""
        return sum(not member.is_silent for member in self.members)

    @property
    def trimmed(self) -> int:
        """Events that were trimmed before it has handled them."""
        below = (each.lag.start - (each.lag.cursor or 0) for each in self.held if each.version)
        return sum(max(0, missed) for missed in below)


@dataclass(frozen=True, slots=True)
class TopicSample:
    """A topic, its ends, and what its runs come to as far as they are counted."""

    topic: Topic
    heads: tuple[Head, ...]  # none where they were not read yet, or where it is half made
    ends: Series  # the sum of next offsets
    rate: float | None = None  # events a second
    runs: int | None = None
    bytes: int | None = None
    last_ms: int | None = None
    consumers: tuple[ConsumerSample, ...] = ()

    @property
    def events(self) -> int | None:
        """How many can be read."""
        return sum(head.next - head.start for head in self.heads) if self.heads else None

    @property
    def lag(self) -> int | None:
        """Of the consumer that is furthest behind; None where nobody reads."""
        return max((each.lag for each in self.consumers), default=None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The home, as it was at one time."""

    read_ms: int
    took_s: float
    topics: dict[str, TopicSample]  # by name
    ends: Series = field(default_factory=Series)  # of all topics
    cursors: Series = field(default_factory=Series)  # of all consumers
    is_whole: bool = True  # all heads were read, not a part of them in their turn

    @property
    def consumers(self) -> list[ConsumerSample]:
        """All of them, by topic and name."""
        return [each for topic in self.topics.values() for each in topic.consumers]

    @property
    def events(self) -> int:
        return sum(topic.events or 0 for topic in self.topics.values())

    @property
    def bytes(self) -> int | None:
        """In the store, as far as it is counted."""
        known = [topic.bytes for topic in self.topics.values() if topic.bytes is not None]
        return sum(known) if known else None

    @property
    def bytes_are_whole(self) -> bool:
        return all(topic.bytes is not None for topic in self.topics.values() if topic.heads)
