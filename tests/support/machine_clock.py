"""A clock that stops while the machine stalls: what a test measures by it is not the machine's."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PAUSE_S = 0.01
_STEP_S = 0.05  # a turn that takes longer was kept waiting by the machine
_WORK = bytes(1 << 20)


class MachineClock:
    """Counts the seconds in which a control beside the test makes progress.

    The control does again and again what a request needs: it waits, computes, and writes durably.
    Each turn counts as long as it takes, up to ``_STEP_S``. So on an idle machine this is the
    wall clock, and on one without a free processor or disk it runs slower.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "machine_clock"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.now_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            began_s = time.monotonic()
            while not self._stop.wait(_PAUSE_S):
                os.pwrite(file.fileno(), hashlib.sha256(_WORK).digest(), 0)
                os.fsync(file.fileno())
                ended_s = time.monotonic()
                self.now_s += min(ended_s - began_s, _STEP_S)
                began_s = ended_s
