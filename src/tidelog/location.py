"""Where the two halves of a home are, in words that tell a copy from the original.

A folder and a SQLite file are named by their path without links and by their machine, since SQLite
works on one machine only. A bucket and a table are named without what may differ between clients:
options, and the hosts of a cluster. A folder beside a catalog on a server has no name: machines may
mount it at different paths. Memory has none either.

Not told apart: a disk image that runs on a second machine with the same machine id, and a CQL
keyspace of the same name on another cluster. An archive outside has a second check, its ``_owner``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tidelog.model.address import parse_address

__all__ = ["Location", "locate", "machine_id"]


@dataclass(frozen=True, slots=True)
class Location:
    """Names of a store's and a catalog's place; empty where there is nothing to tell apart."""

    store: str = ""
    catalog: str = ""

    def __str__(self) -> str:
        return " and ".join(filter(None, (self.store, self.catalog))) or "memory"


def locate(store_url: str, catalog_url: str, machine: str) -> Location:
    """The places of a home's halves, from their URLs."""
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
    """The id of this installation; empty where there is none, as in many containers."""
    try:
        return Path("/etc/machine-id").read_text().strip()[:64]
    except (OSError, UnicodeDecodeError):
        return ""
