"""Prefetch: fetches the next things while the caller works on one.

Results come in order, and an error in its turn. Only a few are in memory at a time, even for a slow
caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from tidelog.tasks import Pool

__all__ = ["fetch_ahead", "fetch_ahead_in_threads"]

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3  # objects; each is a round trip on a remote store


def fetch_ahead(
    pool: Executor | None, fetch: Callable[[T], R], wanted: Iterable[T], ahead: int
) -> Iterator[tuple[T, R]]:
    """Yields each thing with the result of ``fetch``; a pool fetches up to ``ahead`` in advance."""
    if pool is None:
        yield from ((each, fetch(each)) for each in wanted)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for each in wanted:
            waiting.append((each, pool.submit(fetch, each)))
            if len(waiting) > ahead:
                first, coming = waiting.popleft()
                yield first, coming.result()
        while waiting:
            first, coming = waiting.popleft()
            yield first, coming.result()
    finally:
        for _, coming in waiting:
            coming.cancel()


def fetch_ahead_in_threads(fetch: Callable[[T], R], wanted: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Does the same with threads of its own, which end with the iteration."""
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        yield from fetch_ahead(pool, fetch, wanted, _AHEAD)
