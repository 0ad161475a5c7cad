"""Stores and catalogs that fail like networks, servers and machines do.

The fault model. Each call may, by the seed or by a script:

- *lose the request*: nothing happens, and the caller times out;
- *lose the reply*: it takes effect, and the caller cannot know;
- *duplicate*: it takes effect, and again at a later call, like a repeated packet;
- *delay*: other actors run between the request and its effect, and between effect and reply;
- *stall*: the same, for longer than leases last;
- *cut off*: the request arrives or not, the reply does not, and every further call of the same
  process fails for up to ``stall_s`` (with a scheduler), like behind a broken switch;
- *freeze*: all threads of the calling process stop for that long, like by SIGSTOP or a full swap;
- *try again*: the server refuses for now and nothing happens (S3's 409 to a conditional write
  during another one, DynamoDB's throttling);
- *deny*: the server refuses for good and nothing happens, like with credentials that have expired
  or a permission that was revoked, although it may accept the next call;
- *list stale*: a listing shows the store as it was a few writes ago (stores only);
- *crash*: the caller's process dies before the effect, or after it and before the reply.

Scans and listings come in pages of a few rows (``page_rows``), each a separate call: writes between
two pages are seen in part, as with DynamoDB, CQL and S3.

What does not happen here: bytes that rot (tests damage objects by hand), and a catalog with wrong
answers. A lost reply goes through the same settling as in the network backends, so a protocol sees
what it would see in production: done, or an unknown outcome.

**Hosts and processes** are simulated. Each host has its own wall clock, which may be wrong by a
year and may jump, and its own monotonic clock, which is accurate from its own origin. A process
runs on one host, has threads (actors of the scheduler) and dies as a whole: by a crash of one of
its threads, by :meth:`Process.kill`, or when its main thread returns. Processes on the same host
can see that it has died, like :class:`tidelog.concurrency.LocalProcesses` does; others cannot.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TypeVar

from tidelog.catalog.base import Catalog, Change, Row
from tidelog.catalog.update import LostReplyError, Repeat, read_repeated, write_settled
from tidelog.clock import Clock
from tidelog.concurrency import Processes
from tidelog.errors import InvalidError, TidelogError, UnavailableError, UnknownOutcomeError
from tidelog.model.times import Backoff
from tidelog.store.base import ObjectInfo, Store, Upload
from tidelog.testing.scheduler import Actor, ActorGroup, Crash, FakeClock, Scheduler

__all__ = ["Fault", "Faults", "FaultyCatalog", "FaultyStore", "Host", "Process"]

T = TypeVar("T")

_SNAPSHOTS = 8  # how many writes back a stale listing may look


class Fault(Enum):
    """What goes wrong with one call."""

    NONE = "none"
    LOSE_REQUEST = "lose request"
    LOSE_REPLY = "lose reply"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    STALL = "stall"
    FREEZE = "freeze"
    TRY_AGAIN = "try again"
    DENY = "deny"
    CUT_OFF = "cut off"
    STALE_LIST = "stale list"
    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"


@dataclass
class Faults:
    """Decides, call by call, what goes wrong, and counts it.

    ``rates`` has probabilities by kind. ``script`` comes first: its faults hit the next calls of
    the named verb. ``crash_after_call`` stops the world after the effect of the n-th call. A stall
    takes up to ``stall_s``. With ``page_rows``, most scans and listings come in pages of at most
    this many rows. At each call, one of the repeated packets arrives with probability
    ``late_rate``.
    """

    random: random.Random = field(default_factory=lambda: random.Random(0))
    rates: Mapping[Fault, float] = field(default_factory=dict)
    scheduler: Scheduler | None = None
    crash_after_call: int | None = None
    stall_s: float = 30.0
    page_rows: int | None = None
    late_rate: float = 0.5
    script: deque[tuple[str, Fault]] = field(default_factory=deque)
    counts: Counter[Fault] = field(default_factory=Counter)
    calls: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)
    _cut_until_s: dict[ActorGroup, float] = field(default_factory=dict)

    def on_next(self, verb: str, *faults: Fault) -> None:
        """Makes these faults hit the next calls of a verb, in this order."""
        self.script.extend((verb, fault) for fault in faults)

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        """Runs ``effect`` with its faults; ``lost`` makes the error of a lost call."""
        self.calls += 1
        crash = self.crash_after_call is not None and self.calls >= self.crash_after_call
        fault = Fault.CRASH_AFTER if crash else self._choose(verb)
        self.counts[fault] += 1
        self._pause(f"{verb} {fault.value}")
        self._deliver_late()
        if fault is Fault.CRASH_BEFORE:
            raise self._crash()
        if fault is Fault.LOSE_REQUEST or self._is_cut_off():
            raise lost()
        if fault is Fault.TRY_AGAIN:
            raise _refusal(verb)
        if fault is Fault.DENY:
            raise InvalidError(f"{verb}: the credentials have expired (injected): renew them")
        if fault is Fault.CUT_OFF:
            self._cut_off()
            fault = self.random.choice([Fault.LOSE_REQUEST, Fault.LOSE_REPLY])
            if fault is Fault.LOSE_REQUEST:
                raise lost()
        self._hold_up(verb, fault)
        if fault is Fault.DUPLICATE:
            self.late.append(lambda: _run_unheard(effect))
        if fault is Fault.CRASH_AFTER:
            _run_unheard(effect)
            raise self._crash()
        if fault is Fault.LOSE_REPLY:
            _run_unheard(effect)
            raise lost()
        result = effect()
        self._hold_up(f"{verb} reply", fault)
        return result

    def heal(self) -> None:
        """Ends all faults; packets sent twice before that may still arrive."""
        self.rates, self.page_rows = {}, None
        self.script.clear()
        self._cut_until_s.clear()

    def page(self) -> int | None:
        """Returns the number of rows in the next page of a scan or listing; None for the rest."""
        if self.page_rows is None or self.random.random() < 0.3:
            return None
        return self.random.randint(1, self.page_rows)

    def stale(self, verb: str) -> bool:
        """Returns whether this listing is stale."""
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

    def _hold_up(self, label: str, fault: Fault) -> None:
        """Delays before the effect, and again before the reply."""
        if fault is Fault.DELAY:
            self._pause(f"{label} delayed")
        elif fault in (Fault.STALL, Fault.FREEZE) and self.scheduler is not None:
            # Rarely long: most stalls are about as long as a lease, where it matters most.
            seconds = self.stall_s * self.random.random() ** 2
            (self.scheduler.sleep if fault is Fault.STALL else self.scheduler.freeze)(seconds)

    def _cut_off(self) -> None:
        """Makes the calls of this process fail for a while."""
        if self.scheduler is not None and self.scheduler.current is not None:
            until_s = self.scheduler.time.monotonic_s() + self.stall_s * self.random.random() ** 2
            self._cut_until_s[self.scheduler.current.group] = until_s

    def _is_cut_off(self) -> bool:
        if not self._cut_until_s or self.scheduler is None or self.scheduler.current is None:
            return False
        until_s = self._cut_until_s.get(self.scheduler.current.group, 0.0)
        return until_s > self.scheduler.time.monotonic_s()

    def _crash(self) -> Crash:
        return Crash() if self.scheduler is None else self.scheduler.crash()

    def _deliver_late(self) -> None:
        if self.late and self.random.random() < self.late_rate:
            self.late.pop(self.random.randrange(len(self.late)))()


class FaultyCatalog:
    """A catalog behind a bad network."""

    def __init__(
        self, inner: Catalog, faults: Faults, clock: Clock | None = None, attempts: int = 3
    ) -> None:
        self.inner = inner
        self.faults = faults
        self._repeat = Repeat(clock or FakeClock(), faults.random, Backoff(attempts=attempts))

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
        left = limit
        while True:
            rows = self.faults.page()
            size = rows if left is None else left if rows is None else min(rows, left)
            found = self._scan_once(partition, start, end, size, reverse)
            yield from found
            left = None if left is None else left - len(found)
            if rows is None or len(found) < rows or left == 0:
                return
            start, end = (start, found[-1].row) if reverse else (found[-1].row + "\0", end)

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

    def _scan_once(
        self, partition: str, start: str, end: str | None, limit: int | None, reverse: bool
    ) -> list[Row]:
        def page() -> list[Row]:
            return list(self.inner.scan(partition, start, end, limit, reverse))

        return read_repeated(
            lambda: self.faults.call("scan", page, lambda: _silent(partition)), self._repeat
        )

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
            yield from [i for i in old if i.key.startswith(prefix) and i.key > start_after]
            return
        while True:
            rows = self.faults.page()
            found = self._list_once(prefix, start_after, rows)
            yield from found
            if rows is None or len(found) < rows:
                return
            start_after = found[-1].key

    def uploads(self) -> Iterator[Upload]:
        return self.inner.uploads()

    def abort_uploads(self, before_ms: int) -> int:
        return self.inner.abort_uploads(before_ms)

    def presign(self, key: str, expires_s: int) -> str:
        return self.inner.presign(key, expires_s)

    def _list_once(self, prefix: str, start_after: str, rows: int | None) -> tuple[ObjectInfo, ...]:
        return self.faults.call(
            "list",
            lambda: tuple(islice(self.inner.list(prefix, start_after), rows)),
            lambda: _silent(prefix),
        )

    def _write(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        self._remember()
        return self.faults.call(verb, effect, lambda: _unsure(key))

    def _remember(self) -> None:
        self._listings.append(list(self.inner.list()))


def _run_unheard(effect: Callable[[], object]) -> None:
    """Runs it without waiting for the answer, whether a result or an error."""
    with contextlib.suppress(TidelogError):
        effect()


def _refusal(verb: str) -> UnavailableError:
    return UnavailableError(f"{verb}: refused for now (injected): try again")


def _silent(what: str) -> UnavailableError:
    return UnavailableError(f"`{what}`: no answer (injected): try again")


def _unsure(key: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(f"object `{key}`: the reply was lost (injected): read it back")


_catalog: Callable[[Catalog, Faults], Catalog] = FaultyCatalog
_store: Callable[[Store, Faults], Store] = FaultyStore


_YEAR_S = 365 * 86_400


class Host:
    """A machine: a wall clock, and the processes that run on it."""

    def __init__(self, scheduler: Scheduler, name: str, ahead_s: float = 0.0) -> None:
        self.scheduler = scheduler
        self.name = name
        self.ahead_s = ahead_s  # how far its wall clock is ahead of the true time
        self.booted_s = scheduler.random.uniform(-_YEAR_S, 0)  # where its monotonic clock began
        self.processes: dict[int, Process] = {}
        self.clock: Clock = HostClock(self)

    @classmethod
    def seeded(cls, scheduler: Scheduler, name: str) -> Host:
        """Returns a host whose clock is right, or wrong by minutes up to a year, by the seed."""
        chance = scheduler.random
        scale_s = chance.choice([0, 0, 60, 3_600, 86_400, _YEAR_S])
        return cls(scheduler, name, chance.uniform(-scale_s, scale_s))

    def jump(self, seconds: float) -> None:
        """Sets the wall clock forward or back, like an operator or a bad time server."""
        self.ahead_s += seconds

    def start(self, name: str, run: Callable[[Process], None]) -> Process:
        """Starts a process whose main thread calls ``run``."""
        process = Process(self, name, len(self.processes) + 1)
        self.processes[process.pid] = process
        process.begin(run)
        return process


class HostClock:
    """The clock that the processes of a host read."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def now_ms(self) -> int:
        return self._host.scheduler.time.now_ms() + int(self._host.ahead_s * 1000)

    def monotonic_s(self) -> float:
        return self._host.scheduler.time.monotonic_s() - self._host.booted_s

    def sleep(self, seconds: float) -> None:
        self._host.scheduler.sleep(seconds)


