"""A soak: producers, consumers, deletes, compiles and sweeps on a home whose servers fail.

What was acknowledged is compared in the end with what the home holds, by ``counting``. It is
bounded by what it does, not by time: a slow machine makes it longer, never different.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.counting import stored_events
from tests.support.waiting import until
from tidelog.catalog.base import Catalog
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.home import Home, open_home
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model.event import Event
from tidelog.store.base import Store

TOPIC = "orders"
PARTITIONS = 3
_ALWAYS = CompilePolicy(min_events=1, older_than_ms=0, min_amendments=1, amended_before_ms=0)
# What a caller must expect of a home whose servers fail; anything else is a fault of ours.
EXPECTED = (UnavailableError, UnknownOutcomeError, PartialAppendError, ConflictError)


@dataclass
class Soak:
    """What is done, and what was acknowledged."""

    config: str
    seed: int
    batches: int = 20
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    perhaps: set[bytes] = field(default_factory=set)
    deleted: set[bytes] = field(default_factory=set)
    perhaps_deleted: set[bytes] = field(default_factory=set)
    polled: Counter[bytes] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, calm: Callable[[], None]) -> None:
        """Work until all batches are done; ``calm`` then ends the faults."""
        workers = [
            self._start(lambda n=number: self._append(n))  # type: ignore[misc]
            for number in range(3)
        ]
        others = [
            self._start(each)
            for each in (self._consume, self._delete, self._keep, self._play, self._recreate)
        ]
        for worker in workers:
            worker.join()
        calm()
        self._stop.set()
        for other in others:
            other.join()
        for wrong in self.wrong:
            raise wrong

    def check(self, catalog: Catalog, store: Store) -> None:
        """Compare what was acknowledged with the bare rows and objects."""
        stored = stored_events(catalog, store, TOPIC)
        values = Counter(stored.values())
        lost = {
            place: value
            for place, value in self.acknowledged.items()
            if stored.get(place) != value and value not in self.deleted | self.perhaps_deleted
        }
        assert lost == {}
        assert [value for value, count in values.items() if count > 1] == []
        assert set(values) <= set(self.acknowledged.values()) | self.perhaps
        assert set(values) & self.deleted == set(), "deleted events are there"
        assert set(self.polled) <= set(self.acknowledged.values()) | self.perhaps
        left = set(values) - set(self.polled)
        assert left == set(), "events that no consumer was given"

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as exc:  # noqa: BLE001 - shown at the end
                self.wrong.append(exc)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _open(self) -> Home:
        """Opening meets the same faults."""
        opened: list[Home] = []

        def attempt() -> bool:
            try:
                opened.append(open_home(self.config))
            except EXPECTED:
                return False
            return True

        until(attempt)
        return opened[0]

    def _append(self, number: int) -> None:
        source = random.Random(self.seed * 100 + number)
        with self._open() as home:
            for batch in range(self.batches):
                names = [f"{number}/{batch}/{n}" for n in range(source.randint(1, 8))]
                self._append_batch(home, names)

    def _append_batch(self, home: Home, names: list[str]) -> None:
        events = [Event(name.encode(), name.encode(), id=name) for name in names]
        positions: list[object] = [None] * len(names)
        unsure = True
        try:
            positions = list(home.append(TOPIC, events))
        except PartialAppendError as exc:
            positions = exc.positions
        except UnavailableError:
            unsure = False  # it says that nothing was stored, and is held to it
        except UnknownOutcomeError:
            pass
        with self._lock:
            self.done["batches"] += 1
            for event, position in zip(events, positions, strict=True):
                value = event.value or b""
                if position is not None:
                    place = (position.partition, position.offset)  # type: ignore[attr-defined]
                    self.acknowledged[place] = value
                elif unsure:
                    self.perhaps.add(value)

    def _consume(self) -> None:
        """Poll until the work is done and the consumer has reached the end of every partition."""
        with self._open() as home, home.consumer(TOPIC, "billing") as consumer:
            while not self._stop.is_set():
                self._poll(consumer)
            until(lambda: self._poll(consumer) and self._has_caught_up(home), seconds=240)

    def _poll(self, consumer: Consumer) -> bool:
        """Poll and commit once; returns False if one of them failed."""
        try:
            events = consumer.poll(100, timeout_s=0.2)
            with self._lock:
                self.polled.update(event.value or b"" for event in events)
            consumer.commit()
        except (*EXPECTED, FencedError):
            self.done["failed polls"] += 1
            return False
        return True

    def _has_caught_up(self, home: Home) -> bool:
        lags = home.lag(TOPIC)
        return len(lags) == PARTITIONS and not any(lag.events for lag in lags)

    def _delete(self) -> None:
        source = random.Random(self.seed)
        with self._open() as home:
            while not self._stop.wait(0.02):
                with self._lock:
                    left = sorted(set(self.acknowledged.values()) - self.deleted)
                if not left:
                    continue
                value = source.choice(left)
                with self._lock:
                    self.perhaps_deleted.add(value)
                try:
                    home.delete(TOPIC, value.decode())
                except NotFoundError:
                    assert value in self.perhaps_deleted
                except EXPECTED:
                    self.done["failed deletes"] += 1
                    continue
                with self._lock:
                    self.deleted.add(value)

    def _play(self) -> None:
        """Every playback has each event once, and none that was deleted before it began."""
        with self._open() as home:
            while not self._stop.wait(0.05):
                with self._lock:
                    deleted, known = set(self.deleted), dict(self.acknowledged)
                    gone = set(self.perhaps_deleted)
                try:
                    played = Counter(event.value or b"" for event in home.playback(TOPIC))
                except EXPECTED:
                    self.done["failed playbacks"] += 1
                    continue
                assert [value for value, count in played.items() if count > 1] == []
                assert set(played) & deleted == set(), "a deleted event was played"
                with self._lock:
                    gone |= self.perhaps_deleted
                assert set(known.values()) - gone <= set(played), "an event was not played"
                self.done["playbacks"] += 1

    def _recreate(self) -> None:
        """A topic that comes, is trimmed, and goes; its name is free again every time."""
        with self._open() as home:
            number = 0
            while not self._stop.wait(0.05):
                number += 1
                self._patiently(lambda: home.create_topic("passing", 1), AlreadyExistsError)
                values = [b"%d/%d" % (number, n) for n in range(4)]
                self._patiently(lambda v=values: home.append("passing", map(Event, v)))  # type: ignore[misc]
                self._patiently(lambda: home.trim("passing", ToOffsets({0: 2})))
                found: list[bytes | None] = []

                def read(found: list[bytes | None] = found) -> None:
                    found[:] = [event.value for event in home.read("passing", 0, 2)]

                self._patiently(read)
                assert {value for value in found if value} <= set(values), found
                self._patiently(lambda: home.delete_topic("passing"), NotFoundError)
                self.done["topics"] += 1

    def _patiently(self, call: Callable[[], object], *fine: type[TidelogError]) -> None:
        """Call until it succeeds, or says that an earlier call had done it."""

        def attempt() -> bool:
            try:
                call()
            except fine:
                return True
            except EXPECTED:
                return False
            return True

        until(attempt)

    def _keep(self) -> None:
        with self._open() as home:
            while not self._stop.wait(0.05):
                try:
                    compile_topic(home.context, home.topic(TOPIC), _ALWAYS)
                    home.sweep(0)
                    self.done["turns"] += 1
                except EXPECTED:
                    self.done["failed turns"] += 1
