"""Names in paths: a folder may be named by a field of the events in it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote

__all__ = ["folder_names", "names_of"]


def folder_names(folder: str) -> Iterator[str]:
    """The names in a folder's path, without escapes too, and what follows ``=`` in them."""
    for part in folder.split("/"):
        for name in {part, unquote(part)} - {""}:
            yield name
            if "=" in name:
                yield name.partition("=")[2]


def names_of(key: str) -> Iterator[str]:
    """The names in an object's key: without escapes, what follows ``=``, and without a suffix."""
    for part in key.split("/"):
        for name in {part, unquote(part)}:
            yield from {name, name.partition("=")[2], name.rpartition(".")[0]} - {""}
