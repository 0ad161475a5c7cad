"""The console on a large home: how long its pages take, one after another, in a server of its own.

The home has 1,000 topics, 100 consumers, one topic of 10 M events in 8 partitions, and one whose
events stand in 2,000 small runs. Figures have been sampled once before pages are asked for. What
is measured is a whole request over loopback, as a browser sends it; a page's p99 is held against
what it may take.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import httpx
import numpy as np
import pyarrow as pa

from bench.measure import scratch
from bench.rates import Rate
from bench.serve import SERVE, process
from tidelog.home import Home, create_home
from tidelog.model.event import Event
from tidelog.model.topic import Topic
from tidelog.settings import Settings

TOPICS = int(os.environ.get("BENCH_CONSOLE_TOPICS", "1000"))
CONSUMERS = 100
EVENTS = int(os.environ.get("BENCH_CONSOLE_EVENTS", "10000000"))
PARTITIONS = 8
SMALL_RUNS = 2_000
A_TABLE = 250_000
REQUESTS = 100
START_MS = 1_763_200_000_000
WARM_S = 90.0  # in which all runs have been counted


def run() -> list[Rate]:
    """Each page, many times."""
    with scratch() as folder:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            fill(home)
            config = home.config
        serve = ["-c", SERVE, "--home", config, "serve", "--port", "0", "--json"]
        with process(serve) as line, httpx.Client(base_url=json.loads(line)["url"]) as client:
            client.timeout = 60
            warm_up(client)
            return [measure(client, *page) for page in pages()]


def pages() -> list[tuple[str, str, float]]:
    """What they are called, where they are, and how many milliseconds each may take."""
    big, small = "/console/topics/big", "/console/topics/small"
    middle = START_MS + EVENTS // 2
    at = f"start={middle}&end={middle + 5_000}"
    offset = EVENTS // PARTITIONS // 2
    return [
        ("overview", "/", 200),
        ("topics", "/console/topics", 200),
        ("topics, a search", "/console/topics?q=many-0&page=2", 200),
        ("topics by lag", "/console/topics?order=lag", 200),
        ("consumers", "/console/consumers", 200),
        ("a topic of 10 M events", big, 200),
        ("timeline of 10 M events", f"{big}/timeline", 300),
        ("timeline, 5 s of it", f"{big}/timeline?{at}", 300),
        ("timeline of 2,000 small runs", f"{small}/timeline", 300),
        ("events, the newest", f"{big}/events", 300),
        ("events by offset", f"{big}/events?by=offset&partition=3&offset={offset}", 300),
        ("events by time", f"{big}/events?by=time&{iso(middle)}", 300),
        ("events by key, found soon", f"{big}/events?by=key&key=customer-77", 300),
        ("events by id, never found", f"{big}/events?by=id&id=nowhere", 300),
        ("events that contain, never found", f"{big}/events?contains=nowhere", 300),
        ("one event", f"{big}/events/2/{offset}", 300),
    ]


def iso(time_ms: int) -> str:
    stamps = [np.datetime64(each, "ms") for each in (time_ms, time_ms + 60_000)]
    return f"start={stamps[0]}Z&end={stamps[1]}Z"


def fill(home: Home) -> None:
    """Topics, consumers and events."""
    big = home.create_topic("big", PARTITIONS)
    for first in range(0, EVENTS, A_TABLE):
        numbers = np.arange(first, min(first + A_TABLE, EVENTS))
        home.append("big", table(numbers))
    home.create_topic("small")
    with home.producer("small") as producer:
        for number in range(10 * SMALL_RUNS):
            producer.send(b"x", timestamp=START_MS + number * 100)
            if number % 10 == 9:
                producer.flush()
    for number in range(TOPICS - 2):
        topic = home.create_topic(f"many-{number:04}", 1 + number % 4)
        if number % 4 == 0:
            home.append(topic.name, [Event(b'{"n": 1}') for _ in range(10)])
        if number < CONSUMERS - 5:
            consume(home, topic, "reader")
    for number in range(5):
        consume(home, big, f"group-{number}")


def table(numbers: np.ndarray) -> pa.Table:
    """Events as they come from anywhere: 150 bytes of JSON, one a millisecond."""
    keys = pa.array([b"customer-%d" % number for number in (numbers % 1000).tolist()], pa.binary())
    values = [
        b'{"order":%d,"city":"Bern","amount":%d.25,"note":"%0100d"}' % (n, n % 977, n)
        for n in numbers.tolist()
    ]
    return pa.table(
        {
            "timestamp": pa.array(START_MS + numbers, pa.timestamp("ms", "UTC")),
            "id": pa.array([f"order-{number}" for number in numbers.tolist()]),
            "key": keys,
            "value": pa.array(values, pa.binary()),
        }
    )


def consume(home: Home, topic: Topic, name: str) -> None:
    """A consumer that has left, its cursors at the start."""
    with home.consumer(topic.name, name, start="earliest") as consumer:
        consumer.poll(1, timeout_s=10)


def warm_up(client: httpx.Client) -> None:
    """Until all runs have been counted, and one look at each page."""
    until = time.monotonic() + WARM_S
    while "as far as it is counted" in client.get("/").text and time.monotonic() < until:
        time.sleep(0.5)
    for _, path, _ in pages():
        client.get(path).raise_for_status()


def measure(client: httpx.Client, what: str, path: str, most_ms: float) -> Rate:
    took_ms = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        client.get(path).raise_for_status()
        took_ms.append((time.perf_counter() - began) * 1000)
    p50, p99 = statistics.median(took_ms), sorted(took_ms)[int(len(took_ms) * 0.99) - 1]
    note = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms"
    return Rate(what, [p50], "ms", f"p99 below {most_ms:.0f} ms", most_ms / p99, 1.0, note=note)