class Process(ActorGroup):
    """A process: a group of actors on a host."""

    def __init__(self, host: Host, name: str, pid: int) -> None:
        super().__init__()
        self.host = host
        self.name = name
        self.pid = pid
        self.ended = False  # its main thread has returned
        self.processes: Processes = ProcessMarks(self)

    @property
    def scheduler(self) -> Scheduler:
        return self.host.scheduler

    @property
    def clock(self) -> Clock:
        return self.host.clock

    @property
    def dead(self) -> bool:
        """Returns whether it was killed or has ended; it does nothing more."""
        return self.killed

    def begin(self, run: Callable[[Process], None]) -> Actor:
        """Starts the main thread; the other threads end with it."""

        def main() -> None:
            run(self)
            self.ended = True
            self.scheduler.kill_group(self)

        return self.scheduler.spawn(self.name, main, self)

    def kill(self) -> None:
        """Kills it: none of its threads does anything more."""
        self.scheduler.kill_group(self)

    @property
    def crashed(self) -> bool:
        """Returns whether it died before its main thread returned."""
        return self.killed and not self.ended


class ProcessMarks:
    """What a process knows about the processes on its own host."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def mark(self) -> str:
        return f"{self._process.host.name}|{self._process.pid}"

    def is_dead(self, mark: str) -> bool:
        host, _, pid = mark.partition("|")
        if host != self._process.host.name or not pid.isdecimal():
            return False
        other = self._process.host.processes.get(int(pid))
        return other is not None and other.dead


_clock: type[Clock] = HostClock
_marks: type[Processes] = ProcessMarks
