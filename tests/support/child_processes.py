"""Workers that a test starts many of and kills: forked from a process that has loaded everything.

A forked worker needs no second to load its modules. A nursery is a module of its own, run by
``python -m``, that forks for each line it reads: by ``fork_workers``, or in its own way as
``tests.support.players`` does. A test starts it as a ``Nursery``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Nursery:
    """A module that runs and forks a worker for each line it reads. Close it in the end."""

    def __init__(self, module: str, environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: object) -> int:
        """Begin a worker; its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Wait for its end, and for that of the workers that still have its output."""
        self._process.communicate()


def is_alive(worker: int) -> bool:
    """Whether a worker has not ended yet, by whatever."""
    try:
        os.kill(worker, 0)
    except ProcessLookupError:
        return False
    return True


def fork_workers(work: Callable[..., object]) -> None:
    """The side of the nursery: ``work`` in a process of its own with the words of each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who were killed
    for line in sys.stdin:
        worker = os.fork()
        if worker == 0:
            os.close(0)
            try:
                work(*line.split())
            except BaseException:  # noqa: BLE001 - shown, and the test finds the worker gone
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(worker, flush=True)
