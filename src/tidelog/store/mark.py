"""The object that says whose a folder of a store is."""

from __future__ import annotations

from tidelog.errors import InvalidError, NotFoundError
from tidelog.store.base import Store

__all__ = ["check_mark", "lost_remedy"]


def lost_remedy(key: str, name: str) -> str:
    """Returns what to do about an archive whose folder has no mark."""
    return (
        f"its `{key}` is not there: mount its disk, or put the folder back from a copy; if its "
        f"files are lost, end it with `tidelog archive delete {name} --lost-files`"
    )


def check_mark(store: Store, key: str, mark: bytes, what: str, name: str = "NAME") -> None:
    """Raise ``InvalidError`` unless the folder still bears our mark; ``name`` is the archive's."""
    try:
        found = store.get(key)
    except NotFoundError:
        raise InvalidError(f"{what}: {lost_remedy(key, name)}") from None
    if found != mark:
        raise InvalidError(
            f"{what}: its `{key}` says `{found[:200].decode('utf-8', 'replace')}`, not "
            f"`{mark.decode()}`: the folder belongs to another home: create another archive, or "
            "put the object back if you are sure that no other home uses the folder"
        )
