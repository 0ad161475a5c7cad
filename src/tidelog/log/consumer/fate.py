"""Fate: a handler that fails at random, before, in the middle and after its work.

A consumer gives an event at least once. So a handler must leave the same behind however often it
is given one, and wherever it broke off before. Run it under a fate to prove that::

    fate = Fate(seed=7)

    def handle(event: Event) -> None:
        first_half(event)
        fate.tempt()                   # may fail here
        second_half(event)

    consumer.run(fate.tempting(handle), on_error="stop", retries=50, retry_base_ms=1)

Every failure is a :class:`FateError`. A seed gives the same failures again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from tidelog.errors import InvalidError

__all__ = ["Fate", "FateError"]

T = TypeVar("T")


class FateError(Exception):
    """Nothing is wrong: the handler must bear that it was broken off here."""


class Fate:
    """Decides, by chance, what fails; counts it by place, for tests that want all places."""

    def __init__(self, seed: int = 0, rate: float = 0.1) -> None:
        if not 0 <= rate < 1:
            raise InvalidError(f"fate: its rate is {rate}: give a share from 0 to below 1")
        self._random = random.Random(seed)
        self._rate = rate
        self.failed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def tempt(self, place: str = "middle") -> None:
        """Go on, or fail with ``FateError``.

        >>> tidelog.Fate(rate=0.0).tempt()
        """
        if self._random.random() < self._rate:
            self.failed[place] += 1
            raise FateError(f"fate: failed {place}")
        self.passed[place] += 1

    def tempting(self, handler: Callable[[T], object]) -> Callable[[T], object]:
        """Return the handler, tempted before it begins and after it is done.

        >>> tidelog.Fate(rate=0.0).tempting(len)([1, 2])
        2
        """

        def tempted(argument: T) -> object:
            self.tempt("before")
            result = handler(argument)
            self.tempt("after")
            return result

        return tempted
