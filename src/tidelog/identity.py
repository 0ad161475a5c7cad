"""Who a home is: one id, in the store and in the catalog, so that the two belong together.

A home is created once, in four steps. Each can be repeated, by anyone, at any time; what a crash
after each of them leaves behind:

1. check that the catalog answers, and probe the store    → nothing
2. put the identity row in the catalog, as ``creating``   → the next ``init`` goes on with this id
3. put ``home.json`` with the same id into the store      → the same
4. mark the identity row as ``ready``                     → a home

A store that has another id, or an id where the catalog has none, belongs to another home and is
refused. A catalog that is ``ready`` while its store has no ``home.json`` is refused too: the store
is the wrong one, or was emptied. Step 1 is ``home.create_home``'s; the others are here.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import msgspec

from tidelog.catalog import ABSENT, Catalog, Delete, Put
from tidelog.clock import Ids
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
)
from tidelog.model import layout
from tidelog.model.decoding import decode_json
from tidelog.store import Store

__all__ = [
    "Identity",
    "create_identity",
    "other_catalog",
    "read_catalog",
    "read_pair",
    "read_store",
]


class Identity(msgspec.Struct, frozen=True):
    """Who a home is; stored in the store and in the catalog."""

    id: str
    reader: int = layout.FORMAT  # the least format that a reader must know
    writer: int = layout.FORMAT  # the least format that a writer must know
    state: Literal["creating", "ready"] = "ready"


def create_identity(store: Store, catalog: Catalog, ids: Ids) -> Identity:
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
    return read_pair(store, catalog)


def _claim(store: Store, catalog: Catalog, ids: Ids) -> tuple[Identity, str]:
    """Step 2: our new identity in the catalog, or the one that is there already."""
    claimed = read_catalog(catalog)
    if claimed is not None:
        return claimed
    in_store = read_store(store)
    if in_store is not None:
        raise other_catalog(store, catalog.url, in_store)
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
        in_store = read_store(store)
        if in_store is None or in_store.id != ready.id:
            with contextlib.suppress(ConflictError):
                catalog.write(layout.HOME_PARTITION, undo, write_id=ids.new())
            raise other_catalog(store, catalog.url, in_store or ready) from None


def read_pair(store: Store, catalog: Catalog) -> Identity:
    """The identity, if store and catalog have the same and this code knows its format."""
    in_store, claimed = read_store(store), read_catalog(catalog)
    if claimed is None:
        if in_store is not None:
            raise other_catalog(store, catalog.url, in_store)
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


def read_store(store: Store) -> Identity | None:
    try:
        data = store.get(layout.HOME_OBJECT)
    except NotFoundError as exc:
        if exc.context.get("key") == layout.HOME_OBJECT:
            return None
        raise  # the bucket itself is missing
    return _decode(f"object `{layout.HOME_OBJECT}` of `{store.url}`", data)


def read_catalog(catalog: Catalog) -> tuple[Identity, str] | None:
    row = catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    if row is None:
        return None
    return _decode(f"row `{layout.HOME_ROW}` of `{catalog.url}`", row.value), row.version


def _decode(what: str, data: bytes) -> Identity:
    try:
        return decode_json(data, Identity)
    except msgspec.MsgspecError as exc:
        raise CorruptError(f"{what}: {exc}: keep it, and restore it from a copy") from exc


def other_catalog(store: Store, catalog_url: str, found: Identity) -> InvalidError:
    return InvalidError(
        f"store `{store.url}`: belongs to home `{found.id}`, and catalog `{catalog_url}` is not "
        "that home's: give its own catalog, or another store"
    )
