"""What a cycle costs over a topic of many partitions, of which few have events."""

from __future__ import annotations

import threading
import time

from bench.messages import a_producer, make_topic
from tidelog import Event
from tidelog.home import Home
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import FilePolicy

_CYCLES = 5
_BUSY = 3  # partitions that get an event before each cycle


class Cycles:
    """A topic, and a driver that follows it."""

    def __init__(self, home: Home, kind: str, servers: str, partitions: int) -> None:
        self._home = home
        self._servers = servers
        self._partitions = partitions
        self._topic = f"cycles-{partitions}"
        self._stop = threading.Event()
        self._began = 0.0
        self._seconds: list[float] = []
        self._send = self._to_kafka if kind == "kafka" else self._to_topic
        if kind == "kafka":
            make_topic(servers, self._topic, partitions)
            self.source = f"kafka://{servers}/{self._topic}"
        else:
            home.create_topic(self._topic, partitions)
            self.source = f"topic:{self._topic}"

    def run(self, pipeline: Pipeline) -> list[float]:
        """Seconds of each cycle; the first, which takes the partitions over, is not counted."""
        self._feed()
        how = DriverOptions(
            follow=True, policy=FilePolicy(max_bytes=1), stop=self._stop, on_cycle=self._note
        )
        Driver(self._home.context, pipeline, how).run()
        return self._seconds[1:]

    def _note(self, report: CycleReport) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if len(report.committed) != min(_BUSY, self._partitions):
            raise RuntimeError(f"{len(report.committed)} partitions were committed")
        if len(self._seconds) > _CYCLES:
            self._stop.set()
        self._feed()

    def _feed(self) -> None:
        self._send([self._partitions * n // _BUSY for n in range(min(_BUSY, self._partitions))])
        self._began = time.perf_counter()

    def _to_kafka(self, partitions: list[int]) -> None:
        producer = a_producer(self._servers)
        for number in partitions:
            producer.produce(self._topic, b"x", partition=number)
        producer.flush()

    def _to_topic(self, partitions: list[int]) -> None:
        for number in partitions:
            self._home.append(self._topic, [Event(b"x")], partition=number)
