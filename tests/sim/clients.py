"""The log as its clients see it: the public ``Producer`` and ``Consumer`` with their threads.

Each seed starts some of these kinds of processes, on hosts whose clocks differ: senders whose
threads share an unnamed producer; two living processes under one producer name, with sequences of
their own or numbered by the producer; servers that repeat requests under idempotency keys; a
consumer whose members come, go and stall; members that seek; one-shot readers; a sweeper; a
trimmer; and notifiers, whose target fails. In every fourth world there are senders that rely on
``flush`` and ``close``; in every eighth there are more servers, and sweepers on a host whose clock
is weeks ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from tests.sim.audit import AuditedCatalog
from tests.sim.base import RATES, SimWorld, check_swept, in_peace
from tests.sim.flushers import send_and_flush
from tests.sim.ledger import Ledger, Place
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log import late_readers
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import BeforeTime, KeepBytes, ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.notifier import Notification, Notifier, repair
from tidelog.log.producer.flush import SendFuture
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.producer.producer import Producer
from tidelog.log.topics import create_topic, find_topic
from tidelog.model.event import Event, Position
from tidelog.model.topic import Topic
from tidelog.settings import LogSettings
from tidelog.testing.faults import Fault, Host

__all__ = ["ClientsWorld", "DeniedWorld", "LossyWorld"]

PARTITIONS = 2
KEYS = 4  # idempotency keys
WEEK_S = 7 * 24 * 3600
PEACE_S = 120.0  # how long what was left behind may delay those who come after


class ClientsWorld(SimWorld):
    """One seed's world of clients."""

    restarts_max = 8
    breaks_off = False  # whether consumers leave their loops in the middle of a batch
    catalog = AuditedCatalog
    passing: tuple[type[TidelogError], ...] = (
        UnavailableError,
        UnknownOutcomeError,
        ConflictError,
    )
    not_stored: tuple[type[TidelogError], ...] = (UnavailableError, ConflictError, NotFoundError)

    def __init__(self, seed: int) -> None:
        super().__init__(seed, self.catalog)
        self.ledger = Ledger(self.rows, self.objects, PARTITIONS)
        self.has_wrong_year = seed % 8 == 7
        self.has_flushers = seed % 4 == 1
        self.create(self._quiet)

    def settings(self) -> LogSettings:
        """Small buffers, so that producers wait for room."""
        return LogSettings(
            lease_ttl_ms=3_000,
            max_poll_interval_ms=4_000,
            segment_bytes=400,
            buffer_bytes=600,
            event_bytes_max=300,
        )

    def create(self, context: Context) -> Topic:
        wanted = Topic("t", context.ids.new(), PARTITIONS, 0, notify=("sim:",), max_latency_ms=500)
        return create_topic(context, wanted)

    def spawn_all(self) -> None:
        kinds: list[Callable[[], None]] = [
            lambda: self._start("sender", self.send, 2),
            lambda: self._start("sequenced", self.send_sequenced, 2),
            lambda: self._start("numbered", self.send_numbered, 2),
            lambda: self._start("server", self.serve, 3),
            lambda: self._start("spreader", self.spread, 1),
        ]
        others: list[Callable[[], None]] = [
            lambda: self._start("seeker", self.seek, 2),
            lambda: self._start("one-shot", self.read_once, 2),
            lambda: self._start("trimmer", self.trim, 1),
        ]
        for start in self.random.sample(kinds, 2):
            start()
        self._start("consumer", self.consume, self.random.choice([2, 3]))
        for start in self.random.sample(others, 1):
            start()
        self._start("sweeper", self.sweep, 1)
        if self.has_flushers:
            self._start("flusher", partial(send_and_flush, self), 2)
        if self.has_wrong_year:
            self.start_wrong_year()

    def start_wrong_year(self) -> None:
        """More servers, and sweepers on a host whose clock is weeks ahead."""
        self._start("late server", self.serve, 3)
        ahead = Host(self.scheduler, "ahead")
        ahead.jump(self.random.uniform(1, 60) * WEEK_S)
        for number in range(2):
            self._spawn(f"hasty-{number}", self.sweep_often, ahead)

    def _start(self, name: str, run: Callable[[], None], count: int) -> None:
        for number in range(count):
            self._spawn(f"{name}-{number}", run)

    # Producers.

    def send(self) -> None:
        """Threads that share an unnamed producer; each waits for what it sent."""
        context = self._context()
        with self._notifier(context) as topic, self._closing(Producer(context, topic)) as producer:

            def work() -> None:
                for _ in range(self.random.randint(2, 5)):
                    how = self.random.choice([self._send_some, self._append, self._append_at])
                    how(producer, topic, self._values(self.random.randint(1, 3)))
                    context.clock.sleep(self.random.uniform(0, 1))

            self._in_threads(2, work)

    def _send_some(self, producer: Producer, topic: Topic, values: list[bytes]) -> None:
        """Again as long as the answer is that an event is not stored."""
        for _ in range(4):
            futures: list[tuple[bytes, SendFuture]] = []
            left: list[bytes] = []
            self.ledger.retry(values)  # from here on a crash leaves it open
            for value in values:
                key = value if self.chance(0.3) else None
                try:
                    futures.append((value, producer.send(value, key)))
                except self.not_stored:
                    left.append(value)
            for value, future in futures:
                left += self._settle(topic, [value], partial(_result, future))
            if not left:
                return
            values = left
        self.ledger.deny(values)

    def _append(self, producer: Producer, topic: Topic, values: list[bytes]) -> None:
        """Again as long as the answer is that some are not stored."""
        for _ in range(4):
            events = [Event(value, value if self.chance(0.3) else None) for value in values]
            values = self._settle(topic, values, partial(producer.append, events))
            if not values:
                return

    def _append_at(self, producer: Producer, topic: Topic, values: list[bytes]) -> None:
        """At an expected offset, which others may have taken."""
        partition = self.random.randrange(PARTITIONS)
        head = self.ledger.bare.head(topic.incarnation, partition)
        at = 0 if head is None else head["next"]
        events = [Event(value) for value in values]
        at_offset = partial(producer.append, events, partition=partition, expected_offset=at)
        self._settle(topic, values, at_offset)

    def _settle(
        self, topic: Topic, values: Sequence[bytes], call: Callable[[], Iterable[Position]]
    ) -> list[bytes]:
        """Book what a call answers; the values of which it says that they are not stored."""
        self.ledger.retry(values)
        denied: list[bytes] = []
        positions: Iterable[Position | None] = ()
        try:
            positions = call()
        except self.not_stored:
            denied = list(values)
        except UnknownOutcomeError:
            return []
        except PartialAppendError as exc:
            positions = exc.positions
            denied = [values[index] for index in exc.remainder]
        for value, position in zip(values, positions, strict=False):
            if position is not None:
                self.ledger.acknowledge(value, self._place(topic, position))
        self.ledger.deny(denied)
        return denied

    def spread(self) -> None:
        """Appends events without keys, one by one: every partition gets its share."""
        context = self._context()
        topic = find_topic(context, "t")
        with self._closing(Producer(context, topic)) as producer:
            found: list[int | None] = []  # the partition of each; None for one that failed
            for _ in range(4 * PARTITIONS):
                [value] = self._values(1)
                left = self._settle(topic, [value], partial(producer.append, [Event(value)]))
                place = self.ledger.acknowledged.get((topic.incarnation, value))
                found.append(None if left or place is None else place[1])
            for before, after in pairwise(found):  # a failed append has used up its turn
                assert before is None or before != after, f"skipped: {found}"

    def send_sequenced(self) -> None:
        """Sends sequences 0 to 9 under one name, beside another process that does the same."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(2):
            with (
                contextlib.suppress(FencedError, AlreadyExistsError),
                self._closing(Producer(context, topic, "sequenced")) as producer,
            ):
                self._send_sequences(context, topic, producer)
            context.clock.sleep(self.random.uniform(0, 3))

    def _send_sequences(self, context: Context, topic: Topic, producer: Producer) -> None:
        for sequence in range(10):
            value = f"s-{sequence}-{context.ids.new()}".encode()
            repeated = producer.is_stored(sequence)
            # One mark for all values of a sequence: their differences tell whose write has landed.
            mark = f"s-{sequence}".encode()
            position = producer.send(value, sequence=sequence, mark=mark).result()
            if not repeated:
                self.ledger.acknowledge(value, self._place(topic, position))
                continue
            found = self.ledger.values.get(self._place(topic, position), b"")
            assert found.startswith(f"s-{sequence}-".encode()), f"{sequence} is not at {position}"

    def send_numbered(self) -> None:
        """Threads that share a named producer, which numbers their events."""
        context = self._context()
        topic = find_topic(context, "t")
        with (
            contextlib.suppress(FencedError),
            self._closing(Producer(context, topic, "numbered")) as producer,
        ):

            def work() -> None:
                for _ in range(3):
                    values = self._values(self.random.randint(1, 4))
                    with contextlib.suppress(FencedError, UnavailableError):
                        futures = [(value, producer.send(value)) for value in values]
                        for value, future in futures:
                            self._settle(topic, [value], partial(_result, future))

            self._in_threads(3, work)

    def serve(self) -> None:
        """Requests with idempotency keys that other servers get too."""
        context = self._context()
        topic = find_topic(context, "t")
        for key in self.random.sample(range(KEYS), KEYS):
            chance = self.random.random()
            events = [
                Event(f"k-{key}-{n}".encode(), b"%d" % n if key % 2 else None) for n in (0, 1, 2)
            ]
            values = [event.value or b"" for event in events]
            for _ in range(4):
                denied = self._settle(
                    topic, values, partial(append_once, context, topic, f"key-{key}", events)
                )
                self.ledger.retry(denied)  # another server may store them
                if not denied and chance < 0.7:
                    break
                context.clock.sleep(self.random.uniform(0, 4))

    # Consumers.

    def consume(self, group: str = "c", seeks: bool = False) -> None:
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(2):
            consumer = Consumer(context, topic, group, "earliest")
            for _ in range(self.random.randint(3, 10)):
                with contextlib.suppress(*self.passing, FencedError):
                    self._poll(consumer, topic)
                    if seeks and self.chance(0.5):
                        self._commit_and_go_back(consumer, topic)
                    if seeks and self.chance(0.3):
                        self._seek(consumer, topic)
                    if self.chance(0.2):
                        context.clock.sleep(
                            self.random.uniform(2, 20)
                        )  # so slow that others take over
                    if self.chance(0.7):
                        consumer.commit()
                context.clock.sleep(self.random.uniform(0, 1))
            consumer.close()

    def seek(self) -> None:
        self.consume("s", seeks=True)

    def _poll(self, consumer: Consumer, topic: Topic) -> None:
        try:
            events = consumer.poll(self.random.randint(1, 6), self.random.uniform(0, 1.5))
        except NotFoundError as exc:  # trimmed: reported, and accepted here
            if "start" not in exc.context:
                raise
            partition, start = exc.context["partition"], exc.context["start"]
            self.ledger.accept_trim(consumer.name, topic.incarnation, partition, start)
            with contextlib.suppress(InvalidError):  # the lease may be another's by now
                consumer.seek(partition, start)
        else:
            self._deliver(consumer, topic, events)

    def _deliver(self, consumer: Consumer, topic: Topic, events: list[Event]) -> None:
        if not self.breaks_off:
            self.ledger.deliver(consumer.name, topic.incarnation, events)
            return
        for event in consumer.one_by_one(events):
            self.ledger.deliver(consumer.name, topic.incarnation, [event])
            if self.chance(0.2):
                break

    def _seek(self, consumer: Consumer, topic: Topic) -> None:
        partition = self.random.randrange(PARTITIONS)
        head = self.ledger.bare.head(topic.incarnation, partition)
        if head is not None:
            to = self.random.randint(head["start"], head["next"])
            self.ledger.seek(consumer.name, topic.incarnation, partition, to)
            with contextlib.suppress(InvalidError):  # not held, or trimmed meanwhile
                consumer.seek(partition, to)

    def _commit_and_go_back(self, consumer: Consumer, topic: Topic) -> None:
        """Commit, and seek back to the commit before it, whatever became of this one."""
        with consumer._lock:
            known = {p: held.lease.cursor for p, held in consumer._leases.held.items()}
        with contextlib.suppress(*self.passing):
            consumer.commit()
        for partition, to in known.items():
            self.ledger.seek(consumer.name, topic.incarnation, partition, to)
            with contextlib.suppress(InvalidError):  # not held, or trimmed meanwhile
                consumer.seek(partition, to)
                since = self.ledger.moves(consumer.name, topic.incarnation, partition)
                consumer.commit()
                found = self.ledger.moves(consumer.name, topic.incarnation, partition)
                assert to in found[len(since) - 1 :], f"the commit of a seek to {to} wrote nothing"

    def read_once(self) -> None:
        """A function that is woken now and then, in a new process each time."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(6):
            with contextlib.suppress(*self.passing, FencedError):
                self._read_once(context, topic, wait_s=0.0)
            context.clock.sleep(self.random.uniform(0, 3))

    def _read_once(
        self, context: Context, topic: Topic, wait_s: float, slow_rate: float = 0.05
    ) -> bool:
        consumer = Consumer(context, topic, "o", "earliest")

        def handle(event: Event) -> None:
            self.ledger.deliver("o", topic.incarnation, [event])
            if self.chance(slow_rate):
                context.clock.sleep(10)

        done = []
        for partition in range(PARTITIONS):
            try:
                read = consumer.read_once(partition, 3, handle, wait_s=wait_s)
            except NotFoundError as exc:
                if "start" not in exc.context:
                    raise
                # A one-shot reader cannot seek: it accepts the loss as a member.
                with contextlib.suppress(InvalidError):
                    self.ledger.seek("o", topic.incarnation, partition, exc.context["start"])
                    consumer.seek(partition, exc.context["start"])
                    consumer.commit()
                done.append(False)
            else:
                done.append(bool(read["done"]))
        consumer.close()
        return all(done)

    # Upkeep.

    def sweep(self) -> None:
        context = self._context()
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 6))
            with contextlib.suppress(*self.passing):
                report = sweep_home(context, self.random.choice([1, 5_000]))
                check_swept(report, *self.passing)

    def sweep_often(self) -> None:
        """On a host whose clock is weeks ahead."""
        for _ in range(3):
            self.sweep()

    def trim(self) -> None:
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 6))
            with contextlib.suppress(*self.passing):
                if self.chance(0.5):
                    trim_topic(context, topic, self._trim_to(context, topic))
                else:
                    self._trim_with_care(context, topic)

    def _trim_with_care(self, context: Context, topic: Topic) -> None:
        """Trims unless that passes a reader; a reader that was there before is never passed."""
        cursors = self.ledger.cursors("c", topic.incarnation)
        check = partial(late_readers.check_readers, context, topic, False)
        with contextlib.suppress(InvalidError):
            for done in trim_topic(context, topic, self._trim_to(context, topic), check):
                now = self.ledger.cursors("c", topic.incarnation)
                if done.partition in cursors and done.partition in now:
                    allowed = max(done.old_start, now[done.partition])
                    assert done.new_start <= allowed, f"trimmed to {done.new_start}, read {allowed}"

    def _trim_to(self, context: Context, topic: Topic) -> ToOffsets | BeforeTime | KeepBytes:
        how = self.random.random()
        if how < 0.2:
            return BeforeTime(context.clock.now_ms() - 10_000)
        if how < 0.3:
            return KeepBytes(3_000)
        offsets = {}
        for partition in range(PARTITIONS):
            head = self.ledger.bare.head(topic.incarnation, partition)
            offsets[partition] = 0 if head is None else self.random.randint(0, head["next"] // 2)
        return ToOffsets(offsets)

    @contextlib.contextmanager
    def _notifier(self, context: Context) -> Iterator[Topic]:
        topic = find_topic(context, "t")
        notifier = Notifier(context, lambda _: Target(self, topic))
        notifier.watch(topic)
        yield topic
        notifier.close()

    # Checks.

    def check(self) -> None:
        self.ledger.check()

    def check_end(self) -> None:
        self.ledger.check_end()
        self.check_after()
        self.ledger.check_end()

    def check_after(self) -> None:
        """What those who come after must find, once the world is at peace."""
        incarnation = self.ledger.bare.topics()["t"]["incarnation"]
        in_peace(self, "drain", self._drain, PEACE_S)
        in_peace(self, "one-shot", self._drain_once, PEACE_S)
        in_peace(self, "repair", self._repair, PEACE_S)
        for group in ("c", "o"):
            missing = self.ledger.undelivered(group, incarnation)
            assert not missing, f"{missing} were never delivered to {group}"
        for partition in range(PARTITIONS):
            _, after = self.ledger.end(incarnation, partition)
            told = self.ledger.told.get((incarnation, partition), -1)
            assert told == after - 1, f"notified up to {told}, next is {after}"
        self._check_sequences(incarnation)
        report = verify_topic(self._quiet, find_topic(self._quiet, "t"))
        assert report.errors == 0, report.findings

    def _check_sequences(self, incarnation: str) -> None:
        """The events of a named producer are in the order of their sequences, each once."""
        last: dict[int, int] = {}
        for (found, partition, _), value in sorted(self.ledger.values.items()):
            if found == incarnation and value.startswith(b"s-"):
                sequence = int(value.split(b"-")[1])
                assert sequence > last.get(partition, -1), f"sequence {sequence} is stored again"
                last[partition] = sequence

    def _drain(self, context: Context) -> None:
        topic = find_topic(context, "t")
        with Consumer(context, topic, "c", "earliest") as consumer:
            while True:
                self._poll(consumer, topic)
                consumer.commit()
                if not self.ledger.undelivered("c", topic.incarnation):
                    return

    def _drain_once(self, context: Context) -> None:
        topic = find_topic(context, "t")
        while not self._read_once(context, topic, wait_s=10.0, slow_rate=0):
            context.clock.sleep(0.1)

    def _repair(self, context: Context) -> None:
        topic = find_topic(context, "t")
        target = Target(self, topic)
        while True:
            repaired = repair(context, topic, [target])
            if not repaired.waiting and not repaired.errors:
                return
            context.clock.sleep(1)

    def acknowledged(self) -> int:
        return len(self.ledger.acknowledged)

    # Inside.

    def _values(self, count: int) -> list[bytes]:
        return [f"v-{self._ids.new()}".encode() for _ in range(count)]

    def _place(self, topic: Topic, position: Position) -> Place:
        return (topic.incarnation, position.partition, position.offset)

    def _in_threads(self, count: int, work: Callable[[], None]) -> None:
        workers = [self.threads.Thread(work, f"worker{n}") for n in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    @contextlib.contextmanager
    def _closing(self, producer: Producer) -> Iterator[Producer]:
        """Close it in the end; what close raises was told to the threads that waited."""
        yield producer
        with contextlib.suppress(*self.passing, FencedError, AlreadyExistsError):
            producer.close()


class LossyWorld(ClientsWorld):
    """A worse network: what matters to consumers when reads fail beside a rebalance."""

    rates = {**RATES, Fault.LOSE_REQUEST: 0.12}  # noqa: RUF012 - as in its base

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.breaks_off = seed % 2 == 1

    def spawn_all(self) -> None:
        self._start("sender", self.send, 2)
        self._start("consumer", self.consume, 3)


class DeniedWorld(ClientsWorld):
    """Credentials expire now and then, often right after a lost reply."""

    rates = {**RATES, Fault.LOSE_REPLY: 0.1, Fault.DENY: 0.05}  # noqa: RUF012 - as in its base
    accepted = (*ClientsWorld.accepted, InvalidError)
    passing = (*ClientsWorld.passing, InvalidError)
    not_stored = (*ClientsWorld.not_stored, InvalidError)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.has_all = seed % 2 == 0

    def spawn_all(self) -> None:
        if self.has_all:
            super().spawn_all()
            return
        self._start("sender", self.send, 2)
        self._start("server", self.serve, 2)
        self._start("consumer", self.consume, 2)


def _result(future: SendFuture) -> list[Position]:
    return [future.result()]


class Target:
    """Gets notifications; fails now and then while the world does."""

    def __init__(self, world: ClientsWorld, topic: Topic) -> None:
        self._world = world
        self._topic = topic

    def send(self, notification: Notification) -> None:
        world = self._world
        world.scheduler.pause("notify")
        if world.faults.rates and world.chance(0.1):
            raise UnavailableError("target: no answer (injected): try again")
        world.ledger.tell(self._topic.incarnation, notification.partition, notification.offset)
        if world.faults.rates and world.chance(0.05):
            raise UnavailableError("target: the reply was lost (injected): try again")
