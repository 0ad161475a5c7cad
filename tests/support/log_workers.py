"""``python -m tests.support.log_workers``: a nursery of producers and consumers that a test kills.

It reads lines ``produce|consume HOME TOPIC FILE``, forks a worker for each, and prints its process
id. A producer writes a line into its file for each event that was acknowledged; a consumer one for
each event before it is handled, and one for each commit after it returned. Each line carries the
machine's monotonic time.
"""

from __future__ import annotations

import os
import time

import tidelog
import tidelog.catalog.dynamodb
import tidelog.catalog.sqlite
import tidelog.store.remote
from tests.support.child_processes import fork_workers
from tidelog.errors import FencedError, UnavailableError

# Between a producer's batches: the others shall have their share of the machine, and what is stored
# is read again and again.
PAUSE_S = 0.1


def note(file: int, *words: object) -> None:
    line = " ".join(map(str, (time.monotonic_ns(), *words)))
    os.write(file, f"{line}\n".encode())


def produce(home: tidelog.Home, topic: str, file: int) -> None:
    with home.producer(topic) as producer:
        for number in range(1_000_000):
            names = [f"{os.getpid()}-{time.monotonic_ns()}-{number}-{n}" for n in range(20)]
            futures = [(name, producer.send(name.encode(), key=name.encode())) for name in names]
            for name, future in futures:
                position = future.result(120)
                note(file, "acknowledged", position.partition, position.offset, name)
            time.sleep(PAUSE_S)


def consume(home: tidelog.Home, topic: str, file: int) -> None:
    with home.consumer(topic, "c") as consumer:
        while True:
            try:
                events = consumer.poll(50, timeout_s=0.2)
                for event in events:
                    value = (event.value or b"").decode()
                    note(file, "handled", event.partition, event.offset, value)
                before = consumer.partitions()
                consumer.commit()
                for partition in {event.partition for event in events} & set(before):
                    last = max(e.offset or 0 for e in events if e.partition == partition)
                    note(file, "committed", partition, last + 1)
            except (FencedError, UnavailableError):
                continue


def work(role: str, where: str, topic: str, path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with tidelog.open(where) as opened:
        {"produce": produce, "consume": consume}[role](opened, topic, descriptor)


if __name__ == "__main__":
    fork_workers(work)
