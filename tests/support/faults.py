"""Which fault hits which request: seeded, bounded, and counted by kind."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class WireFault(Enum):
    """What goes wrong with one exchange."""

    NONE = "none"
    LOSE_REQUEST = "the connection closes before the server gets the request"
    LOSE_REPLY = "the server acts, and the connection closes without a reply"
    CUT_REPLY = "the reply breaks off in the middle"
    SHORTEN_REPLY = "half of the body arrives, with a length that fits the half"
    DAMAGE_REPLY = "one byte of the body is changed; its checksum stays"
    RESET = "the server acts, and the connection is reset"
    DELAY = "the reply comes late"
    DUPLICATE = "the request reaches the server twice"
    HANG = "the server acts, and the connection stays open without a reply"
    ERROR_500 = "the server acts, and answers that it failed"
    SLOW_DOWN = "the server refuses for load"
    CONFLICT_409 = "the server refuses a conditional write: another one is under way"
    HTML_200 = "something else answers 200 with a page"


@dataclass
class FaultPlan:
    """Picks a fault for each request.

    ``rates`` are probabilities by kind. ``next`` goes first: each fault in it hits the next
    request that its test accepts. At most ``limit`` faults happen in all, so that a run ends.
    """

    seed: int = 0
    rates: Mapping[WireFault, float] = field(default_factory=dict)
    limit: int = 1_000_000
    delay_s: float = 0.05
    enabled: bool = True
    counts: Counter[WireFault] = field(default_factory=Counter)
    requests: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._next: deque[tuple[WireFault, Callable[[bytes], bool]]] = deque()

    @property
    def injected(self) -> int:
        """How many faults have happened."""
        return sum(count for fault, count in self.counts.items() if fault is not WireFault.NONE)

    def on_next(self, *faults: WireFault, mark: bytes = b"") -> None:
        """Let these faults hit the next requests that contain ``mark``, in this order."""
        with self._lock:
            self._next.extend((fault, lambda request: mark in request) for fault in faults)

    def choose(self, request: bytes, possible: Callable[[WireFault], bool]) -> WireFault:
        """The fault for a request; only one that is ``possible`` for it."""
        with self._lock:
            self.requests += 1
            fault = self._choose(request, possible)
            self.counts[fault] += 1
            return fault

    def fraction(self) -> float:
        """Where in a reply something happens: a number from 0 to 1."""
        with self._lock:
            return self._random.random()

    def _choose(self, request: bytes, possible: Callable[[WireFault], bool]) -> WireFault:
        if self._next and self._next[0][1](request):
            return self._next.popleft()[0]
        if not self.enabled or self.injected >= self.limit:
            return WireFault.NONE
        chance = self._random.random()
        for fault, rate in self.rates.items():
            chance -= rate
            if chance < 0:
                return fault if possible(fault) else WireFault.NONE
        return WireFault.NONE
