"""Clients whose signal handlers raise in the middle of a call, and which go on afterwards.

A signal handler runs in the main thread. It raises as Ctrl-C or a soft time limit does, where the
thread waits for another one or meets the world. The program catches that and uses the same producer
or consumer again. An interrupted send may be stored or not, but at most once, and as it was sent;
whatever comes after must work as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from tests.sim.clients import ClientsWorld
from tidelog.errors import FencedError
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.producer.producer import Producer
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.topic import Topic

__all__ = ["SignalsWorld"]

RATES = (0.02, 0.1, 0.3)  # of interrupts, where a thread waits or meets the world


class SignalsWorld(ClientsWorld):
    """One seed's world of interrupted clients."""

    restarts_max = 4
    preempt = 0.5  # each of these is a place for an interrupt

    def spawn_all(self) -> None:
        self._start("sender", self.send, 1)
        self._start("interrupted", self.send_interrupted, 2)
        self._start("named", partial(self.send_interrupted, "named"), 1)
        self._start("consumer", self.run_interrupted, 1)
        self._start("loop", self.loop_interrupted, 1)
        self._start("sweeper", self.sweep, 1)

    def send_interrupted(self, name: str | None = None) -> None:
        """Sends; relies on a flush, which it calls again if that was interrupted."""
        context = self._context()
        topic = find_topic(context, "t")
        producer = Producer(context, topic, name)
        for _ in range(3):
            sent: set[bytes] = set()
            for value in self._values(self.random.randint(2, 6)):
                self._interrupted(partial(self._send_or_append, producer, topic, value, sent))
            with contextlib.suppress(*self.passing, FencedError):
                for _ in range(3):
                    if not self._interrupted(producer.flush):
                        break
                else:
                    producer.flush()
                self.ledger.durable |= {(topic.incarnation, value) for value in sent}
        with contextlib.suppress(*self.passing, FencedError):
            self._interrupted(producer.close)
            producer.close()

    def _send_or_append(
        self, producer: Producer, topic: Topic, value: bytes, sent: set[bytes]
    ) -> None:
        key = value if self.chance(0.5) else None
        if not producer._named and self.chance(0.5):
            self._settle(topic, [value], partial(producer.append, [Event(value, key)]))
            return
        with contextlib.suppress(*self.not_stored):
            producer.send(value, key)
            sent.add(value)

    def run_interrupted(self) -> None:
        """Handles events by ``run``, which is interrupted and called again.

        In some calls the signal comes when the first event is handled.
        """
        context = self._context()
        topic = find_topic(context, "t")
        consumer = Consumer(context, topic, "c", "earliest")
        main = self.scheduler.current
        assert main is not None

        def handle(event: Event) -> None:
            if main.interrupt_rate == 0.0:
                main.interrupt_rate = 0.5
            self.scheduler.pause("handle")
            self.ledger.deliver("c", topic.incarnation, [event])

        for _ in range(self.random.randint(6, 12)):
            how = partial(consumer.run, handle, until_caught_up=True, max_events=6)
            with contextlib.suppress(*self.passing, FencedError):
                self._interrupted(how, self.random.choice((0.0, *RATES)))
        self._end(consumer)

    def loop_interrupted(self) -> None:
        """Handles events in a loop, which it leaves by an interrupt and enters again."""
        context = self._context()
        topic = find_topic(context, "t")
        consumer = Consumer(context, topic, "l", "earliest")

        def poll() -> None:
            for event in consumer.one_by_one(consumer.poll(4, 1.0)):
                self.ledger.deliver("l", topic.incarnation, [event])
                self.scheduler.pause("handled")
            consumer.commit()

        for _ in range(self.random.randint(6, 12)):
            with contextlib.suppress(*self.passing, FencedError):
                self._interrupted(poll)
        self._end(consumer)

    def _end(self, consumer: Consumer) -> None:
        with contextlib.suppress(*self.passing, FencedError):
            self._interrupted(consumer.close)
        consumer.close()

    def _interrupted(self, call: Callable[[], object], rate: float | None = None) -> bool:
        """Makes a call; returns whether it was interrupted."""
        main = self.scheduler.current
        assert main is not None
        main.interrupt_rate = self.random.choice(RATES) if rate is None else rate
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            main.interrupt_rate = 0.0
        return False

    def check(self) -> None:
        super().check()
        self._check_keys()

    def _check_keys(self) -> None:
        """An event has its own key, or none."""
        incarnation = self.ledger.bare.topics()["t"]["incarnation"]
        for partition in range(2):
            for run in self.ledger.bare.runs(incarnation, partition):
                if self.objects.holds(run["object"]):
                    for event in self.ledger.bare.events(run):
                        assert event["key"] in (None, event["value"]), "another event's key"
