"""The object that says whose a folder of a store is."""

from __future__ import annotations

from tidelog.errors import InvalidError, NotFoundError
from tidelog.store.base import Store

__all__ = ["check_mark"]


def check_mark(store: Store, key: str, mark: bytes, what: str) -> None:
    """Raise ``InvalidError`` unless the folder still bears our mark."""
    try:
        found = store.get(key)
    except NotFoundError:
        found = b"nothing"
    if found != mark:
        raise InvalidError(
            f"{what}: its `{key}` says `{found[:200].decode('utf-8', 'replace')}`, not "
            f"`{mark.decode()}`: the folder belongs to another home: create another archive, or "
            "put the object back if you are sure that no other home uses the folder"
        )
