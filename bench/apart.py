"""A contender in a process of its own, kept warm between its runs, with its peak of memory.

Spark has one session and one JVM in each process, and memory is that of a whole process tree: the
driver, its JVM, and the Python workers below that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_EVERY_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Apart:
    """Calls of one object's methods, in another process."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments))
        self._process.start()
        there.close()  # so that the end of the process is the end of the pipe

    def __call__(self, method: str, *arguments: Any) -> Any:
        """What the method gives back; an error over there is one here."""
        self._here.send((method, arguments))
        worked, answer = self._here.recv()
        if not worked:
            raise answer
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._here.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


def _serve(calls: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = make(*arguments)
    while (call := calls.recv()) is not None:
        try:
            calls.send((True, getattr(made, call[0])(*call[1])))
        except Exception as exc:  # noqa: BLE001 - told on the other side
            calls.send((False, RuntimeError(f"{type(exc).__name__}: {exc}")))
    made.close()


class Usage:
    """What a process and all below it used while it was watched; memory they share counts twice."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self.cpu_s = 0.0
        self.seconds = 0.0

    @property
    def cores(self) -> float:
        """How many cores were at work, on average."""
        return self.cpu_s / self.seconds


@contextlib.contextmanager
def measured(pid: int) -> Iterator[Usage]:
    """Look at a process tree before and after the body, without its peak of memory.

    This takes no time of the cores, of which :func:`watched` takes some.
    """
    usage, began, before = Usage(), time.perf_counter(), spent(pid)[1]
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - began
        usage.cpu_s = spent(pid)[1] - before


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Usage]:
    """Look at a process tree all the time while the body runs; what it used is known at the end."""
    usage, ended = Usage(), threading.Event()
    began = time.perf_counter()
    before, after = spent(pid)[1], 0.0

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            look()

    def look() -> None:
        nonlocal after
        size, seconds = spent(pid)
        usage.peak_mib = max(usage.peak_mib, size / (1 << 20))
        after = max(after, seconds)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - began
        ended.set()
        thread.join()
        look()
        usage.cpu_s = after - before


def spent(pid: int) -> tuple[int, float]:
    """Bytes in memory now, and processor seconds so far, of a process and all below it."""
    found: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                text = (folder / "stat").read_text()
                found[int(folder.name)] = text.rpartition(")")[2].split()
    family = {pid}
    while more := {each for each, stat in found.items() if int(stat[1]) in family} - family:
        family |= more
    stats = [found[each] for each in family if each in found]
    # Ticks of a process and of its children that have ended; resident pages.
    ticks = sum(int(tick) for stat in stats for tick in stat[11:15])
    return sum(int(stat[21]) for stat in stats) * _PAGE, ticks / _TICKS


def cores_note(used: Sequence[Usage], server: Sequence[Usage] = ()) -> str:
    """How many cores a contender used, and its server on the same machine.

    Where both use all cores, no further task can make it faster.
    """
    note = f"{_cores(used):.1f}"
    if server:
        note += f" + {_cores(server):.1f} of the server"
    return f"{note} of {os.cpu_count()} cores"


def _cores(used: Sequence[Usage]) -> float:
    return statistics.median(each.cores for each in used)


def timed(call: Callable[[], Any]) -> float:
    """How many seconds a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
