"""What the operator should know, on standard error: one line a second at most."""

from __future__ import annotations

import sys

from tidelog.clock import Clock
from tidelog.errors import TidelogError

__all__ = ["Complaints"]

_GAP_S = 1.0


class Complaints:
    """Prints errors that clients were told in general words only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_s = float("-inf")
        self._unsaid = 0

    def hear(self, error: TidelogError) -> None:
        """Print an error, or count it where one was printed just now."""
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s < _GAP_S:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more before)" if self._unsaid else ""
        line = " ".join(error.message.split())
        print(f"error: {error.kind}: {line}{more}", file=sys.stderr, flush=True)
        self._said_s, self._unsaid = now_s, 0
