"""Adoption: gives a copied home its own identity, or records the new location of a moved one.

``identity`` has the steps and what a crash leaves. Adoption writes nothing else: everything that
reaches outside the home names the id of its home, so a new id detaches it. A copy can read what it
inherited. Its archives in other stores, its pipelines and named playbacks to other systems, its
Iceberg tables and its topics' notifications stay with the original.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tidelog.backends import (
    World,
    context_of,
    location_of,
    open_catalog_of,
    open_store_of,
    real_world,
)
from tidelog.catalog.base import Catalog
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    is_outside,
    list_archives,
    list_pipelines,
)
from tidelog.errors import InvalidError, NotFoundError
from tidelog.identity import (
    HomeIdentity,
    Identity,
    Location,
    adopt_identity,
    lost_catalog,
    newest_half,
    read_catalog,
    read_store,
)
from tidelog.log.notify_targets import shown_target
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.playback.session import list_pins
from tidelog.settings import load_settings
from tidelog.store import Store
from tidelog.store.wrappers import Meter

__all__ = ["Adoption", "adopt_home"]


_TABLE = "SELECT 1 FROM sqlite_master WHERE name = 'rows'"
_IDENTITY = "SELECT value FROM rows WHERE partition = ? AND row = ?"


@dataclass(frozen=True, slots=True)
class Adoption:
    """The result of an adoption."""

    id: str  # of the home from now on
    was: str  # the id of the older half; unchanged if the home moved or needed nothing
    made_at: str  # where the original was created
    detached: tuple[str, ...]  # what stays with the original, in words


def adopt_home(
    home: str | os.PathLike[str] | None = None, *, moved: bool = False, world: World | None = None
) -> Adoption:
    """Gives a copied home its own identity, or records that the original moved (``moved``).

    A half that was restored from before the home's last adoption gets the home's identity back.
    Idempotent, and safe to kill at any point. Does nothing to a home that is where it was created.
    Raises ``InvalidError`` if the home shares a half with its original, if ``moved`` is set and the
    original is still there, and if the catalog is missing or empty.

    >>> import shutil
    >>> tidelog.create_home("./original")[0].close()
    >>> _ = shutil.copytree("original", "copy")
    >>> adopted = tidelog.adopt_home("./copy")
    >>> adopted.id != adopted.was
    True
    """
    world = world or real_world()
    settings = load_settings(None if home is None else os.fspath(home), world.environ, world.folder)
    store = open_store_of(settings, world, Meter())
    try:
        catalog = open_catalog_of(settings, world, create=False)
    except NotFoundError as exc:
        in_store = read_store(store)
        if in_store is not None:
            raise lost_catalog(store, settings.catalog, in_store) from exc
        raise
    try:
        found = location_of(world, store, catalog)
        if moved:
            _check_gone(store, catalog, found, world.machine)
        old, new = adopt_identity(store, catalog, world.ids, found, moved=moved)
        context = context_of(settings, world, store, catalog, HomeIdentity(new.id))
        detached = tuple(_detached(context)) if new.id != old.id else ()
    finally:
        catalog.close()
    return Adoption(new.id, old.id, str(old.location), detached)


def _check_gone(store: Store, catalog: Catalog, found: Location, machine: str) -> None:
    """Raises ``InvalidError`` if the original of a moved home is visibly still there."""
    in_store, claimed = read_store(store), read_catalog(catalog)
    if in_store is None or claimed is None:
        return
    identity = newest_half(in_store, claimed[0], found) or claimed[0]
    here = f" on machine {machine}" if machine else ""
    for was, now, name in (
        (identity.store, found.store, layout.HOME_OBJECT),
        (identity.catalog, found.catalog, ""),
    ):
        scheme, _, path = was.partition(":")
        if was == now or scheme not in ("file", "sqlite") or not was.endswith(here):
            continue
        there = Path(path.removesuffix(here)) / name
        if there.exists() and _is_same(there, identity, scheme):
            raise InvalidError(
                f"home `{identity.id}`: did not move, `{there}` is still there: run `tidelog home "
                "adopt` without --moved, or delete the original first"
            )


def _is_same(file: Path, identity: Identity, scheme: str) -> bool:
    """Returns whether the file at the old location is a half of this home.

    Returns True for a file that cannot be read, since it may be the original.
    """
    if scheme == "file":
        try:
            return _is_of(file.read_bytes(), identity.id)
        except OSError:
            return True
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as there:
            if not there.execute(_TABLE).fetchall():
                return False  # there is no catalog
            found = there.execute(_IDENTITY, (layout.HOME_PARTITION, layout.HOME_ROW)).fetchall()
    except sqlite3.Error:
        return True
    return any(_is_of(bytes(value), identity.id) for (value,) in found)


def _is_of(stored: bytes, home_id: str) -> bool:
    """Returns whether a stored identity has this id.

    Searches the raw bytes, since a checksum follows them. A former id does not count.
    """
    try:
        found, _ = json.JSONDecoder().raw_decode(stored.decode(errors="replace"))
        return bool(found["id"] == home_id)
    except (ValueError, TypeError, KeyError):
        return True


def _detached(context: Context) -> Iterator[str]:
    """Yields, in words, everything that reaches outside and belongs to another home."""
    own = context.identity
    for topic in list_topics(context):
        if topic.notify and not own.owns(topic.home):
            targets = ", ".join(map(shown_target, topic.notify))
            yield f"topic `{topic.name}`: does not notify {targets}"
    for archive in list_archives(context):
        if is_outside(context, archive):
            yield (
                f"archive `{archive.name}`: read-only, in `{archive.place}`: to "
                f"continue here, run `tidelog archive create NAME --source {archive.source} --kind "
                f"{archive.kind} --to URL` with a name and a folder of its own"
            )
        for table in archive.tables:
            if table != "delta":
                yield f"archive `{archive.name}`: no longer changes table `{table}`"
    for named in list_pipelines(context):
        if parse_address(named.sink).scheme != "topic":
            yield (
                f"pipeline `{named.name}`: does not run, into `{named.sink}`: to run it here, run "
                f"`tidelog pipeline delete {named.name}`, and make it again"
            )
    for name, pinned in list_pins(context):
        if pinned.home and pinned.home != own.id:
            yield f"playback `{name}`: is not resumed, to `{pinned.sink}`"
