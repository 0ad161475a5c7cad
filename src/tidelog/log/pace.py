"""How often a reader looks at a partition that has nothing new."""

from __future__ import annotations

__all__ = ["FIRST_S", "LAST_S", "Pace"]

FIRST_S = 0.02  # the wait after the first look that found nothing; it doubles from here
LAST_S = 1.0


class Pace:
    """When to look at one partition again. It outlives a single poll.

    A look is due at first, after a look that found events, and when this process has committed
    something new; else after a wait that doubles up to a second. So a quiet partition costs one
    read a second, whatever the time-outs of polls are.
    """

    def __init__(self) -> None:
        self._due_s: float | None = None  # None: at once
        self._wait_s = FIRST_S
        self._told = -1  # the newest end of this process's commits when we last looked

    def is_due(self, now_s: float, told: int) -> bool:
        """Whether to look now. ``told`` is the end of what this process has committed."""
        return self._due_s is None or now_s >= self._due_s or told > self._told

    def looked(self, told: int) -> None:
        """Note what was known to be committed when a look began."""
        self._told = max(self._told, told)

    def found(self) -> None:
        """There was something: look again at once."""
        self._due_s, self._wait_s = None, FIRST_S

    def missed(self, now_s: float) -> None:
        """There was nothing: wait longer than the last time."""
        self._due_s = now_s + self._wait_s
        self._wait_s = min(LAST_S, 2 * self._wait_s)

    def hurry(self) -> None:
        """There is something, as another read has shown: look at once."""
        self._due_s = None

    def wait_s(self, now_s: float) -> float:
        """How long until the next look is due."""
        return 0.0 if self._due_s is None else max(0.0, self._due_s - now_s)
