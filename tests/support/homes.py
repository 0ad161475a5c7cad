"""Opening backends in tests, also in processes that a test starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tidelog import Home
from tidelog.catalog import open_catalog
from tidelog.catalog.base import Catalog
from tidelog.catalog.update import Repeat
from tidelog.clock import RandomIds, SystemClock, system_random
from tidelog.model.times import Backoff
from tidelog.store import open_store
from tidelog.store.base import Store
from tidelog.store.local import LocalStore


def a_catalog(
    url: str, *, create: bool = False, environ: Mapping[str, str] | None = None
) -> Catalog:
    """Open a catalog with the system's clock."""
    repeat = Repeat(SystemClock(), system_random(), Backoff())
    return open_catalog(
        url, create=create, repeat=repeat, environ=os.environ if environ is None else environ
    )


def a_store(url: str, environ: Mapping[str, str] | None = None) -> Store:
    """Open a store with the system's clock, without wrappers."""
    return open_store(
        url,
        clock=SystemClock(),
        ids=RandomIds(),
        random=system_random(),
        environ=os.environ if environ is None else environ,
    )


def local_store(home: Home) -> LocalStore:
    """Returns the folder behind a home's cache and repeats."""
    store: Any = home.store
    while not isinstance(store, LocalStore):
        store = getattr(store, "inner", None) or store._inner
    return store
