"""Worlds of clients with fewer kinds of processes, which meet more often.

``ReadersWorld``: one-shot readers, a consumer and a trimmer. ``KeysWorld``: servers that repeat
requests under idempotency keys, and sweepers on a host whose clock is weeks ahead.
"""

from __future__ import annotations

from tests.sim.clients import ClientsWorld

__all__ = ["KeysWorld", "ReadersWorld"]


class ReadersWorld(ClientsWorld):
    """Readers of all kinds beside a trimmer."""

    def spawn_all(self) -> None:
        self._start("sender", self.send, 1)
        self._start("consumer", self.consume, 2)
        self._start("one-shot", self.read_once, 3)
        self._start("trimmer", self.trim, 1)


class KeysWorld(ClientsWorld):
    """Servers beside sweepers with a wrong clock."""

    def spawn_all(self) -> None:
        self._start("server", self.serve, 3)
        self.start_wrong_year()
