"""Threads for what blocks: the catalog and the store, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["ServerThreads"]

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 16
_LARGE_THREADS = 2  # large bodies take turns: each of them takes a processor for a while


class ServerThreads:
    """A pool, and how the loop waits for it."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, "tidelog-serve")
        self.large = ThreadPoolExecutor(_LARGE_THREADS, "tidelog-large")

    async def run_large(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do work that takes a processor for long, apart from what other requests wait for."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.large, lambda: call(*args, **kwargs))

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it in a thread. Who is cancelled meanwhile leaves it to end by itself."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """After all that is under way; what has not begun is not done."""
        self.large.shutdown(wait=True, cancel_futures=True)
        self.pool.shutdown(wait=True, cancel_futures=True)
