"""A store opened with this process's own clock, ids and environment.

For workers that are handed a URL: what they need beside it, credentials above all, is their own.
"""

from __future__ import annotations

import os

from tidelog.clock import RandomIds, SystemClock, system_random
from tidelog.model.backoff import Backoff
from tidelog.store import Store, open_store
from tidelog.store.retry import RetryingStore

__all__ = ["open_store_here"]


def open_store_here(url: str, backoff: Backoff | None = None) -> Store:
    """The store that a URL names, with repeats."""
    clock, random = SystemClock(), system_random()
    environ = os.environ  # noqa: TID251 - a worker's world comes in here
    store = open_store(url, clock=clock, ids=RandomIds(), random=random, environ=environ)
    return RetryingStore(store, clock=clock, random=random, backoff=backoff or Backoff())
