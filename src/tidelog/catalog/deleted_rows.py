"""Removes the bytes of deleted rows that a catalog's own files still hold."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidelog.catalog.base import Catalog

__all__ = ["Clearing", "clear_deleted_rows"]


@runtime_checkable
class Clearing(Protocol):
    """A catalog whose files this process writes itself."""

    def clear_deleted_rows(self) -> bool:
        """Removes what its files hold of deleted rows. Returns whether all of it is removed."""
        ...


def clear_deleted_rows(catalog: Catalog) -> bool:
    """Removes what the files of a catalog hold of deleted and replaced rows.

    Returns False if another process prevented that. Servers have files of their own, which are out
    of reach: returns True for these.
    """
    return catalog.clear_deleted_rows() if isinstance(catalog, Clearing) else True
