"""Where pipelines read and write: sources and stores by their URLs, as a home sees them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from tidelog.home import Home, open_home
from tidelog.log.base import Log
from tidelog.sources import open_source
from tidelog.sources.base import Source
from tidelog.store import open_store
from tidelog.store.base import Store
from tidelog.store.retry import RetryingStore

__all__ = ["source_at", "store_at"]


def source_at(home: Home, url: str) -> Source:
    """What a URL names, to be read by position; ``topic:NAME`` is a topic of this home."""
    opens = functools.partial(_open_log, home.config)
    return open_source(url, environ=home.world.environ, open_log=opens)


def store_at(home: Home, url: str) -> Store:
    """A store by its URL, with repeats, and without the home's cache."""
    world = home.world
    store = open_store(
        url, clock=world.clock, ids=world.ids, random=world.random, environ=world.environ
    )
    backoff = home.settings.backoff()
    return RetryingStore(store, clock=world.clock, random=world.random, backoff=backoff)


@contextlib.contextmanager
def _open_log(config: str) -> Iterator[Log]:
    """Opened anew wherever it is called, also in a Spark task."""
    with open_home(config) as home:
        yield home.log
