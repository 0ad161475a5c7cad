"""The range of all times, for calls and for commands."""

from __future__ import annotations

__all__ = ["ALL_TIMES", "ALL_TIMES_OPTIONS"]

ALL_TIMES = ("earliest", "latest")
ALL_TIMES_OPTIONS = ("--start", "earliest", "--end", "latest")
