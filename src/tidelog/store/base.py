"""What a store is: immutable objects under keys, made only where nothing was before.

Keys are ``/``-separated text, relative to the store's root. Nothing is overwritten but by
:meth:`Store.replace`, which is conditional and serves the erasure of archived events alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.model import limits

__all__ = [
    "NoRoomError",
    "ObjectInfo",
    "Store",
    "Upload",
    "after_folder",
    "check_data",
    "check_key",
    "check_range",
    "exists_already",
    "not_found",
    "replaced_meanwhile",
]


def after_folder(folder: str) -> str:
    """Returns what to list after, to pass over all that is in a folder."""
    return f"{folder}/{chr(0x10FFFF)}"


class NoRoomError(UnavailableError):
    """The store is full: somebody must make room first, so it is not tried again at once."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing tells of one object."""

    key: str
    size: int
    etag: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A write that has not ended: it holds bytes, and no listing of objects shows it."""

    name: str  # where the bytes are, or the key that they were meant for
    size: int
    began_ms: int
    may_end: bool  # False where the store knows that its writer died
    read: Callable[[], bytes] | None  # None where the store does not return what it holds


class Store(Protocol):
    """Objects under keys. Safe to share between threads.

    Every method raises ``InvalidError`` for a bad key, for missing rights and for wrong
    credentials; reads raise ``UnavailableError`` when the store cannot be reached, and so do
    writes of which nothing landed. A write whose reply was lost raises ``UnknownOutcomeError``.
    """

    @property
    def url(self) -> str:
        """The address that opens this store again; never with a secret in it."""
        ...

    def put(self, key: str, data: bytes) -> str:
        """Create an object, durable and whole on return; its etag.

        ``AlreadyExistsError`` when there is one: of racing calls exactly one succeeds. No reader
        ever sees a part of it.
        """
        ...

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Overwrite the object if it still has this etag; the new etag.

        ``ConflictError`` when it has changed, ``NotFoundError`` when it is gone.
        """
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of ``[start, end)``, fewer where the object ends before. ``NotFoundError``."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size, etag and time of an object. ``NotFoundError``."""
        ...

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix`` and is above ``start_after``, in key order.

        Lazy. Any prefix will do, not only whole folders.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Idempotent: one that is not there is no error."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Create ``target`` with the bytes of ``source``, without moving them through here.

        ``AlreadyExistsError`` when there is a target, ``NotFoundError`` when there is no source.
        """
        ...

    def presign(self, key: str, expires_s: int) -> str:
        """A URL by which anyone can get the object for this long."""
        ...

    def uploads(self) -> Iterator[Upload]:
        """Yields every write that has not ended, of any process.

        Together with :meth:`list` this is everything that the store holds. Copies make uploads in
        parts on S3; a store in a folder has a temporary file for each put. ``InvalidError`` where
        our rights do not allow to list them.
        """
        ...

    def abort_uploads(self, before_ms: int) -> int:
        """Remove uploads that began before a time and never ended; returns how many.

        A lost reply or a killed process leaves such an upload, which costs as much as an object.
        A put that is still under way in any process succeeds all the same.
        """
        ...


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> None:
    """Refuse a key that some backend could not hold, or that could leave its folder."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError as exc:
        raise InvalidError(f"object key {key!r}: not valid Unicode: give text") from exc
    if not 1 <= size <= limits.KEY_BYTES_MAX:
        raise InvalidError(
            f"object key `{key[:80]}`: has {size} bytes: give 1 to {limits.KEY_BYTES_MAX}"
        )
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidError(
                f"object key `{key}`: has an empty, `.` or `..` part: give plain names"
            )
        if len(segment.encode()) > limits.KEY_SEGMENT_BYTES_MAX:
            raise InvalidError(
                f"object key `{key[:80]}`: a part is longer than "
                f"{limits.KEY_SEGMENT_BYTES_MAX} bytes: shorten it"
            )
    if _CONTROL.search(key):
        raise InvalidError(f"object key {key!r}: holds a control character: leave it out")


def check_data(key: str, data: bytes) -> None:
    """Refuse an object that no single put can hold."""
    if len(data) > limits.OBJECT_BYTES_MAX:
        raise InvalidError(
            f"object `{key}`: {len(data)} bytes: at most {limits.OBJECT_BYTES_MAX} in one object"
        )


def check_range(start: int, end: int | None) -> None:
    """Refuse a byte range that runs backwards."""
    if start < 0 or (end is not None and end < start):
        raise InvalidError(f"byte range [{start}, {end}): give 0 <= start <= end")


def exists_already(key: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"object `{key}`: exists already: choose another key", key=key)


def not_found(key: str) -> NotFoundError:
    return NotFoundError(
        f"object `{key}`: not found: check the key, or read the catalog again", key=key
    )


def replaced_meanwhile(key: str, expected: str, found: str) -> ConflictError:
    return ConflictError(
        f"object `{key}`: expected etag {expected}, found {found}: read it again and decide",
        key=key,
    )
