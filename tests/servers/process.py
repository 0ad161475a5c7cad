"""One server process: start it, wait until it answers, pause it, kill it, stop it.

Each process leads a group of its own, so that a signal also reaches what it started (a Spark
worker's executors), and dies with the test process (see `leash`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from tests.servers.base import ServerError

LEASH = Path(__file__).with_name("leash.py")
PROBE_PAUSE_SECONDS = 0.05
GROUP_END_SECONDS_MAX = 60.0
LOG_LINES_SHOWN = 40


class StartError(ServerError):
    """A server ended or kept silent while it was being started."""


@dataclass(frozen=True)
class Launch:
    """How to start a server, and how to know that it is up."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path  # the working folder, which also takes the log
    answers: Callable[[], bool]  # asks in the server's own protocol; an OSError means "not yet"
    start_seconds_max: float = 90.0
    stop_seconds_max: float = 5.0  # what it may take after SIGTERM before it gets SIGKILL

    @property
    def context(self) -> Path:
        """The file that takes what the server prints."""
        return self.folder / f"{self.name}.log"


class Process:
    """A server's process; `pause`, `kill` and `restart` are for tests of "the server is gone"."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process and of its group; raises ServerError when it is not running."""
        if self._running is None:
            raise ServerError(f"{self.launch.name}: is not running: start it first")
        return self._running.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; a paused one does."""
        return self._running is not None and self._running.poll() is None

    def start(self) -> None:
        """Start the process and return when it answers; raises StartError with its log's end."""
        self.spawn()
        self.wait_until_it_answers()

    def spawn(self) -> None:
        """Start the process without waiting; a running one stays as it is."""
        if self.alive:
            return
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        with self.launch.context.open("ab") as context:
            self._running = subprocess.Popen(
                [*leash, *self.launch.command],
                stdin=subprocess.DEVNULL,
                stdout=context,
                stderr=subprocess.STDOUT,
                cwd=self.launch.folder,
                env=dict(self.launch.environment),
                start_new_session=True,
            )

    def wait_until_it_answers(self) -> None:
        """Return when the server answers; stop it and raise StartError when it does not."""
        deadline = time.monotonic() + self.launch.start_seconds_max
        silence = "it gave no answer"
        while time.monotonic() < deadline:
            if self._running is None or self._running.poll() is not None:
                code = self._running.returncode if self._running else None
                self.stop()
                raise self._start_error(f"ended with exit code {code} while starting")
            try:
                if self.launch.answers():
                    return
            except (OSError, HTTPException, ValueError) as error:
                silence = f"last: {error!r}"
            time.sleep(PROBE_PAUSE_SECONDS)
        self.stop()
        raise self._start_error(f"no answer in {self.launch.start_seconds_max:.0f} s ({silence})")

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing is answered."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process and all it started at once, as a power cut would."""
        self._end(signal.SIGKILL, seconds_max=0.0)

    def stop(self) -> None:
        """Ask the process to end, then make it end; harmless when it has ended."""
        self._end(signal.SIGTERM, seconds_max=self.launch.stop_seconds_max)

    def restart(self) -> None:
        """Kill it if it runs, and start it again with the same ports and data folder."""
        self.kill()
        self.start()

    def log_tail(self) -> str:
        """The last lines that the server printed."""
        try:
            lines = self.launch.context.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-LOG_LINES_SHOWN:])

    def _end(self, first_signal: signal.Signals, seconds_max: float) -> None:
        if self._running is None:
            return
        group = self._running.pid
        if self._running.poll() is None:
            os.killpg(group, first_signal)
            os.killpg(group, signal.SIGCONT)  # a paused process cannot act on SIGTERM
            try:
                self._running.wait(seconds_max)
            except subprocess.TimeoutExpired:
                os.killpg(group, signal.SIGKILL)
                self._running.wait()
        self._running = None
        self._end_rest_of_group(group)

    def _end_rest_of_group(self, group: int) -> None:
        """Kill what the process started and left behind, until nobody is left."""
        deadline = time.monotonic() + GROUP_END_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(0.01)
        raise ServerError(
            f"{self.launch.name}: process group {group} outlives SIGKILL: look for it with ps"
        )

    def _start_error(self, happened: str) -> StartError:
        return StartError(
            f"{self.launch.name}: {happened}: the end of its log says why\n{self.log_tail()}"
        )


@contextmanager
def started(launch: Launch) -> Iterator[Process]:
    """A process that answers, stopped at the end."""
    process = Process(launch)
    try:
        process.start()
        yield process
    finally:
        process.stop()
