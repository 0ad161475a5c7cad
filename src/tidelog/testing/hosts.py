"""Simulated hosts and processes.

Each host has its own wall clock, which may be wrong by a year and may jump, and its own monotonic
clock, which is accurate from its own origin. A process runs on one host, has threads (actors of the
scheduler) and dies as a whole: by a crash of one of its threads, by :meth:`Process.kill`, or when
its main thread returns. Processes on the same host can see that it has died, like
:class:`tidelog.process.LocalProcesses` does; others cannot.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.clock import Clock
from tidelog.process import Processes
from tidelog.testing.scheduler import Actor, ActorGroup, Scheduler

__all__ = ["Host", "HostClock", "Process", "ProcessMarks"]

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
