"""Stores and catalogs that fail as networks, servers and machines do.

The fault model. Each call may, by the seed or by a script:

- *lose the request*: nothing happens, and the caller waits in vain;
- *lose the reply*: it takes effect, and the caller cannot know;
- *duplicate*: it takes effect, and once more at some later call, as a repeated packet would;
- *delay*: other actors run between the request and its effect, and between effect and reply;
- *list stale*: a listing that shows the store as it was a few writes ago (stores only);
- *crash*: the caller dies before the effect, or after it and before the reply.

What does not happen here: bytes that rot (tests damage objects by hand), and a catalog that
answers wrongly. A lost reply goes through the same settling that the network backends use, so a
protocol above sees what it would see in production: done, or an unknown outcome.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from tidelog.catalog.base import Catalog, Change, Row
from tidelog.catalog.settle import LostReplyError, Repeat, read_repeated, write_settled
from tidelog.clock import Clock
from tidelog.errors import TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.model.backoff import Backoff
from tidelog.store.base import ObjectInfo, Store
from tidelog.testing.clock import FakeClock
from tidelog.testing.scheduler import Crash, Scheduler

__all__ = ["Fault", "Faults", "FaultyCatalog", "FaultyStore"]

T = TypeVar("T")

_SNAPSHOTS = 8  # how many writes back a stale listing may look


class Fault(Enum):
    """What goes wrong with one call."""

    NONE = "none"
    LOSE_REQUEST = "lose request"
    LOSE_REPLY = "lose reply"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    STALE_LIST = "stale list"
    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"


@dataclass
class Faults:
    """Decides, call by call, what goes wrong, and counts it.

    ``rates`` are probabilities by kind. ``script`` goes first: its faults hit the next calls of
    the named verb. ``crash_after_call`` stops the world after the effect of the n-th call.
    """

    random: random.Random = field(default_factory=lambda: random.Random(0))
    rates: Mapping[Fault, float] = field(default_factory=dict)
    scheduler: Scheduler | None = None
    crash_after_call: int | None = None
    script: deque[tuple[str, Fault]] = field(default_factory=deque)
    counts: Counter[Fault] = field(default_factory=Counter)
    calls: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)

    def on_next(self, verb: str, *faults: Fault) -> None:
        """Let these faults hit the next calls of a verb, in this order."""
        self.script.extend((verb, fault) for fault in faults)

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        """Run ``effect`` with whatever goes wrong; ``lost`` makes the error of a silent world."""
        self.calls += 1
        crash = self.crash_after_call is not None and self.calls >= self.crash_after_call
        fault = Fault.CRASH_AFTER if crash else self._choose(verb)
        self.counts[fault] += 1
        self._pause(f"{verb} {fault.value}")
        self._deliver_late()
        if fault is Fault.CRASH_BEFORE:
            raise Crash
        if fault is Fault.LOSE_REQUEST:
            raise lost()
        if fault is Fault.DELAY:
            self._pause(f"{verb} delayed")
        if fault is Fault.DUPLICATE:
            self.late.append(lambda: _unheard(effect))
        if fault is Fault.CRASH_AFTER:
            _unheard(effect)
            raise Crash
        if fault is Fault.LOSE_REPLY:
            _unheard(effect)
            raise lost()
        result = effect()
        if fault is Fault.DELAY:
            self._pause(f"{verb} reply delayed")
        return result

    def stale(self, verb: str) -> bool:
        """Whether this listing shall be an old one."""
        if self.script and self.script[0] == (verb, Fault.STALE_LIST):
            self.script.popleft()
        elif self.random.random() >= self.rates.get(Fault.STALE_LIST, 0.0):
            return False
        self.counts[Fault.STALE_LIST] += 1
        return True

    def _choose(self, verb: str) -> Fault:
        if self.script and self.script[0][0] == verb:
            return self.script.popleft()[1]
        chance = self.random.random()
        for fault, rate in self.rates.items():
            if fault is not Fault.STALE_LIST:
                chance -= rate
                if chance < 0:
                    return fault
        return Fault.NONE

    def _pause(self, label: str) -> None:
        if self.scheduler is not None:
            self.scheduler.pause(label)

    def _deliver_late(self) -> None:
        if self.late and self.random.random() < 0.5:
            self.late.pop(self.random.randrange(len(self.late)))()


class FaultyCatalog:
    """A catalog behind a bad network."""

    def __init__(self, inner: Catalog, faults: Faults, clock: Clock | None = None) -> None:
        self.inner = inner
        self.faults = faults
        self._repeat = Repeat(clock or FakeClock(), faults.random, Backoff(attempts=3))

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, partition: str, row: str) -> Row | None:
        return read_repeated(lambda: self._get_once(partition, row), self._repeat)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        def page() -> list[Row]:
            return list(self.inner.scan(partition, start, end, limit, reverse))

        yield from read_repeated(
            lambda: self.faults.call("scan", page, lambda: _silent(partition)), self._repeat
        )

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        def attempt() -> None:
            self.faults.call(
                "write",
                lambda: self.inner.write(partition, *changes, write_id=write_id),
                LostReplyError,
            )

        def read_version(row: str) -> str | None:
            found = self.get(partition, row)
            return found.version if found else None

        write_settled(attempt, read_version, partition, changes, write_id, self._repeat)

    def close(self) -> None:
        self.inner.close()

    def _get_once(self, partition: str, row: str) -> Row | None:
        return self.faults.call(
            "get", lambda: self.inner.get(partition, row), lambda: _silent(partition)
        )


class FaultyStore:
    """A store behind a bad network, whose listings may lag."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self._listings: deque[list[ObjectInfo]] = deque(maxlen=_SNAPSHOTS)

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, data: bytes) -> str:
        return self._write("put", key, lambda: self.inner.put(key, data))

    def replace(self, key: str, data: bytes, etag: str) -> str:
        return self._write("replace", key, lambda: self.inner.replace(key, data, etag))

    def copy(self, source: str, target: str) -> None:
        self._write("copy", target, lambda: self.inner.copy(source, target))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        self._remember()
        self.faults.call(
            "delete", lambda: self.inner.delete(wanted), lambda: _silent("delete of objects")
        )

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.faults.call(
            "get", lambda: self.inner.get(key, start, end), lambda: _silent(key)
        )

    def head(self, key: str) -> ObjectInfo:
        return self.faults.call("head", lambda: self.inner.head(key), lambda: _silent(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        if self._listings and self.faults.stale("list"):
            old = self.faults.random.choice(self._listings)
            return iter([i for i in old if i.key.startswith(prefix) and i.key > start_after])
        found = self.faults.call(
            "list", lambda: list(self.inner.list(prefix, start_after)), lambda: _silent(prefix)
        )
        return iter(found)

    def presign(self, key: str, expires_s: int) -> str:
        return self.inner.presign(key, expires_s)

    def _write(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        self._remember()
        return self.faults.call(verb, effect, lambda: _unsure(key))

    def _remember(self) -> None:
        self._listings.append(list(self.inner.list()))


def _unheard(effect: Callable[[], object]) -> None:
    """Let it happen; nobody waits for the answer, be it a result or a refusal."""
    with contextlib.suppress(TidelogError):
        effect()


def _silent(what: str) -> UnavailableError:
    return UnavailableError(f"`{what}`: no answer (injected): try again")


def _unsure(key: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(f"object `{key}`: the reply was lost (injected): read it back")


_catalog: Callable[[Catalog, Faults], Catalog] = FaultyCatalog
_store: Callable[[Store, Faults], Store] = FaultyStore
