"""Reading ahead: the next objects are fetched while one is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from tidelog.pool import Pool

__all__ = ["fetched_ahead"]

_AHEAD = 3  # objects; each is a round trip on a remote store

T = TypeVar("T")


def fetched_ahead(wanted: Iterable[T], fetch: Callable[[T], bytes]) -> Iterator[tuple[T, bytes]]:
    """Each thing that is wanted with its bytes, in order; an error comes in its turn.

    ``fetch`` runs in other threads. A few results are in memory at a time, whoever reads slowly.
    """
    waiting: deque[tuple[T, Future[bytes]]] = deque()
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        for each in wanted:
            waiting.append((each, pool.submit(fetch, each)))
            if len(waiting) > _AHEAD:
                first, coming = waiting.popleft()
                yield first, coming.result()
        for first, coming in waiting:
            yield first, coming.result()
