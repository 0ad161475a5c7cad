"""Rounds of a test that runs many: a share of them in ``make test``, all in ``make test-long``."""

from __future__ import annotations

from typing import Any

import pytest


def rounds(count: int, every: int) -> list[Any]:
    """The numbers of all rounds, of which every second, third, ... is not ``long``."""
    return [pytest.param(n, marks=() if n % every == 0 else pytest.mark.long) for n in range(count)]
