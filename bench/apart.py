"""A contender in a process of its own, kept warm between its runs, with its peak of memory.

Spark has one session and one JVM in each process, and memory is that of a whole process tree: the
driver, its JVM, and the Python workers below that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_EVERY_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Apart:
    """Calls of one object's methods, in another process."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments))
        self._process.start()

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


@contextlib.contextmanager
def peak_of(pid: int) -> Iterator[Callable[[], float]]:
    """The greatest resident memory of a process and all below it while the body runs, in MiB."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            peak[0] = max(peak[0], resident(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak[0] / (1 << 20)
    finally:
        ended.set()
        thread.join()


def resident(pid: int) -> int:
    """Bytes in memory now, of a process and all below it; what they share counts each time."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                text = (folder / "stat").read_text()
                parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    family, size = {pid}, 0
    while more := {each for each, parent in parents.items() if parent in family} - family:
        family |= more
    for each in family:
        with contextlib.suppress(OSError):
            size += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
    return size


def timed(call: Callable[[], Any]) -> float:
    """How many seconds a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
