"""Folders of archives: no two of a home contain one another, and each has its own names.

Sweeps delete from an archive's folder long after the archive, because a stalled driver may copy
files there (``delete``). So the folder of an archive that was deleted with its files stays in use
forever. Folders are compared by location: ``file:/x``, ``file:///x`` and a link to it are one.

Folders of other homes are known only by their ``_owner``, so the folders above are checked for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidelog.connectors.by_url import store_at
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import decode_archive, is_outside, scan_archives
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.model import layout
from tidelog.model.address import format_address, parse_address
from tidelog.model.archive import Archive
from tidelog.model.schema import OBJECTS
from tidelog.store.base import Store

__all__ = [
    "is_ours",
    "is_own_name",
    "own_folders",
    "place_of_root",
    "refuse_nested",
    "removed_archives",
    "with_place",
]

_Place = tuple[str, ...]
_ARCHIVES = "archives"  # the folder of a home's store with archives that have no location
_RESERVED = {kind.name.partition("/")[0] for kind in OBJECTS} - {_ARCHIVES} | {".tidelog"}


def place_of_root(store: str, root: str = "") -> _Place:
    """Returns the location of a folder; the same folder has the same parts."""
    address = parse_address(store, plain_scheme="file")
    if address.scheme == "file":
        return ("file", *Path(address.path, root).resolve().parts)
    host = address.host if address.port is None else f"{address.host}:{address.port}"
    return (address.scheme, host, *filter(None, f"{address.path}/{root}".split("/")))


def with_place(context: Context, archive: Archive) -> Archive:
    """Returns the archive with its folder's owner: below the home's store it is the home's own."""
    own, mine = place_of_root(context.store.url), place_of_root(archive.store, archive.root)
    options = [parse_address(url, "file").options for url in (context.store.url, archive.store)]
    if _contains(own, mine) and options[0] == options[1]:
        root = "/".join(mine[len(own) :])
        if root in ("", _ARCHIVES) or root.partition("/")[0] in _RESERVED:
            raise InvalidError(
                f"archive `{archive.name}`: its folder `{root}` is one in which this home keeps "
                "other objects: leave --to out, or choose another folder"
            )
        return msgspec.structs.replace(archive, store=context.store.url, root=root)
    if archive.root in ("dead", "staging"):
        raise InvalidError(
            f"archive `{archive.name}`: `{archive.place}` is where archives beside "
            "it put other objects: choose another folder"
        )
    context.identity.check(f"archive `{archive.name}` in `{archive.place}`")
    store = store_at(context, archive.store).url
    return msgspec.structs.replace(archive, store=store, home=context.home_id)


def removed_archives(context: Context) -> Iterator[Archive]:
    """Yields the archives that were deleted with their files, which have no name any more."""
    for row in context.catalog.scan(layout.REGISTRY, layout.removed_row(""), "removed0"):
        yield decode_archive(context, row)


def refuse_nested(context: Context, archive: Archive) -> None:
    """Raises ``InvalidError`` if its folder contains another archive's, or is in one."""
    mine = place_of_root(archive.store, archive.root)
    what = f"archive `{archive.name}`: its folder `{archive.root}` of `{archive.store}`"
    for gone, others in ((False, scan_archives(context)), (True, removed_archives(context))):
        for other in others:
            if other.name == archive.name and not gone:
                continue  # its name decides about that
            theirs = place_of_root(other.store, other.root)
            if not _contains(mine, theirs) and not _contains(theirs, mine):
                continue
            relation = "contains" if len(mine) < len(theirs) else "is in"
            state = ", which was deleted: late copies of it are deleted there" if gone else ""
            raise InvalidError(
                f"{what} {relation} folder `{other.root}` of archive `{other.name}`{state}: "
                "choose another folder"
            )
    if is_outside(context, archive):
        own = place_of_root(context.store.url)
        if _contains(mine, own) or _contains(own, mine):
            raise InvalidError(f"{what} contains this home, or is in it: choose another folder")
        _refuse_marked_above(context, archive, what)


def own_folders(archive: Archive) -> list[str]:
    """Returns the prefixes of keys that an archive writes below its root, except ``_owner``."""
    generations = [f"{archive.folder(number)}/" for number in range(1, archive.newest + 1)]
    return [layout.aside_folder(archive.root), f"{archive.root}/_iceberg/", *generations]


def is_own_name(archive: Archive, key: str) -> bool:
    """Returns whether an archive could have written an object with this name."""
    folder, _, below = key.removeprefix(f"{archive.root}/").partition("/")
    if folder in ("_aside", "_iceberg"):
        return True
    name = below.rpartition("/")[2]
    of_generation = name.removeprefix("_").startswith(f"{folder.removeprefix('g')}_")
    return of_generation or name == "_SUCCESS" or below.startswith("_delta_log/")


def is_ours(store: Store, archive: Archive) -> bool:
    """Returns whether a folder still has this archive's mark."""
    try:
        return store.get(archive.owner) == archive.owner_content
    except NotFoundError:
        return False


def _refuse_marked_above(context: Context, archive: Archive, what: str) -> None:
    """Raises for a folder below one that an archive of any home has marked."""
    address = parse_address(f"{archive.store.partition('?')[0]}/{archive.root}", "file")
    parts = [part for part in address.path.split("/") if part]
    host = address.host if address.port is None else f"{address.host}:{address.port}"
    options = parse_address(archive.store, "file").options
    for depth in range(len(parts)):
        above = format_address(address.scheme, host, f"/{'/'.join(parts[:depth])}", options)
        is_marked = False
        with contextlib.suppress(TidelogError):  # skip one that we may not read
            store_at(context, above).head("_owner")
            is_marked = True
        if is_marked:
            raise InvalidError(
                f"{what} is in the folder of another archive, as `{above.rstrip('/')}/_owner` "
                "says: choose another folder"
            )


def _contains(outer: _Place, inner: _Place) -> bool:
    return inner[: len(outer)] == outer
