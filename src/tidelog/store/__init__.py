# ruff: noqa: PLC0415 - one lazy import for each scheme
"""The store: immutable objects under keys, which are only created, never overwritten.

It promises that exactly one of several concurrent creates wins, that an object is visible whole or
not at all, and that an acknowledged object stays. It must not know what is inside the objects, nor
the catalog.

``base`` has the interface, and creates new objects; ``local`` (to copy from), ``memory`` and
``remote`` are backends. ``wrappers`` retry, meter and cache for any of them; ``fetch`` fetches
ahead, and opens objects as files. Other packages can add a backend through the entry point group
``tidelog.stores``.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Mapping
from pathlib import Path

from tidelog.clock import Clock, Ids, RandomIds, SystemClock, system_random
from tidelog.errors import InvalidError
from tidelog.model.address import nearest, parse_address
from tidelog.model.times import Backoff
from tidelog.plugins import find_plugins
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.wrappers import RetryingStore

__all__ = [
    "STORE_SCHEMES",
    "ObjectInfo",
    "Store",
    "open_store",
    "open_store_here",
    "shared_store",
]

STORE_SCHEMES = ("file", "memory", "s3", "gs", "az")


def open_store(
    url: str, *, clock: Clock, ids: Ids, random: random.Random, environ: Mapping[str, str]
) -> Store:
    """Returns the store of a URL or a path. Sends and creates nothing before its first call."""
    address = parse_address(url, plain_scheme="file")
    if address.scheme == "file":
        from tidelog.store.local import LocalStore

        address.take_options(())
        if address.host not in ("", "localhost") or not address.path.startswith("/"):
            raise InvalidError(f"store `{url}`: give a path, or file:///absolute/path")
        return LocalStore(Path(address.path), clock=clock, ids=ids, random=random)
    if address.scheme == "memory":
        from tidelog.store.memory import MemoryStore

        address.take_options(())
        return MemoryStore(clock)
    if address.scheme == "s3":
        from tidelog.store.s3 import open_s3

        return open_s3(address, environ)
    if address.scheme in ("gs", "az"):
        from tidelog.store import remote

        opens = {"gs": remote.open_google, "az": remote.open_azure}
        return opens[address.scheme](address, environ)
    for entry in find_plugins("tidelog.stores", address.scheme):
        store: Store = entry.load()(address, clock=clock, ids=ids, environ=environ)
        return store
    raise InvalidError(
        f"store `{url}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, STORE_SCHEMES)}: give one of {', '.join(STORE_SCHEMES)}"
    )


def open_store_here(url: str, backoff: Backoff | None = None) -> Store:
    """Returns the store of a URL, with retries, and with this process's clock, ids and environment.

    For workers that get a URL: everything else they need, above all credentials, is their own.
    Raises ``InvalidError`` for a store in memory, which has no URL that leads to it.
    """
    if url == "memory:":
        raise InvalidError(
            "store `memory:`: archives, pumps and streams cannot work on it: use a home in a folder"
        )
    clock, random = SystemClock(), system_random()
    environ = os.environ  # noqa: TID251 - the one place where a worker reads it
    store = open_store(url, clock=clock, ids=RandomIds(), random=random, environ=environ)
    return RetryingStore(store, clock=clock, random=random, backoff=backoff or Backoff())


@functools.lru_cache(maxsize=8)
def shared_store(url: str) -> Store:
    """Returns the same as ``open_store_here``, opened once for all tasks of this process."""
    return open_store_here(url)
