"""A home: one store and one catalog that belong together. Alone in choosing implementations.

A home is created once, by :func:`create_home`, in four steps. Each can be repeated, by anyone, at
any time; what a crash after each of them leaves behind:

1. check that the catalog answers, and probe the store    → nothing
2. put the identity row in the catalog, as ``creating``   → the next ``init`` goes on with this id
3. put ``home.json`` with the same id into the store      → the same
4. mark the identity row as ``ready``                     → a home

A store that has another id, or an id where the catalog has none, belongs to another home and is
refused. A catalog that is ``ready`` while its store has no ``home.json`` is refused too: the store
is the wrong one, or was emptied.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from tidelog.catalog import ABSENT, Catalog, Delete, Put, open_catalog
from tidelog.catalog.settle import Repeat
from tidelog.clock import Clock, Ids, RandomIds, SystemClock, system_random
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
)
from tidelog.model import layout
from tidelog.settings import Settings, config_string, load_settings
from tidelog.store import Store, open_store
from tidelog.store.cache import CachedStore
from tidelog.store.meter import Meter, MeteredStore
from tidelog.store.probe import probe_store
from tidelog.store.retry import RetryingStore

__all__ = ["Home", "World", "create_home", "open_home"]


class Identity(msgspec.Struct, frozen=True):
    """Who a home is; stored in the store and in the catalog."""

    id: str
    reader: int = layout.FORMAT  # the least format that a reader must know
    writer: int = layout.FORMAT  # the least format that a writer must know
    state: Literal["creating", "ready"] = "ready"


@dataclass(frozen=True)
class World:
    """What comes from outside: time, ids, randomness, environment, and the folder we stand in."""

    environ: Mapping[str, str]
    folder: Path = field(default_factory=Path.cwd)
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=RandomIds)
    random: random.Random = field(default_factory=system_random)


class Home:
    """An open home. Close it, or use it in a ``with``."""

    def __init__(
        self, identity: Identity, settings: Settings, store: Store, catalog: Catalog, meter: Meter
    ) -> None:
        self.id = identity.id
        self.settings = settings
        self.store = store
        self.catalog = catalog
        self.meter = meter

    @property
    def config(self) -> str:
        """The config string: all that is needed to open this home elsewhere; no secrets."""
        return config_string(self.store.url, self.catalog.url)

    def close(self) -> None:
        """Release connections."""
        self.catalog.close()

    def __enter__(self) -> Home:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Home({self.config!r})"


def open_home(home: str | os.PathLike[str] | None = None, *, world: World | None = None) -> Home:
    """Open a home: a folder, a config string, ``memory:``, or None for where the settings point.

    The default home is created on first use; any other needs ``tidelog init``, and without it
    ``NotFoundError`` is raised. A store and a catalog of different homes, or a home that needs
    newer code, raise ``InvalidError``.
    """
    world = world or _real_world()
    settings = load_settings(None if home is None else os.fspath(home), world.environ, world.folder)
    if settings.is_default or settings.store == "memory:":
        return create_home(settings, world=world)[0]
    meter = Meter()
    store = _open_store(settings, world, meter)
    catalog = _open_catalog(settings, world, create=False)
    try:
        identity = _read_pair(store, catalog)
    except BaseException:
        catalog.close()
        raise
    return Home(identity, settings, store, catalog, meter)


def create_home(
    settings: Settings, *, world: World | None = None, create_catalog: bool = True
) -> tuple[Home, bool]:
    """Create a home where there is none; the home, and whether it is new.

    Idempotent, also when several processes do it at once or one died on the way.
    ``create_catalog`` makes the catalog's file or table where it is missing.
    """
    world = world or _real_world()
    meter = Meter()
    store = _open_store(settings, world, meter)
    catalog = _find_catalog(store, settings, world, create_catalog)
    try:
        claimed = _read_catalog(catalog) if catalog else None
        if catalog and claimed and claimed[0].state == "ready":
            return Home(_read_pair(store, catalog), settings, store, catalog, meter), False
        probe_store(store, world.ids)
        catalog = catalog or _open_catalog(settings, world, create=True)
        identity = _create_identity(store, catalog, world.ids)
    except BaseException:
        if catalog:
            catalog.close()
        raise
    return Home(identity, settings, store, catalog, meter), True


def _find_catalog(
    store: Store, settings: Settings, world: World, may_create: bool
) -> Catalog | None:
    """Step 1: look at both sides before anything is made on either; None for "to be created"."""
    in_store = _read_store(store)
    try:
        return _open_catalog(settings, world, create=False)
    except NotFoundError:
        if in_store is not None:
            raise _other_catalog(store, settings.catalog, in_store) from None
        if not may_create:
            raise
        return None


def _create_identity(store: Store, catalog: Catalog, ids: Ids) -> Identity:
    """Steps 2 to 4."""
    identity, version = _claim(store, catalog, ids)
    if identity.state == "creating":
        ready = Identity(identity.id, identity.reader, identity.writer)
        _mark_store(store, catalog, ready, Delete(layout.HOME_ROW, expect=version), ids)
        with contextlib.suppress(ConflictError):  # somebody else finished it first
            catalog.write(
                layout.HOME_PARTITION,
                Put(layout.HOME_ROW, msgspec.json.encode(ready), expect=version),
                write_id=ids.new(),
            )
    return _read_pair(store, catalog)


def _claim(store: Store, catalog: Catalog, ids: Ids) -> tuple[Identity, str]:
    """Step 2: our new identity in the catalog, or the one that is there already."""
    claimed = _read_catalog(catalog)
    if claimed is not None:
        return claimed
    in_store = _read_store(store)
    if in_store is not None:
        raise _other_catalog(store, catalog.url, in_store)
    mine, write_id = Identity(ids.new(), state="creating"), ids.new()
    try:
        catalog.write(
            layout.HOME_PARTITION,
            Put(layout.HOME_ROW, msgspec.json.encode(mine), expect=ABSENT),
            write_id=write_id,
        )
    except ConflictError:
        return _claim(store, catalog, ids)  # somebody else was first: go on with theirs
    return mine, write_id


def _mark_store(store: Store, catalog: Catalog, ready: Identity, undo: Delete, ids: Ids) -> None:
    """Step 3. A store that somebody else took meanwhile is refused, and our claim taken back."""
    try:
        store.put(layout.HOME_OBJECT, msgspec.json.encode(ready))
    except AlreadyExistsError:
        in_store = _read_store(store)
        if in_store is None or in_store.id != ready.id:
            with contextlib.suppress(ConflictError):
                catalog.write(layout.HOME_PARTITION, undo, write_id=ids.new())
            raise _other_catalog(store, catalog.url, in_store or ready) from None


def _read_pair(store: Store, catalog: Catalog) -> Identity:
    """The identity, if store and catalog have the same and this code knows its format."""
    in_store, claimed = _read_store(store), _read_catalog(catalog)
    if claimed is None:
        if in_store is not None:
            raise _other_catalog(store, catalog.url, in_store)
        raise NotFoundError(
            f"home of store `{store.url}` and catalog `{catalog.url}`: not found: "
            "run `tidelog init`, or fix the addresses"
        )
    in_catalog, _ = claimed
    if in_store is None:
        if in_catalog.state == "creating":
            raise NotFoundError(
                f"home of store `{store.url}`: not finished: run `tidelog init` again"
            )
        raise InvalidError(
            f"store `{store.url}`: holds no home, but catalog `{catalog.url}` is of home "
            f"`{in_catalog.id}`: give the store that belongs to it"
        )
    if in_store.id != in_catalog.id:
        raise InvalidError(
            f"store `{store.url}` is of home `{in_store.id}` and catalog `{catalog.url}` of home "
            f"`{in_catalog.id}`: give two that belong together"
        )
    return _known_format(in_store)


def _known_format(identity: Identity) -> Identity:
    needed = max(identity.reader, identity.writer)
    if needed > layout.FORMAT:
        raise InvalidError(
            f"home `{identity.id}`: needs format {needed}, this code knows {layout.FORMAT}: "
            "update tidelog"
        )
    return identity


def _read_store(store: Store) -> Identity | None:
    try:
        data = store.get(layout.HOME_OBJECT)
    except NotFoundError as exc:
        if exc.context.get("key") == layout.HOME_OBJECT:
            return None
        raise  # the bucket itself is missing
    return _decode(f"object `{layout.HOME_OBJECT}` of `{store.url}`", data)


def _read_catalog(catalog: Catalog) -> tuple[Identity, str] | None:
    row = catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    if row is None:
        return None
    return _decode(f"row `{layout.HOME_ROW}` of `{catalog.url}`", row.value), row.version


def _decode(what: str, data: bytes) -> Identity:
    try:
        return msgspec.json.decode(data, type=Identity)
    except msgspec.MsgspecError as exc:
        raise CorruptError(f"{what}: {exc}: keep it, and restore it from a copy") from exc


def _other_catalog(store: Store, catalog_url: str, found: Identity) -> InvalidError:
    return InvalidError(
        f"store `{store.url}`: belongs to home `{found.id}`, and catalog `{catalog_url}` is not "
        "that home's: give its own catalog, or another store"
    )


def _open_store(settings: Settings, world: World, meter: Meter) -> Store:
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


def _open_catalog(settings: Settings, world: World, *, create: bool) -> Catalog:
    repeat = Repeat(world.clock, world.random, settings.backoff())
    return open_catalog(settings.catalog, create=create, repeat=repeat, environ=world.environ)


def _real_world() -> World:
    return World(environ=os.environ)  # noqa: TID251 - here the world comes in
