"""Keeps the programs of one ``tidelog up`` running, and records their state in the home.

A program that ends is started again after a wait that doubles from half a second to half a minute;
one that has run for a while begins with short waits again. Its output is passed on line by line.
Each program leads a process group, so that a signal for us alone does not reach it and what it
started dies with it. That it dies with us is its own work (``tidelog.__main__``), for which
programs must be started from the thread that lives longest. Stopping: every program gets SIGTERM,
and SIGKILL, with its whole group, when the grace is over.

The program that follows archives and pumps reports each of them as a part of its own, by JSON
lines; the server says where it listens. A thread writes the keeper's row, so that a catalog that is
out of reach holds nothing up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.context import Context
from tidelog.coordination.jobs import (
    BEAT_MS,
    Keeper,
    SupervisedPart,
    put_keeper,
    remove_keeper,
)
from tidelog.errors import FailedError, TidelogError
from tidelog.model.decoding import decode_json
from tidelog.model.times import Backoff

__all__ = ["Program", "ProgramState", "Supervisor", "UpSupervisor", "UpView"]

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
    """The state of a program."""

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

    Calls ``on_change`` at each start and end, and ``on_line`` with each line: the program's name,
    the line, and whether it came from standard error.
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
        """Adds a program, which the next tick starts."""
        self._children[program.name] = _Child(program)

    def change(self, program: Program) -> None:
        """Sets how a program is started the next time."""
        self._children[program.name].program = program

    def tick(self, wait_s: float = _POLL_S) -> None:
        """Starts what is due, passes on output, and notes which programs have ended."""
        for child in self._children.values():
            if child.due_s is not None and self._clock.monotonic_s() >= child.due_s:
                self._start(child)
        self._hear(wait_s)
        for child in self._children.values():
            if child.process is not None and child.process.poll() is not None:
                self._ended(child, child.process)

    def stop(self) -> None:
        """Asks all to end, and sees to it that they do; those that have ended stay ended."""
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
        """Kills all programs at once, with what they started."""
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
        """Waits for a line, and returns all lines that have come."""
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


_SERVE = "serve"
_ANNOUNCE_S = 2.0  # at most so often
_PARTS_MAX = 500  # in the row, which has a limit; those in trouble go first


@dataclass(frozen=True)
class _JsonLine:
    """A line of a program that was JSON."""

    fields: dict[str, object]

    def text(self, name: str) -> str:
        found = self.fields.get(name)
        return found if isinstance(found, str) else ""


class UpView(Protocol):
    """Shows the parts of one ``tidelog up``."""

    def say(self, text: str) -> None:
        """Shows a line for people."""

    def listening(self, url: str, is_open: bool) -> None:
        """Shows that the server has begun to listen."""

    def complain(self, name: str, text: str) -> None:
        """Shows what a part said on its standard error."""

    def changed(self, part: SupervisedPart, parts: Iterable[SupervisedPart]) -> None:
        """Shows that a part has changed; ``parts`` are all of them."""


class UpSupervisor:
    """Keeps programs running, shows them, and tells the home about them."""

    def __init__(self, context: Context, view: UpView, grace_s: float) -> None:
        self._context = context
        self._view = view
        self._parts: dict[str, SupervisedPart] = {}
        self._commands: dict[str, list[str]] = {}
        self.url = ""
        self._first_error = ""
        self._stopping = False
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._started_ms = context.clock.now_ms()
        self._id = context.ids.new()
        self._supervisor = Supervisor(
            context.clock, context.random, self._on_running, self._on_line, grace_s
        )

    def add(self, name: str, command: Sequence[str]) -> None:
        """Adds a program to keep running."""
        self._commands[name] = list(command)
        self._supervisor.add(Program(name, command))

    def run(self, stop: threading.Event, for_s: float | None = None) -> None:
        """Until told to stop, or for some seconds after the server has begun to listen.

        Call it from the main thread: programs die with the thread that started them.
        ``FailedError`` where the server cannot even start.
        """
        clock = self._context.clock
        ends_s: float | None = None
        announcing = threading.Thread(target=self._announce, name="tidelog-keeper", daemon=True)
        announcing.start()
        try:
            while not stop.is_set():
                self._supervisor.tick()
                if self._first_error and not self.url:
                    raise FailedError(self._first_error)
                if self.url and for_s is not None:
                    ends_s = clock.monotonic_s() + for_s if ends_s is None else ends_s
                    if clock.monotonic_s() >= ends_s:
                        break
            self._stopping = True
            self._view.say("Stopping: finishing the work in progress.")
            self._supervisor.stop()
        finally:
            self._supervisor.kill()  # no process is left, whatever has happened
            self._ended.set()
            self._changed.set()
            announcing.join(5.0)

    def parts(self) -> list[SupervisedPart]:
        """Returns all parts, programs first."""
        with self._lock:
            known = list(self._parts.values())
        return sorted(known, key=lambda part: (part.name not in self._commands, part.name))

    def _on_running(self, running: ProgramState) -> None:
        error = _message(running.error)
        if running.name == _SERVE and running.state == "failed":
            self._first_error = self._first_error or error
        before = self._parts.get(running.name)
        same = before is not None and before.state == running.state
        self._put(
            SupervisedPart(
                name=running.name,
                state=running.state,
                since_ms=before.since_ms if before and same else self._context.clock.now_ms(),
                pid=running.pid,
                restarts=running.restarts,
                error=error,
            )
        )

    def _on_line(self, name: str, text: str, is_complaint: bool) -> None:
        said = _said(text)
        if is_complaint:
            self._view.complain(name, _message(text))
        elif said is None:
            self._view.say(f"{name}: {text}")
        elif said.text("part"):
            own = {
                key: said.fields[key]
                for key in SupervisedPart.__struct_fields__
                if key in said.fields
            }
            with contextlib.suppress(msgspec.ValidationError):
                part = {**own, "name": said.text("part")}
                self._put(decode_json(msgspec.json.encode(part), SupervisedPart))
        elif name == _SERVE and said.text("url"):
            self._listening(said)
        elif "error" in said.fields:
            self._view.complain(name, _message(text))

    def _listening(self, said: _JsonLine) -> None:
        """Returns the server's address, which keeps the port that it got first."""
        if self.url:
            return
        self.url = said.text("url")
        command = self._commands[_SERVE]
        if not self.url.startswith("unix:"):
            command[command.index("--port") + 1] = self.url.rpartition(":")[2]
        self._supervisor.change(Program(_SERVE, command))
        self._view.listening(self.url, bool(said.fields.get("open")))
        self._changed.set()

    def _put(self, part: SupervisedPart) -> None:
        with self._lock:
            self._parts[part.name] = part
            is_gone = part.name not in self._commands and part.state == "stopped"
            if is_gone and not self._stopping:
                del self._parts[part.name]
        self._view.changed(part, self.parts())
        self._changed.set()

    # In the thread that tells the home.

    def _announce(self) -> None:
        context = self._context
        keeper = Keeper(
            id=self._id,
            host=socket.gethostname(),
            pid=os.getpid(),
            mark=context.processes.mark(),
            started_ms=self._started_ms,
            beat_ms=0,
        )
        while not self._ended.is_set():
            self._changed.clear()
            parts = sorted(self.parts(), key=lambda part: not part.error)[:_PARTS_MAX]
            now = msgspec.structs.replace(
                keeper, beat_ms=context.clock.now_ms(), url=self.url, parts=tuple(parts)
            )
            with contextlib.suppress(TidelogError):  # the next beat may come through
                put_keeper(context, now)
            if not self._ended.wait(_ANNOUNCE_S):
                self._changed.wait(BEAT_MS / 1000)
        with contextlib.suppress(TidelogError):
            remove_keeper(context, self._id)


def _said(text: str) -> _JsonLine | None:
    try:
        return _JsonLine(decode_json(text, dict[str, object]))
    except msgspec.MsgspecError:
        return None


def _message(text: str) -> str:
    """Returns the error in a program's line: the message of a JSON error, or the line as it is."""
    said = _said(text)
    error = said.fields.get("error") if said is not None else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return text.removeprefix("error: ")
