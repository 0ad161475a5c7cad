"""Members of one consumer that lose their leases and get them again, while reads fail.

In every fourth world the consumer is deleted by two processes at once, again and again, and its
name is used again. In every fourth there are also members of another consumer, which seek back to
their last commit when they do not know what became of the next.
"""

from __future__ import annotations

import contextlib

from tests.sim.base import RATES, in_peace
from tests.sim.clients import PARTITIONS, PEACE_S, ClientsWorld
from tidelog.codec.events import table_of
from tidelog.codec.segment import encode_staged
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log.append import Appender
from tidelog.log.base import Log, LogSettings
from tidelog.log.consumer import Consumer
from tidelog.log.consumers import delete_consumer
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.testing.faults import Fault

__all__ = ["RebalanceWorld"]

EVENTS = 40  # of each partition, from the beginning


class RebalanceWorld(ClientsWorld):
    """One seed's world of two members, which are so slow now and then that the other takes over."""

    rates = {  # noqa: RUF012 - as in its base
        **RATES,
        Fault.LOSE_REQUEST: 0.12,
        Fault.CRASH_BEFORE: 0.001,
        Fault.CRASH_AFTER: 0.001,
    }

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.deletes = seed % 4 == 2
        self.seeks = seed % 4 == 3
        topic = find_topic(self._quiet, "t")
        appender = Appender(self._quiet, topic, f"~{self._ids.new()}")
        for partition in range(PARTITIONS):
            for values in (self._values(EVENTS // 2), self._values(EVENTS - EVENTS // 2)):
                table = table_of([Event(value) for value in values], 0)
                segment = encode_staged([(partition, table)])
                appender.commit(appender.upload(segment), segment.pieces[0])

    def settings(self) -> LogSettings:
        return LogSettings(lease_ttl_ms=1_500, max_poll_interval_ms=1_500)

    def spawn_all(self) -> None:
        self._start("member", self.take_part, 2)
        if self.deletes:
            self._start("deleter", self.delete, 2)
        if self.seeks:
            self._start("seeker", self.go_back, 2)

    def go_back(self) -> None:
        """Polls and commits, and takes most commits back."""
        log = self._log()
        topic = find_topic(log, "t")
        with Consumer(log, topic, "s", "earliest") as consumer:
            for _ in range(24):
                with contextlib.suppress(*self.passing, FencedError):
                    self._poll(consumer, topic)
                    if self.chance(0.8):
                        self._commit_and_go_back(consumer, topic)
                    else:
                        consumer.commit()

    def delete(self) -> None:
        """Deletes the consumer, with its members or only without."""
        log = self._log()
        topic = find_topic(log, "t")
        for _ in range(6):
            log.clock.sleep(self.random.uniform(0, 6))
            with contextlib.suppress(*self.passing, InvalidError, NotFoundError):
                delete_consumer(log, topic, "c", force=self.chance(0.7))

    def check_after(self) -> None:
        incarnation = self.ledger.bare.topics()["t"]["incarnation"]
        if self.ledger.consumer_state(incarnation, "c") in ("deleting", "ending"):
            in_peace(self, "deleter", self._finish_delete, PEACE_S)
        super().check_after()

    def _finish_delete(self, log: Log) -> None:
        """Ends what other calls have begun, either way: no force is needed."""
        with contextlib.suppress(InvalidError):
            delete_consumer(log, find_topic(log, "t"), "c")
        state = self.ledger.consumer_state(find_topic(log, "t").incarnation, "c")
        assert state in ("ready", "deleted"), f"the consumer stays {state}"

    def take_part(self) -> None:
        """Polls a few events at a time; a poll often begins without a lease and ends with one."""
        log = self._log()
        topic = find_topic(log, "t")
        consumer = Consumer(log, topic, "c", "earliest")
        for _ in range(24):
            deleted = (NotFoundError,) if self.deletes else ()  # no one joins while it is deleted
            with contextlib.suppress(*self.passing, FencedError, *deleted):
                events = consumer.poll(self.random.randint(1, 2), self.random.uniform(0, 6))
                self.ledger.deliver("c", topic.incarnation, events)
                if self.chance(0.7):
                    consumer.commit()
            is_slow = self.chance(0.2)
            log.clock.sleep(self.random.uniform(4, 9) if is_slow else self.random.uniform(0, 1))
        consumer.close()
