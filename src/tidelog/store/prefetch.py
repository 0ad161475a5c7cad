"""Prefetch: fetches the next objects while the caller decodes one."""

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
    """Yields each wanted thing with its bytes, in order; raises an error in its turn.

    ``fetch`` runs in other threads. Only a few results are in memory at a time, even for a slow
    caller.
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
