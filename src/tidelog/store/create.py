"""Creates objects under keys that nothing names yet.

The upload comes first, and a row names the object afterwards. If the upload fails or its reply is
lost, no row ever names it: nothing is stored that counts, and a sweep deletes what may be there. So
the caller gets ``UnavailableError``, which is safe to retry, and never ``UnknownOutcomeError``.

It also checks the object that records the owner of a folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.store.base import Store

__all__ = [
    "check_mark",
    "copy_fresh",
    "lost_remedy",
    "put_fresh",
    "put_same",
]


def put_fresh(store: Store, key: str, data: bytes) -> None:
    """Puts an object under a new key. Raises ``UnavailableError`` for any failure or lost reply."""
    with _as_unavailable(key):
        store.put(key, data)


def copy_fresh(store: Store, source: str, target: str) -> None:
    """Copies an object to a new key, with the same errors. ``NotFoundError`` without a source."""
    with _as_unavailable(target):
        store.copy(source, target)


def put_same(store: Store, key: str, data: bytes) -> None:
    """Puts an object that an earlier attempt may have put; succeeds if it exists with these bytes.

    Raises ``CorruptError`` if it exists with other bytes; otherwise raises as ``put_fresh``.
    """
    try:
        put_fresh(store, key, data)
        return
    except AlreadyExistsError:
        found = store.get(key)
    if found != data:
        raise CorruptError(
            f"object `{key}`: exists with {len(found)} other bytes, expected our {len(data)}: "
            "keep it, and find out what wrote it",
            key=key,
        )


@contextlib.contextmanager
def _as_unavailable(key: str) -> Iterator[None]:
    try:
        yield
    except UnknownOutcomeError as exc:
        raise UnavailableError(
            f"object `{key}`: its upload got no answer ({exc}); no row names it, so nothing was "
            "stored: try again"
        ) from exc


def lost_remedy(key: str, name: str) -> str:
    """Returns what to do about an archive whose folder has no mark."""
    return (
        f"its `{key}` is not there: mount its disk, or put the folder back from a copy; if its "
        f"files are lost, end it with `tidelog archive delete {name} --lost-files`"
    )


def check_mark(store: Store, key: str, mark: bytes, what: str, name: str = "NAME") -> None:
    """Raises ``InvalidError`` unless the folder has our mark; ``name`` is the archive's."""
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
