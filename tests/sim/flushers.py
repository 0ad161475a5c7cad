"""Senders of the world of clients for whom ``flush`` and ``close`` are the acknowledgement.

Two threads share a producer. A thread waits for some of its events one by one, and for the rest
with ``flush``; what a thread has not waited for when it ends, the ``close`` of the main thread
acknowledges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.errors import TidelogError, UnavailableError
from tidelog.log.producer.flush import SendFuture
from tidelog.log.producer.producer import Producer
from tidelog.log.topics import find_topic
from tidelog.model.topic import Topic

if TYPE_CHECKING:
    from tests.sim.clients import ClientsWorld

__all__ = ["send_and_flush"]

_ROUNDS = 4


def send_and_flush(world: ClientsWorld) -> None:
    """One process: its threads send and flush, then it closes the producer."""
    context = world._context()
    topic = find_topic(context, "t")
    producer = Producer(context, topic)
    threads = [_Thread(world, producer, topic) for _ in range(2)]
    world._in_threads(1, threads[0].run) if world.chance(0.3) else _share(world, threads)
    try:
        producer.close()
    except TidelogError:
        return  # any of them may be missing
    for each in threads:
        each.all_durable()


def _share(world: ClientsWorld, threads: list[_Thread]) -> None:
    turns = iter(threads)
    world._in_threads(len(threads), lambda: next(turns).run())


class _Thread:
    """What one thread has sent, and waits for."""

    def __init__(self, world: ClientsWorld, producer: Producer, topic: Topic) -> None:
        self._world = world
        self._producer = producer
        self._topic = topic
        self._open: set[bytes] = set()

    def run(self) -> None:
        world = self._world
        for _ in range(_ROUNDS):
            sent: list[tuple[bytes, SendFuture]] = []
            for value in world._values(world.random.randint(1, 3)):
                try:
                    future = self._producer.send(value, value if world.chance(0.5) else None)
                except UnavailableError:
                    continue
                self._open.add(value)
                sent.append((value, future))
            for value, future in sent:
                if world.chance(0.3):
                    self._wait(value, future)
            world.process.clock.sleep(world.random.uniform(0, 1))
            if world.chance(0.6):
                self._flush()

    def all_durable(self) -> None:
        """A call for the whole producer has returned."""
        self._world.ledger.durable |= {(self._topic.incarnation, value) for value in self._open}
        self._open.clear()

    def _wait(self, value: bytes, future: SendFuture) -> None:
        try:
            position = future.result()
        except TidelogError:
            self._open.discard(value)  # its sender knows
        else:
            self._world.ledger.acknowledge(value, self._world._place(self._topic, position))

    def _flush(self) -> None:
        try:
            self._producer.flush()
        except TidelogError:
            self._open.clear()  # any of them may be missing
        else:
            self.all_durable()
