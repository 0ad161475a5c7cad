"""The two substrates of a home, opened as the settings say, and what comes from outside.

Alone in choosing implementations: everything above is written once, on the interfaces.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidelog.catalog import Catalog, open_catalog
from tidelog.catalog.checked import CheckedCatalog
from tidelog.catalog.settle import Repeat
from tidelog.clock import Clock, Ids, RandomIds, SystemClock, system_random
from tidelog.location import Location, locate, machine_id
from tidelog.log.base import Log
from tidelog.log.process import LocalProcesses
from tidelog.log.spans import NoSpans, Spans
from tidelog.model.standing import Standing
from tidelog.settings import Settings
from tidelog.store import Store, open_store
from tidelog.store.cache import CachedStore
from tidelog.store.meter import Meter, MeteredStore
from tidelog.store.retry import RetryingStore

__all__ = ["World", "location_of", "log_of", "open_catalog_of", "open_store_of", "real_world"]

_REMOTE_COMMITS = 8  # partitions of one flush that are committed side by side


@dataclass(frozen=True)
class World:
    """What comes from outside: time, ids, randomness, environment, and the folder we stand in."""

    environ: Mapping[str, str]
    folder: Path = field(default_factory=Path.cwd)
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=RandomIds)
    random: random.Random = field(default_factory=system_random)
    spans: Spans = field(default_factory=NoSpans)
    machine: str = field(default_factory=machine_id)  # part of a local home's place


def open_store_of(settings: Settings, world: World, meter: Meter) -> Store:
    """The store, metered, with repeats, and cached."""
    store = open_store(
        settings.store,
        clock=world.clock,
        ids=world.ids,
        random=world.random,
        environ=world.environ,
    )
    metered = MeteredStore(store, meter, clock=world.clock)
    retrying = RetryingStore(
        metered, clock=world.clock, random=world.random, backoff=settings.backoff()
    )
    return CachedStore(retrying, settings.cache_bytes)


def open_catalog_of(settings: Settings, world: World, *, create: bool) -> Catalog:
    """The catalog, its rows with checksums; ``NotFoundError`` unless it is there or created."""
    repeat = Repeat(world.clock, world.random, settings.backoff())
    catalog = open_catalog(settings.catalog, create=create, repeat=repeat, environ=world.environ)
    return CheckedCatalog(catalog)


def location_of(world: World, store: Store, catalog: Catalog) -> Location:
    """Where the two are, for who must tell a copy from its original."""
    return locate(store.url, catalog.url, world.machine)


def log_of(
    settings: Settings, world: World, store: Store, catalog: Catalog, standing: Standing
) -> Log:
    """What every part of the log works with, as it suits these two substrates."""
    remote_store = not store.url.startswith(("file:", "memory:"))
    remote_catalog = not catalog.url.startswith(("sqlite:", "memory:"))
    return Log(
        store=store,
        catalog=catalog,
        clock=world.clock,
        ids=world.ids,
        random=world.random,
        settings=settings.log_settings(remote_store),
        backoff=settings.backoff(),
        processes=LocalProcesses(),
        spans=world.spans,
        standing=standing,
        commits_at_once=_REMOTE_COMMITS if remote_catalog else 1,
    )


def real_world() -> World:
    """This process's own."""
    return World(environ=os.environ)  # noqa: TID251 - here the world comes in
