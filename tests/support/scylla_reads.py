"""Reading a played change log in tests: all of it, by a source whose clock the test holds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play, Shape
from tidelog.clock import Clock
from tidelog.connectors.scylla.source import ScyllaSource, open_scylla
from tidelog.connectors.source import SourceRange
from tidelog.model.address import parse_address
from tidelog.model.event import Event
from tidelog.testing.scheduler import FakeClock

START_MS = 1_794_600_000_000  # a while ago: the server's own clock is later
HOUR_MS = 3_600_000


@contextlib.contextmanager
def a_play(server: Cassandra, shape: Shape = "two tables", **how: Any) -> Iterator[Play]:
    """A played log with one generation."""
    play = Play(server, shape, **how)
    try:
        play.begin_generation(START_MS)
        yield play
    finally:
        play.close()


def at(minutes: float) -> FakeClock:
    """A clock, so long after the first generation began."""
    return FakeClock(START_MS + int(minutes * 60_000))


def opened(url: str, clock: Clock, environ: Mapping[str, str] | None = None) -> ScyllaSource:
    return open_scylla(parse_address(url), environ=environ or {}, clock=clock)


def read_all(source: ScyllaSource, start: Mapping[str, str] | None = None) -> list[Event]:
    """All events that there are, group by group."""
    found: list[Event] = []
    for partition, bounds in source.bounds(source.partitions()).items():
        begin = (start or {}).get(partition.name, bounds.first)
        for chunk in source.read(SourceRange(partition, begin, bounds.end)):
            for row in chunk.batch.to_pylist():
                row["timestamp"] = int(row["timestamp"].timestamp() * 1000)
                headers = tuple((h["name"], h["value"]) for h in row.pop("headers") or ())
                found.append(Event(**row, headers=headers))
    return found


def identity(event: Event) -> tuple[str, str, int]:
    """Where in the log an event comes from."""
    told = json.loads(event.id or "")
    return told["stream_id"], told["stream_time"], told["stream_seq"]


def value(event: Event) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(event.value or b"")
    return told


def order_ticks(event: Event) -> tuple[int, int]:
    """Where in its stream an event stands: time to 100 ns, and number."""
    _, time, number = identity(event)
    low, mid, high = time.split("-")[:3]
    return int(high[1:] + mid + low, 16), number
