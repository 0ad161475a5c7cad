"""Wake readers of the same process as soon as something was committed, or amended.

Only a hint: whoever misses one finds the events by polling.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

__all__ = ["Wakeups"]


class Wakeups:
    """Who waits for which topic."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[threading.Event]] = {}
        self._listeners: list[Callable[[str, int, int], None]] = []
        self._amended: Counter[str] = Counter()
        self._newest: dict[tuple[str, int], int] = {}  # incarnation and partition → next offset
        self._lock = threading.Lock()

    def wait_on(self, incarnation: str, event: threading.Event) -> None:
        """Let ``event`` be set at each commit to the topic, until :meth:`forget`."""
        with self._lock:
            self._waiting.setdefault(incarnation, []).append(event)

    def forget(self, incarnation: str, event: threading.Event) -> None:
        with self._lock:
            waiting = self._waiting.get(incarnation, [])
            if event in waiting:
                waiting.remove(event)

    def listen(self, listener: Callable[[str, int, int], None]) -> None:
        """Call ``listener(incarnation, partition, next offset)`` after each commit."""
        self._listeners.append(listener)

    def committed(self, incarnation: str, partition: int, next_offset: int) -> None:
        """Tell all who wait."""
        with self._lock:
            key = (incarnation, partition)
            self._newest[key] = max(next_offset, self._newest.get(key, 0))
            waiting = list(self._waiting.get(incarnation, ()))
        for event in waiting:
            event.set()
        for listener in self._listeners:
            listener(incarnation, partition, next_offset)

    def newest(self, incarnation: str, partition: int) -> int:
        """The end of what this process has committed to a partition; 0 for nothing."""
        return self._newest.get((incarnation, partition), 0)

    def amended(self, incarnation: str) -> None:
        """Events of a topic were amended, here."""
        with self._lock:
            self._amended[incarnation] += 1

    def amendments(self, incarnation: str) -> int:
        """How often that was told; what was read before it last grew is old."""
        return self._amended[incarnation]
