"""Members of one consumer that lose their leases and get them again, while reads fail.

In every fourth world the consumer is deleted by two processes at once, again and again, and its
name is used again. In every eighth a person is asked before: the delete then marks no consumer that
began after the question. In every fourth there are also members of another consumer, which seek
back to their last commit when they do not know what became of the next. In every eighth a person
moves the cursors of a consumer while another deletes it and jobs use its name again.
"""

from __future__ import annotations

import contextlib
import dataclasses

from tests.sim.base import RATES, in_peace
from tests.sim.clients import PARTITIONS, PEACE_S, ClientsWorld
from tidelog.api.consumers import ConsumerHandle
from tidelog.catalog.base import Change, Put, Row
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.context import Context
from tidelog.coordination.outcome import SentWrites, _TrackedCatalog
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.delete import consumer_version, delete_consumer
from tidelog.log.consumer.leases import Leases, RegisteredConsumer, decode_registered
from tidelog.log.consumer.seek import check_consumer
from tidelog.log.producer.append import Appender
from tidelog.log.topics import find_topic
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import decode_row
from tidelog.settings import LogSettings
from tidelog.testing.faults import Fault

__all__ = ["RebalanceWorld"]

EVENTS = 40  # of each partition, from the beginning


class StalledDeleteCatalog(_TrackedCatalog):
    """The catalog of a call that deletes a consumer which a person was asked about; it stalls."""

    def __init__(self, context: Context, world: RebalanceWorld, lives: range) -> None:
        super().__init__(context.catalog, SentWrites())
        self._clock = context.clock
        self._world = world
        self._lives = lives  # that it may have had when it was looked at

    def get(self, partition: str, row: str) -> Row | None:
        if row.startswith("consumer/") and self._world.chance(0.4):
            self._clock.sleep(self._world.random.uniform(0, 4))
        return super().get(partition, row)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        for change in changes:
            if isinstance(change, Put) and change.row.startswith("consumer/"):
                self._check(change)
        super().write(partition, *changes, write_id=write_id)

    def _check(self, change: Put) -> None:
        """P3: only the consumer that was asked about is marked; what is decided is finished."""
        if decode_row(change.value, RegisteredConsumer, "a consumer").state == "deleting":
            life = self._world.versions[str(change.expect)]
            assert life in self._lives, f"consumer {life} is deleted, asked about: {self._lives}"


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
        self.asks = seed % 8 == 6
        self.lives = 0  # how often the consumer was deleted
        self.versions: dict[str, int] = {}  # of its row in the registry, and how often before each
        self.seeks = seed % 4 == 3
        self.moves = seed % 8 == 4
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
        if self.asks:
            self._start("asker", self.ask_and_delete, 2)
        if self.seeks:
            self._start("seeker", self.go_back, 2)
        if self.moves:
            self._start("mover", self.move, 2)
            self._start("renewer", self.delete_and_renew, 2)

    def move(self) -> None:
        """Moves cursors of a consumer from outside, whether or not it is there now."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(48):
            context.clock.sleep(self.random.uniform(0, 0.5))
            partition, to = self.random.randrange(PARTITIONS), self.random.randrange(EVENTS)
            self.ledger.seek("m", topic.incarnation, partition, to)
            with contextlib.suppress(*self.passing, InvalidError, NotFoundError):
                check_consumer(context, topic, "m")
                ConsumerHandle(context, topic, "m").seek(to, partition)

    def delete_and_renew(self) -> None:
        """Deletes a consumer, and reads a little under its name."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(24):
            context.clock.sleep(self.random.uniform(0, 0.5))
            with contextlib.suppress(*self.passing, FencedError, InvalidError, NotFoundError):
                delete_consumer(context, topic, "m", force=True)
            with contextlib.suppress(*self.passing, FencedError, InvalidError, NotFoundError):
                member = Leases(context, topic, "m", "earliest")
                member.join()
                for partition in range(PARTITIONS):
                    member.take(partition, [member.id])
                member.leave()

    def go_back(self) -> None:
        """Polls and commits, and takes most commits back."""
        context = self._context()
        topic = find_topic(context, "t")
        with Consumer(context, topic, "s", "earliest") as consumer:
            for _ in range(72):
                with contextlib.suppress(*self.passing, FencedError):
                    self._poll(consumer, topic)
                    if self.chance(0.8):
                        self._commit_and_go_back(consumer, topic)
                    else:
                        consumer.commit()

    def delete(self) -> None:
        """Deletes the consumer, with its members or only without."""
        context = self._context()
        topic = find_topic(context, "t")
        rounds, apart_s = (12, 3) if self.asks else (6, 6)
        for _ in range(rounds):
            context.clock.sleep(self.random.uniform(0, apart_s))
            with contextlib.suppress(*self.passing, InvalidError, NotFoundError):
                delete_consumer(context, topic, "c", force=self.chance(0.7))
                if self.asks:  # a job uses the name again, for a moment
                    again = Leases(context, topic, "c", "earliest")
                    again.join()
                    again.leave()

    def ask_and_delete(self) -> None:
        """Looks at the consumer, waits for an answer, and deletes the one that it has seen."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(24):
            context.clock.sleep(self.random.uniform(0, 1))
            with contextlib.suppress(*self.passing, InvalidError, NotFoundError):
                before = self.lives
                shown = consumer_version(context, topic, "c")
                asked = StalledDeleteCatalog(context, self, range(before, self.lives + 1))
                context.clock.sleep(self.random.uniform(0, 1))
                noting = dataclasses.replace(context, catalog=asked)
                delete_consumer(noting, topic, "c", force=self.chance(0.8), shown=shown)

    def check(self) -> None:
        if self.asks:
            self._count_lives()
        super().check()

    def _count_lives(self) -> None:
        incarnation = self.ledger.bare.topics()["t"]["incarnation"]
        row = self.rows.get(layout.consumers_partition(incarnation), layout.consumer_row("c"))
        if row is not None and row.version not in self.versions:
            self.lives += decode_registered(row).state == "deleted"
            self.versions[row.version] = self.lives

    def check_after(self) -> None:
        incarnation = self.ledger.bare.topics()["t"]["incarnation"]
        if self.ledger.consumer_state(incarnation, "c") in ("deleting", "ending"):
            in_peace(self, "deleter", self._finish_delete, PEACE_S)
        super().check_after()

    def _finish_delete(self, context: Context) -> None:
        """Ends what other calls have begun, either way: no force is needed."""
        with contextlib.suppress(InvalidError):
            delete_consumer(context, find_topic(context, "t"), "c")
        state = self.ledger.consumer_state(find_topic(context, "t").incarnation, "c")
        assert state in ("ready", "deleted"), f"the consumer stays {state}"

    def take_part(self) -> None:
        """Polls a few events at a time; a poll often begins without a lease and ends with one."""
        context = self._context()
        topic = find_topic(context, "t")
        consumer = Consumer(context, topic, "c", "earliest")
        for _ in range(24):
            deleted = (NotFoundError,) if self.deletes else ()  # no one joins while it is deleted
            with contextlib.suppress(*self.passing, FencedError, *deleted):
                events = consumer.poll(self.random.randint(1, 2), self.random.uniform(0, 6))
                self.ledger.deliver("c", topic.incarnation, events)
                if self.chance(0.7):
                    consumer.commit()
            is_slow = self.chance(0.2)
            context.clock.sleep(self.random.uniform(4, 9) if is_slow else self.random.uniform(0, 1))
        consumer.close()
