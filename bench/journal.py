"""Journals beside flash-flood 0.4.3 on the same S3 server, and what they cost by themselves.

Events of 1 KiB against the peer, which has one thread and no batches; Tidelog's home has its
catalog in DynamoDB Local. What the peer does with an event at a time, Tidelog does with many: that
is the point. By itself: a local home, events of 200 bytes. ``python -m bench.journal --scale 0.02``
does it with fewer events.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from bench.apart import Apart
from bench.flash_flood import Peer, folder
from bench.log import remote_home
from bench.measure import scratch
from bench.rates import Rate, against, show_rates
from tidelog import Event, Home
from tidelog.home import create_home
from tidelog.model import layout
from tidelog.settings import Settings

KIB = [os.urandom(700) + b"x" * 324 for _ in range(1_000)]
VALUES = [os.urandom(50).hex().encode() + b"x" * 100 for _ in range(10_000)]
PARTITIONS = 4
ROUNDS = 3
CHUNK = 250_000


def run(scale: float = 1.0) -> list[Rate]:
    """All cases."""
    return [*beside_flash_flood(scale), *alone(scale)]


# Beside the peer.


def beside_flash_flood(scale: float) -> list[Rate]:
    count = max(50, int(1_000 * scale))
    with (
        remote_home() as (home, bucket, _, endpoints),
        Apart(Peer, folder(), endpoints[0], bucket, KIB) as peer,
    ):
        cases: dict[str, tuple[float, Callable[[], float], Callable[[], float]]] = {
            "put": (1_000, lambda: peer("put", count), lambda: put(home, scale)),
            "compile of 1,000 events": (100, lambda: peer("journal", count), lambda: press(home)),
            "replay": (100, lambda: peer("replay"), lambda: replay(home)),
            "update, 1,000 at once": (100, lambda: peer("update", 100), lambda: update(home)),
        }
        both = {
            what: (Rate(f"flash-flood: {what}"), Rate(f"{what}, on S3 and DynamoDB"))
            for what in cases
        }
        found = [
            Rate("flash-flood: get by id", unit="ms"),
            Rate("get by id, on S3 and DynamoDB", unit="ms"),
        ]
        for number in range(ROUNDS):  # all cases in each: the peer compiles what it has just put
            for what, (_, theirs, ours) in cases.items():
                both[what][0].rounds.append(theirs())
                both[what][1].rounds.append(ours())
            if not number:  # with more than one journal the peer does not find all events
                found[0].rounds.append(peer("get", 50))
                found[1].rounds.append(get_remote(home))
        rates = []
        for what, (goal, _, _) in cases.items():
            other, mine = both[what]
            rates += [other, against(mine, other, goal)]
        return [*rates, *found]


def put(home: Home, scale: float) -> float:
    """Batches of ``Event`` objects with ids, durable on return."""
    if "put" not in {topic.name for topic in home.topics()}:
        home.create_topic("put")
    count = max(5_000, int(100_000 * scale))
    start = home.partitions("put", runs=False)[0].next
    events = [Event(KIB[n % len(KIB)], id=f"id-{start + n}") for n in range(count)]
    began = time.perf_counter()
    home.append("put", events)
    return count / (time.perf_counter() - began)


def press(home: Home) -> float:
    """1,000 events that came in 100 flushes."""
    name = f"press-{home.context.ids.new()[:8]}"
    home.create_topic(name)
    for first in range(0, 1_000, 10):
        ids = range(first, first + 10)
        home.append(name, [Event(KIB[n % len(KIB)], id=f"id-{n}") for n in ids])
    began = time.perf_counter()
    assert home.compile(name).events == 1_000
    return 1_000 / (time.perf_counter() - began)


def replay(home: Home) -> float:
    """``Event`` objects in the order of their times, of what was put and compiled."""
    home.compile("put")
    began = time.perf_counter()
    count = sum(1 for _ in home.playback("put", "earliest", "latest"))
    return count / (time.perf_counter() - began)


def update(home: Home) -> float:
    """Until they are compiled in, which readers do not wait for."""
    values = {f"id-{n}": os.urandom(1024) for n in random.sample(range(5_000), 1_000)}
    began = time.perf_counter()
    assert home.update_many("put", values).events == 1_000
    home.compile("put")
    return 1_000 / (time.perf_counter() - began)


def get_remote(home: Home) -> float:
    waits = []
    for number in range(60):
        began = time.perf_counter()
        home.get("put", f"id-{number * 71 % 5_000}")
        waits.append((time.perf_counter() - began) * 1000)
    return float(np.median(waits[10:]))


# Alone.


def alone(scale: float) -> list[Rate]:
    with local_home() as home:
        return [pressing(home, scale), *finding(home, scale), *reading(home, scale)]


def pressing(home: Home, scale: float) -> Rate:
    """Events for each second of CPU time, which all threads of this process share."""
    count = int(2_000_000 * scale)
    rate = Rate("compile, 200-byte events, for each core")
    for number in range(3):
        home.create_topic(f"press-{number}")
        fill(home, f"press-{number}", 0, count, count // 40)
        began = time.process_time()
        assert home.compile(f"press-{number}").events == count
        rate.rounds.append(count / (time.process_time() - began))
    return against(rate, Rate("300,000 a second", [300_000.0]), 1.0)


def finding(home: Home, scale: float) -> list[Rate]:
    """Get by id among 5 M events; then the rows that 10 M need."""
    count = int(5_000_000 * scale)
    home.create_topic("many", PARTITIONS)
    fill(home, "many", 0, count, CHUNK // 5)
    home.compile("many")
    waits: list[float] = []
    chance = random.Random(1)
    for number in range(1_100):
        began = time.perf_counter()
        assert home.get("many", f"id-{chance.randrange(count)}") is not None
        if number >= 100:
            waits.append((time.perf_counter() - began) * 1000)
    requests = requests_of(home, lambda: home.get("many", f"id-{chance.randrange(count)}"), 200)
    p50, p99 = np.percentile(waits, (50, 99))
    fill(home, "many", count, count, CHUNK // 5)
    home.compile("many")
    topic = home.topic("many")
    rows = sum(
        1
        for partition in range(PARTITIONS)
        for _ in home.catalog.scan(layout.topic_partition(topic.incarnation, partition))
    )
    note = f"{count:,} events, local home, warm"
    return [
        Rate("get by id, p50", [float(p50)], "ms", limit=20, note=note),
        Rate("get by id, p99", [float(p99)], "ms"),
        Rate("store requests for each get", [requests[0]], "requests"),
        Rate("catalog reads for each get", [requests[1]], "requests"),
        Rate(
            "catalog rows after compile",
            [float(rows)],
            "rows",
            limit=10_000,
            note=f"{2 * count:,} events",
        ),
    ]


def requests_of(home: Home, call: Callable[[], object], times: int) -> tuple[float, float]:
    """Requests to the store, and reads of the catalog, that a call makes on average."""
    before = sum(usage.requests for usage in home.meter.verbs.values())
    with (
        patch.object(home.catalog, "get", wraps=home.catalog.get) as gets,
        patch.object(home.catalog, "scan", wraps=home.catalog.scan) as scans,
    ):
        for _ in range(times):
            call()
    requests = sum(usage.requests for usage in home.meter.verbs.values()) - before
    return requests / times, (gets.call_count + scans.call_count) / times


def reading(home: Home, scale: float) -> list[Rate]:
    """All events of a partition, with amendments that wait."""
    count = int(1_000_000 * scale)
    home.create_topic("amended")
    fill(home, "amended", 0, count, count // 20)
    home.compile("amended")
    rates: list[Rate] = []
    done = 0
    for pending in (0, 1_000, 100_000):
        wanted = int(pending * min(1.0, scale * 10))
        ids = random.Random(2).sample(range(count), min(wanted, count // 2))
        if len(ids) > done:
            home.update_many("amended", {f"id-{n}": b"new" * 60 for n in ids})
            done = len(ids)
        rounds = []
        for _ in range(4):
            began = time.perf_counter()
            assert sum(batch.num_rows for batch in home.read_arrow("amended")) == count
            rounds.append(count / (time.perf_counter() - began))
        rate = Rate(f"read with {len(ids):,} pending amendments", rounds[1:])
        if rates:
            against(rate, rates[0], 1 / 1.5 if pending == 1_000 else 0.0)
        rates.append(rate)
    return rates


def fill(home: Home, topic: str, first: int, count: int, each: int) -> None:
    """Events with ids, so many in a flush."""
    for start in range(first, first + count, each):
        rows = range(start, min(start + each, first + count))
        table = pa.table(
            {
                "value": pa.array([VALUES[n % len(VALUES)] for n in rows], pa.binary()),
                "id": pa.array([f"id-{n}" for n in rows]),
            }
        )
        home.append(topic, table)


@contextmanager
def local_home() -> Iterator[Home]:
    with scratch() as where:
        settings = Settings(f"{where}/objects", f"{where}/catalog.sqlite")
        with create_home(settings)[0] as home:
            yield home


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    show_rates("journal", run(parser.parse_args().scale))
