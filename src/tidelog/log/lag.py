"""Who reads a topic, and how far behind."""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.log.base import Log
from tidelog.log.lease import decode_registered, read_lease
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.topic import Topic

__all__ = ["Lag", "consumer_lag", "consumer_names"]


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind, in one partition."""

    topic: str
    consumer: str
    partition: int
    cursor: int | None  # None: nobody has read it yet
    start: int
    end: int
    owner: str

    @property
    def events(self) -> int:
        """How many events are not handled yet; those that were erased are counted too."""
        return self.end - (self.start if self.cursor is None else self.cursor)


def consumer_names(log: Log, topic: Topic) -> list[str]:
    """All consumers that a topic has, also those whose delete did not finish."""
    prefix = layout.consumer_row(topic.incarnation, "")
    rows = log.catalog.scan(layout.REGISTRY, prefix, prefix + "\U0010ffff")
    found = [decode_registered(row) for row in rows]
    return sorted(each.name for each in found if each.state != "deleted")


def consumer_lag(log: Log, topic: Topic, name: str) -> list[Lag]:
    """How far a consumer is behind, in every partition of a topic."""
    lags = []
    for partition in range(topic.partitions):
        head, _ = read_head(log, topic, partition)
        found = read_lease(log, topic, name, partition)
        cursor = found[0].cursor if found else None
        owner = found[0].owner if found else ""
        lags.append(Lag(topic.name, name, partition, cursor, head.start, head.next, owner))
    return lags
