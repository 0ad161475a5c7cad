"""The identity of a home: one id, in the store and in the catalog, that ties the two together.

Creating a home takes four steps. Any process can repeat each of them at any time. What a crash
after each step leaves:

    1. check that the catalog answers, and probe the store   → nothing
    2. put the identity row in the catalog, as ``creating``  → the next ``init`` resumes
    3. put ``home.json`` with the same id into the store     → the same
    4. mark the identity row as ``ready``                    → a home

Step 1 is in ``backends``; the others are here.

A copy keeps the id of its original until it is adopted, in three steps:

    1. put the new identity into the catalog, as
       ``adopting``, with the id that it had                 → open refuses; adopt resumes
    2. replace ``home.json`` with the new identity           → the same
    3. mark the identity row as ``ready``                    → a home of its own

An identity lists the ids that its home had before (``former``). That is how open recognizes a half
that was restored from a backup older than the adoption: the other half lists its id. Open refuses
such a home and says what happened. If both halves are where the newer identity says they are, adopt
writes the newer identity into the older half, with one write. Otherwise the home is a copy, and
adopt takes the three steps above. Adopt never takes over a half that still belongs to the original.

Each half records where it and the other half were created (``location``):

- Both halves are elsewhere: the home was copied or moved.
- One half is elsewhere: it shares the other half with its original, and is refused. Two catalogs
  over one store would delete each other's objects.
- The store has another id: it belongs to another home, and is refused.
- The store has an id and the catalog has none: the catalog was lost.
- The catalog is ``ready`` and the store has no ``home.json``: it is the wrong store, or it was
  emptied. Refused.

A location names a folder or a SQLite file by its real path and its machine, since SQLite works on
one machine only. It names a bucket or a table without what may differ between clients: options, and
the hosts of a cluster. A folder beside a catalog on a server has no location, since machines may
mount it at different paths. Memory has none either.

Two cases look the same: a disk image that runs on a second machine with the same machine id, and a
CQL keyspace of the same name on another cluster. An archive outside the home has a second check,
its ``_owner`` object.

**Copies.** A copy may read everything and write inside itself. But what it inherited also reaches
outside: archives in other folders, pipelines into Kafka, tables, webhooks. Two homes that work on
these destroy them, so a copy is refused there until it is adopted.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
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
from tidelog.model.address import parse_address
from tidelog.model.decoding import (
    Persisted,
    decode_json,
    open_json,
    pack_json,
    remedy,
    seal_json,
)
from tidelog.store import Store
from tidelog.store.wrappers import reread

__all__ = [
    "HomeIdentity",
    "Identity",
    "Location",
    "adopt_identity",
    "create_identity",
    "locate",
    "lost_catalog",
    "machine_id",
    "newest_half",
    "other_catalog",
    "read_catalog",
    "read_pair",
    "read_store",
]


class _Formats(msgspec.Struct, frozen=True):
    """The fields that an identity has in every format."""

    id: str
    reader: int
    writer: int


class Identity(Persisted, frozen=True):
    """The identity of a home, as the store and the catalog hold it."""

    id: str
    reader: int = layout.FORMAT  # the lowest format that a reader must know
    writer: int = layout.FORMAT  # the lowest format that a writer must know
    state: Literal["creating", "adopting", "ready"] = "ready"
    store: str = ""  # where the store was created; empty if it has no location
    catalog: str = ""  # the same for the catalog
    was: str = ""  # during an adoption: the id that the store may still have
    former: tuple[str, ...] = ()  # ids that the home had before adoptions, oldest first

    @property
    def location(self) -> Location:
        """Returns where its halves were created."""
        return Location(self.store, self.catalog)

    def is_copy(self, found: Location) -> bool:
        """Returns whether the home was copied or moved, given where its halves are now."""
        return self.location not in (Location(), found)


def create_identity(store: Store, catalog: Catalog, ids: Ids, location: Location) -> Identity:
    """Runs steps 2 to 4 of a creation; returns the identity."""
    identity, version = _claim(store, catalog, ids, location)
    if identity.state == "creating":
        ready = msgspec.structs.replace(identity, state="ready")
        _mark_store(store, catalog, ready, Delete(layout.HOME_ROW, expect=version), ids)
        with contextlib.suppress(ConflictError):  # another process finished it first
            catalog.write(
                layout.HOME_PARTITION,
                Put(layout.HOME_ROW, pack_json(ready), expect=version),
                write_id=ids.new(),
            )
    return read_pair(store, catalog, location)


def adopt_identity(
    store: Store, catalog: Catalog, ids: Ids, location: Location, *, moved: bool
) -> tuple[Identity, Identity]:
    """Gives a copy its own identity, or records the new location of a moved home.

    Returns the old and the new identity. A half that is older than the home's last adoption gets
    the home's identity back. Idempotent, and safe to kill: the next call resumes. Raises
    ``InvalidError`` for a home that shares a half with its original, unless it was ``moved``.
    """
    in_store, claimed = read_store(store), read_catalog(catalog)
    if in_store is None or claimed is None or claimed[0].state == "creating":
        read_pair(store, catalog, location)  # raises if something else is wrong
        raise NotFoundError(
            f"home of store `{store.url}` and catalog `{catalog.url}`: not finished: run `tidelog "
            "init` again"
        )
    before, version = claimed
    newest = newest_half(in_store, before, location)
    if newest is not None:
        if not moved:
            _check_not_shared(newest, location)
        old = newest
    elif before.state == "adopting":
        if in_store.id not in (before.id, before.was) or before.location != location:
            raise InvalidError(
                f"store `{store.url}` and catalog `{catalog.url}`: do not belong together: the "
                f"adoption that did not finish was of {before.store or 'another store'} and "
                f"{before.catalog or 'another catalog'}: fix the addresses"
            )
        old = msgspec.structs.replace(before, id=before.was)
        return old, _finish(store, catalog, ids, before, version)
    else:
        old = read_pair(store, catalog, location, shared=moved)
    if not old.is_copy(location):
        return _restore_older(store, catalog, ids, old, before, version), old
    new = msgspec.structs.replace(
        old,
        id=old.id if moved else ids.new(),
        state="adopting",
        store=location.store,
        catalog=location.catalog,
        was=in_store.id,
        former=old.former if moved else (*old.former, old.id),
    )
    version = _put_identity(catalog, new, version, ids)  # step 1
    return old, _finish(store, catalog, ids, new, version)


def _finish(store: Store, catalog: Catalog, ids: Ids, new: Identity, version: str) -> Identity:
    """Runs steps 2 and 3 of an adoption; returns the identity."""
    ready = msgspec.structs.replace(new, state="ready", was="")
    if read_store(store) != ready:
        etag = store.head(layout.HOME_OBJECT).etag
        store.replace(layout.HOME_OBJECT, seal_json(ready), etag)
    _put_identity(catalog, ready, version, ids)
    return ready


def _restore_older(
    store: Store, catalog: Catalog, ids: Ids, newest: Identity, in_catalog: Identity, version: str
) -> Identity:
    """Writes the home's identity into its older half; returns the identity that the half had.

    The older half may also have the same id, with the location from before the home moved.
    """
    in_store = read_store(store)
    if in_store is not None and in_store != newest:
        etag = store.head(layout.HOME_OBJECT).etag
        store.replace(layout.HOME_OBJECT, seal_json(newest), etag)
    if in_catalog != newest:
        _put_identity(catalog, newest, version, ids)
    return next((each for each in (in_store, in_catalog) if each and each.id != newest.id), newest)


def newest_half(in_store: Identity, in_catalog: Identity, found: Location) -> Identity | None:
    """Returns the identity of the newer half if the other half predates an adoption of this home.

    Returns None if both halves have one id, if an adoption did not finish, and if the halves belong
    to different homes. Also None if the older half is where it was created and the newer one is
    not: then the older half belongs to the original.
    """
    if in_store.id == in_catalog.id or (
        in_catalog.state == "adopting" and in_store.id == in_catalog.was
    ):
        return None
    if in_catalog.id in in_store.former:
        newer, is_own = in_store, bool(found.catalog) and in_catalog.catalog == found.catalog
    elif in_store.id in in_catalog.former:
        newer, is_own = in_catalog, bool(found.store) and in_store.store == found.store
    else:
        return None
    if is_own and newer.location != found:
        return None
    return msgspec.structs.replace(newer, state="ready", was="")


def _put_identity(catalog: Catalog, identity: Identity, version: str, ids: Ids) -> str:
    write_id = ids.new()
    change = Put(layout.HOME_ROW, pack_json(identity), expect=version)
    catalog.write(layout.HOME_PARTITION, change, write_id=write_id)
    return write_id


def _claim(store: Store, catalog: Catalog, ids: Ids, location: Location) -> tuple[Identity, str]:
    """Step 2: returns the identity in the catalog, creating it if there is none.

    Reads the store first: a creation marks the catalog before the store, so a store that is marked
    by now has a catalog that was marked earlier, unless that catalog is lost.
    """
    in_store = read_store(store)
    claimed = read_catalog(catalog)
    if claimed is not None:
        return claimed
    if in_store is not None:
        raise lost_catalog(store, catalog.url, in_store)
    mine, write_id = (
        Identity(ids.new(), state="creating", store=location.store, catalog=location.catalog),
        ids.new(),
    )
    try:
        catalog.write(
            layout.HOME_PARTITION,
            Put(layout.HOME_ROW, pack_json(mine), expect=ABSENT),
            write_id=write_id,
        )
    except ConflictError:
        return _claim(store, catalog, ids, location)  # another process was first
    return mine, write_id


def _mark_store(store: Store, catalog: Catalog, ready: Identity, undo: Delete, ids: Ids) -> None:
    """Step 3: undoes our claim and raises if another home took the store in the meantime."""
    try:
        store.put(layout.HOME_OBJECT, seal_json(ready))
    except AlreadyExistsError:
        in_store = read_store(store)
        if in_store is None or in_store.id != ready.id:
            with contextlib.suppress(ConflictError):
                catalog.write(layout.HOME_PARTITION, undo, write_id=ids.new())
            raise other_catalog(store, catalog.url, in_store or ready) from None


def read_pair(
    store: Store, catalog: Catalog, location: Location, *, shared: bool = False
) -> Identity:
    """Returns the identity if store and catalog agree on it and this code knows its format.

    Raises ``InvalidError`` if one of them shares its other half with another home, unless
    ``shared``.
    """
    in_store, claimed = read_store(store), read_catalog(catalog)
    if claimed is None:
        if in_store is not None:
            raise lost_catalog(store, catalog.url, in_store)
        raise NotFoundError(
            f"home of store `{store.url}` and catalog `{catalog.url}`: not found: "
            "run `tidelog init` (`tidelog.create_home` in Python), or fix the addresses"
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
    if in_catalog.state == "adopting" and in_store.id in (in_catalog.id, in_catalog.was):
        raise InvalidError(
            f"home `{in_catalog.id}`: its adoption did not finish: run `tidelog home adopt` again"
        )
    if in_store.id != in_catalog.id:
        newest = newest_half(in_store, in_catalog, location)
        if newest is not None:
            raise _older_half(store, catalog, newest, in_catalog)
        raise InvalidError(
            f"store `{store.url}` is of home `{in_store.id}` and catalog `{catalog.url}` of home "
            f"`{in_catalog.id}`: give two that belong together"
        )
    if not shared:
        for identity in (in_store, in_catalog):
            _check_not_shared(identity, location)
    return in_store


def _older_half(
    store: Store, catalog: Catalog, newest: Identity, in_catalog: Identity
) -> InvalidError:
    """Returns the error for a home with one half that predates its last adoption."""
    is_catalog = newest.id != in_catalog.id
    what = f"catalog `{catalog.url}`" if is_catalog else f"`home.json` of store `{store.url}`"
    half = "catalog" if is_catalog else "store"
    return InvalidError(
        f"{what}: is from before the adoption of home `{newest.id}`, which had another id then: "
        f"restore a newer {half}, or run `tidelog home adopt` to continue with this one, and then "
        "`tidelog verify`"
    )


def _check_not_shared(identity: Identity, found: Location) -> None:
    """Raises ``InvalidError`` if one half is where it was created and the other is not."""
    made = identity.location
    pairs = [
        ("store", made.store, found.store),
        ("catalog", made.catalog, found.catalog),
    ]
    away = [pair for pair in pairs if pair[1] and pair[1] != pair[2]]
    home = [pair for pair in pairs if pair[1] and pair[1] == pair[2]]
    if away and home:
        what, was, now = away[0]
        raise InvalidError(
            f"home `{identity.id}`: its {what} was made at `{was}` and this one is `{now}`, with "
            f"the same {home[0][0]}: copy both halves, or run `tidelog home adopt --moved` if "
            f"`{was}` is gone"
        )


def _known_format(found: _Formats) -> None:
    needed, oldest = max(found.reader, found.writer), min(found.reader, found.writer)
    if needed > layout.FORMAT:
        raise InvalidError(
            f"home `{found.id}`: has format {needed}, this version of tidelog reads format "
            f"{layout.FORMAT}: update tidelog"
        )
    if oldest < layout.FORMAT:
        raise InvalidError(
            f"home `{found.id}`: has format {oldest}, this version of tidelog reads format "
            f"{layout.FORMAT}: use the version that created it"
        )


def read_store(store: Store) -> Identity | None:
    what = f"object `{layout.HOME_OBJECT}` of `{store.url}`"

    def read(_: bool) -> Identity:
        data = store.get(layout.HOME_OBJECT)
        _check_format(data)
        return open_json(data, Identity, what)

    try:
        return reread(store, layout.HOME_OBJECT, read)
    except NotFoundError as exc:
        if exc.context.get("key") == layout.HOME_OBJECT:
            return None
        raise  # the bucket itself is missing


def read_catalog(catalog: Catalog) -> tuple[Identity, str] | None:
    row = catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    if row is None:
        return None
    what = f"row `{layout.HOME_ROW}` of `{catalog.url}`"
    _check_format(row.value)
    return _decode(what, row.value), row.version


def _check_format(data: bytes) -> None:
    """Raises ``InvalidError`` for a home of another format, before its other fields are decoded.

    Reads the format even without a checksum: older formats have none.
    """
    try:
        found = decode_json(data.partition(b"\n")[0], _Formats)
    except msgspec.MsgspecError:
        return  # damaged; the caller reports it
    _known_format(found)


def _decode(what: str, data: bytes) -> Identity:
    try:
        return decode_json(data, Identity)
    except msgspec.MsgspecError as exc:
        advice = remedy(exc, "keep it, and restore it from a copy")
        raise CorruptError(f"{what}: {exc}: {advice}") from exc


def lost_catalog(store: Store, catalog_url: str, found: Identity) -> InvalidError:
    """Returns the error for a store whose catalog is missing or empty."""
    return InvalidError(
        f"catalog `{catalog_url}`: is missing or empty, but store `{store.url}` holds the objects "
        f"of home `{found.id}`: fix the address, or restore the catalog from a copy; if there is "
        "none, keep the store for its events, and init a home with another store"
    )


def other_catalog(store: Store, catalog_url: str, found: Identity) -> InvalidError:
    return InvalidError(
        f"store `{store.url}`: belongs to home `{found.id}`, and catalog `{catalog_url}` is not "
        "that home's: give its own catalog, or another store"
    )


@dataclass(frozen=True, slots=True)
class Location:
    """The locations of a store and a catalog; empty where there is nothing to compare."""

    store: str = ""
    catalog: str = ""

    def __str__(self) -> str:
        return " and ".join(filter(None, (self.store, self.catalog))) or "memory"


def locate(store_url: str, catalog_url: str, machine: str) -> Location:
    """Returns the locations of a home's halves, from their URLs."""
    store, catalog = parse_address(store_url), parse_address(catalog_url)
    if catalog.scheme == "memory":
        return Location()
    here = f" on machine {machine}" if machine else ""
    if catalog.scheme == "sqlite":
        catalog_place = f"sqlite:{os.path.realpath(catalog.path)}{here}"
    elif catalog.scheme == "cql":
        catalog_place = f"cql:{catalog.path}"
    else:
        catalog_place = f"{catalog.scheme}://{catalog.host}{catalog.path}"
    if store.scheme != "file":
        return Location(f"{store.scheme}://{store.host}{store.path}", catalog_place)
    if catalog.scheme != "sqlite":
        return Location("", catalog_place)
    return Location(f"file:{os.path.realpath(store.path)}{here}", catalog_place)


def machine_id() -> str:
    """Returns the id of this operating system; empty if it has none, as in many containers."""
    try:
        return Path("/etc/machine-id").read_text().strip()[:64]
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class HomeIdentity:
    """The identity that a context works under."""

    id: str = ""  # of the home
    copy_of: str = ""  # where it was created, if it is elsewhere now; empty: it is not a copy

    def check(self, what: str) -> None:
        """Raises ``InvalidError`` if a copy is about to write to ``what``, outside of itself."""
        if self.copy_of:
            raise InvalidError(
                f"{what}: is outside of this home, which is a copy of `{self.copy_of}`: run "
                "`tidelog home adopt`, or `tidelog home adopt --moved` if the original is gone"
            )

    def check_own(self, what: str, owner: str, remedy: str) -> None:
        """Raises the same, also if ``what`` belongs to the home that this one was copied from."""
        self.check(what)
        if owner != self.id:
            raise InvalidError(f"{what}: belongs to home `{owner}`, this is `{self.id}`: {remedy}")

    def owns(self, owner: str) -> bool:
        """Returns whether this home may use something outside; also if its owner is unknown."""
        return not self.copy_of and owner in ("", self.id)
