"""Objects under keys that nothing names yet.

An upload comes first, and a row names the object afterwards. If the upload fails, or its reply is
lost, no row ever names it: nothing is stored that counts, and a sweep removes what may be there. So
the caller gets ``UnavailableError``, which is safe to retry, and never ``UnknownOutcomeError``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.store.base import Store

__all__ = ["copy_fresh", "put_fresh", "put_same"]


def put_fresh(store: Store, key: str, data: bytes) -> None:
    """Put an object under a fresh key. ``UnavailableError`` if it fails or its reply is lost."""
    with _nothing_named(key):
        store.put(key, data)


def copy_fresh(store: Store, source: str, target: str) -> None:
    """Copy an object to a fresh key, with the same errors. ``NotFoundError`` without a source."""
    with _nothing_named(target):
        store.copy(source, target)


def put_same(store: Store, key: str, data: bytes) -> None:
    """Put an object that an earlier attempt may have put; done if it is there with these bytes.

    ``CorruptError`` when it is there with others. The other errors are those of ``put_fresh``.
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
def _nothing_named(key: str) -> Iterator[None]:
    try:
        yield
    except UnknownOutcomeError as exc:
        raise UnavailableError(
            f"object `{key}`: its upload got no answer ({exc}); no row names it, so nothing was "
            "stored: try again"
        ) from exc
