"""Keeps programs running: started, watched, started again when they end, and stopped together.

A program that ends is started again after a wait that doubles from half a second to half a minute;
one that has run for a while begins with short waits again. What it prints comes line by line to
whoever asked. Each program leads a process group, so that a signal for us alone does not reach it
and what it started dies with it; that it dies with us is its own work (see
``cli/child_process.py``), for which programs must be started from the thread that lives longest.

Stopping: every program gets SIGTERM, and SIGKILL, with its whole group, when the grace is over.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple

from tidelog.clock import Clock
from tidelog.model.backoff import Backoff

__all__ = ["Program", "ProgramState", "Supervisor"]

_BACKOFF = Backoff(attempts=1_000, base_ms=500, max_ms=30_000)
_SETTLED_S = 30.0  # a program that ran this long is not failing
_PIPES_S = 10.0  # that the last lines of a dead program may take
_POLL_S = 0.1  # between looks at the processes


@dataclass(frozen=True, slots=True)
class Program:
    """Something to keep running."""

    name: str
    command: Sequence[str]


class ProgramState(NamedTuple):
    """How a program is."""

    name: str
    state: str  # starting, running, failed, stopped
    pid: int
    restarts: int
    error: str  # the last line that it complained with before it ended


class _OutputLine(NamedTuple):
    child: _Child
    text: str
    is_complaint: bool


@dataclass(eq=False)
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    readers: list[threading.Thread] = field(default_factory=list)
    began_s: float = 0.0
    due_s: float | None = 0.0  # when to start it; None while it runs, or after a stop
    failures: int = 0  # in a row
    starts: int = 0
    complaint: str = ""


class Supervisor:
    """Keeps programs running while :meth:`tick` is called, from one thread, until :meth:`stop`.

    ``on_change`` is told of each start and end, ``on_line`` of each line: the program's name, the
    line, and whether it is a complaint (standard error).
    """

    def __init__(
        self,
        clock: Clock,
        random: random.Random,
        on_change: Callable[[ProgramState], None],
        on_line: Callable[[str, str, bool], None],
        grace_s: float = 30.0,
    ) -> None:
        self._clock = clock
        self._random = random
        self._on_change = on_change
        self._on_line = on_line
        self._grace_s = grace_s
        self._children: dict[str, _Child] = {}
        self._lines: queue.Queue[_OutputLine] = queue.Queue()

    def add(self, program: Program) -> None:
        """Keep this one too; it is started by the next tick."""
        self._children[program.name] = _Child(program)

    def change(self, program: Program) -> None:
        """How a program is to be started the next time."""
        self._children[program.name].program = program

    def tick(self, wait_s: float = _POLL_S) -> None:
        """Start what is due, hear what was said, and see who has ended."""
        for child in self._children.values():
            if child.due_s is not None and self._clock.monotonic_s() >= child.due_s:
                self._start(child)
        self._hear(wait_s)
        for child in self._children.values():
            if child.process is not None and child.process.poll() is not None:
                self._ended(child, child.process)

    def stop(self) -> None:
        """Ask all to end, and see to it that they do; those that have ended stay ended."""
        running = [each for each in self._children.values() if each.process is not None]
        for child in self._children.values():
            child.due_s = None
        for child in running:
            _signal(child, signal.SIGTERM)
        deadline_s = self._clock.monotonic_s() + self._grace_s
        while any(_is_alive(each) for each in running):
            if self._clock.monotonic_s() >= deadline_s:
                break
            self._hear(_POLL_S)
        self.kill()
        for child in running:
            for reader in child.readers:
                reader.join(_PIPES_S)
        self._hear(0)
        for child in running:
            child.process = None
            self._on_change(self._running(child, "stopped"))

    def kill(self) -> None:
        """End all at once, with what they started."""
        for child in self._children.values():
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()

    def _start(self, child: _Child) -> None:
        child.due_s, child.complaint = None, ""
        child.began_s = self._clock.monotonic_s()
        child.starts += 1
        try:
            process = subprocess.Popen(  # noqa: S603 - a command of our own
                child.program.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:  # no memory or process to be had: later, perhaps
            child.complaint = str(exc)
            self._again(child)
            return
        child.process = process
        child.readers = [
            self._reading(child, process.stdout, False),
            self._reading(child, process.stderr, True),
        ]
        self._on_change(self._running(child, "running"))

    def _reading(
        self, child: _Child, pipe: IO[bytes] | None, is_complaint: bool
    ) -> threading.Thread:
        def read() -> None:
            for line in pipe or ():
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._lines.put(_OutputLine(child, text, is_complaint))
            if pipe is not None:
                pipe.close()

        thread = threading.Thread(target=read, name=f"tidelog-{child.program.name}", daemon=True)
        thread.start()
        return thread

    def _hear(self, wait_s: float) -> None:
        """All lines that are there, after waiting for one."""
        with contextlib.suppress(queue.Empty):
            line = self._lines.get(timeout=wait_s) if wait_s else self._lines.get_nowait()
            while True:
                if line.is_complaint:
                    line.child.complaint = line.text
                self._on_line(line.child.program.name, line.text, line.is_complaint)
                line = self._lines.get_nowait()

    def _ended(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind
        for reader in child.readers:
            reader.join(_PIPES_S)
        self._hear(0)
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        child.complaint = child.complaint or f"ended with {how}"
        self._again(child)

    def _again(self, child: _Child) -> None:
        now_s = self._clock.monotonic_s()
        child.failures = 0 if now_s - child.began_s >= _SETTLED_S else child.failures + 1
        ceiling = replace(_BACKOFF, attempts=2, base_ms=_wait_ms(child.failures))
        child.due_s = now_s + next(ceiling.delays_s(self._random))
        child.process = None
        self._on_change(self._running(child, "failed"))

    def _running(self, child: _Child, state: str) -> ProgramState:
        pid = child.process.pid if child.process is not None and state == "running" else 0
        error = child.complaint if state == "failed" else ""
        return ProgramState(child.program.name, state, pid, max(0, child.starts - 1), error)


def _wait_ms(failures: int) -> int:
    return min(_BACKOFF.max_ms, _BACKOFF.base_ms << max(0, min(failures, 16) - 1))


def _is_alive(child: _Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process is not None:
        child.process.send_signal(number)
