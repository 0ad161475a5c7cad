# ruff: noqa: PLC0415 - one lazy import for each scheme
"""The catalog: rows in partitions, changed only by conditional writes.

It promises that a write lands whole or not at all, that no version of a row ever recurs, and that a
lost reply is never mistaken for a conflict. It must not know what its rows mean.

``base`` has the interface and its values. ``update`` is the one loop that reads, decides, writes
and retries, and determines the outcome of a write whose reply was lost. The backends are ``memory``
(to copy from), ``sqlite``, ``dynamodb`` and ``cql``. ``checksums`` checks the rows of any of them.
Other packages can add a backend through the entry point group ``tidelog.catalogs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.catalog.base import ABSENT, Catalog, Change, Check, Delete, Put, Row
from tidelog.catalog.update import Repeat
from tidelog.errors import InvalidError
from tidelog.model.address import nearest, parse_address
from tidelog.plugins import find_plugins

__all__ = [
    "ABSENT",
    "CATALOG_SCHEMES",
    "Catalog",
    "Change",
    "Check",
    "Delete",
    "Put",
    "Row",
    "open_catalog",
]

CATALOG_SCHEMES = ("sqlite", "memory", "dynamodb", "cql")


def open_catalog(url: str, *, create: bool, repeat: Repeat, environ: Mapping[str, str]) -> Catalog:
    """Returns the catalog of a URL, reachable and of the right shape.

    With ``create``, creates its file or table if it is missing; otherwise that is an error.
    """
    address = parse_address(url, plain_scheme="sqlite")
    if address.scheme == "sqlite":
        from tidelog.catalog.sqlite import open_sqlite

        return open_sqlite(address, create=create, repeat=repeat)
    if address.scheme == "memory":
        from tidelog.catalog.memory import MemoryCatalog

        address.take_options(())
        return MemoryCatalog()
    if address.scheme == "dynamodb":
        from tidelog.catalog.dynamodb import open_dynamodb

        return open_dynamodb(address, create=create, repeat=repeat, environ=environ)
    if address.scheme == "cql":
        from tidelog.catalog.cql import open_cql

        return open_cql(address, create=create, repeat=repeat, environ=environ)
    for entry in find_plugins("tidelog.catalogs", address.scheme):
        catalog: Catalog = entry.load()(address, create=create, repeat=repeat, environ=environ)
        return catalog
    raise InvalidError(
        f"catalog `{url}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, CATALOG_SCHEMES)}: give one of {', '.join(CATALOG_SCHEMES)}"
    )
