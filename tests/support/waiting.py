"""Waiting for what must happen: the one way in which tests do it."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_S = 0.01


def until(fact: Callable[[], object], seconds: float = 60, why: Callable[[], str] = str) -> None:
    """Look again and again until it is so; ``why`` tells more when it never is."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, f"it did not happen in {seconds:g} s: {why()}"
        time.sleep(_LOOK_S)
