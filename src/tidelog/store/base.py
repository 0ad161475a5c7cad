"""The interface of a store: immutable objects under keys.

Keys are ``/``-separated text, relative to the store's root. Objects are created, never overwritten.
The only exception is :meth:`Store.replace`, which is conditional and only erases archived events.

**New objects.** Functions here create objects under keys that nothing names yet. The upload comes
first, and a row names the object afterwards. If the upload fails or its reply is lost, no row ever
names it: nothing is stored that counts, and a sweep deletes what may be there. So the caller gets
``UnavailableError``, which is safe to retry, and never ``UnknownOutcomeError``.

:func:`check_owner` checks the object that records the owner of a folder.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
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
    "check_owner",
    "check_range",
    "copy_fresh",
    "exists_already",
    "lost_remedy",
    "not_found",
    "object_exists",
    "put_fresh",
    "put_same",
    "replaced_meanwhile",
]


def after_folder(folder: str) -> str:
    """Returns the key to list after, in order to skip everything in a folder."""
    return f"{folder}/{chr(0x10FFFF)}"


class NoRoomError(UnavailableError):
    """The store is full: a person must make room first, so there is no immediate retry."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing returns about one object."""

    key: str
    size: int
    etag: str
    modified_ms: int
    file: str = field(default="", compare=False)  # device and inode; two names may have the same
    is_link: bool = field(default=False, compare=False)  # a link, or in a folder that is one


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished write: it holds bytes, and no listing of objects shows it."""

    name: str  # where the bytes are, or the key that they are meant for
    size: int
    began_ms: int
    may_end: bool  # False if the store knows that its writer died
    read: Callable[[], bytes] | None  # None if the store does not return its bytes


class Store(Protocol):
    """Objects under keys. Thread-safe.

    Every method raises ``InvalidError`` for a bad key, for missing rights and for wrong
    credentials. Reads raise ``UnavailableError`` if the store cannot be reached, and so do writes
    of which nothing landed. A write whose reply was lost raises ``UnknownOutcomeError``.
    """

    @property
    def url(self) -> str:
        """Returns the address that opens this store again, without secrets."""
        ...

    def put(self, key: str, data: bytes) -> str:
        """Creates an object, durable and whole on return; returns its etag.

        Raises ``AlreadyExistsError`` if it exists: exactly one of several concurrent calls
        succeeds. No reader ever sees a part of it.
        """
        ...

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Overwrites the object if it still has this etag; returns the new etag.

        Raises ``ConflictError`` if it has changed, and ``NotFoundError`` if it was deleted.
        """
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns the bytes of ``[start, end)``, or fewer at the end. Raises ``NotFoundError``."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Returns the size, etag and time of an object. Raises ``NotFoundError``."""
        ...

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """Yields objects whose key begins with ``prefix`` and is above ``start_after``, in key
        order.

        Lazy. Any prefix works, not only whole folders.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects. Idempotent: a missing one is not an error."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Creates ``target`` with the bytes of ``source``, without moving them through this
        process.

        Raises ``AlreadyExistsError`` if the target exists, and ``NotFoundError`` if the source does
        not.
        """
        ...

    def presign(self, key: str, expires_s: int) -> str:
        """Returns a URL by which anyone can get the object for this long."""
        ...

    def uploads(self) -> Iterator[Upload]:
        """Yields every unfinished write, of any process.

        Together with :meth:`list` this is everything that the store holds. Copies make multipart
        uploads on S3; a store in a folder has a temporary file for each put. Raises
        ``InvalidError`` if our rights do not allow listing them.
        """
        ...

    def abort_uploads(self, before_ms: int) -> int:
        """Aborts uploads that started before a time and never finished; returns how many.

        A lost reply or a killed process leaves such an upload, which costs as much as an object. A
        put that is still in progress, in any process, succeeds anyway.
        """
        ...


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> None:
    """Raises ``InvalidError`` for a key that a backend cannot hold, or that leaves its folder."""
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
    """Raises ``InvalidError`` for an object that is too large for one put."""
    if len(data) > limits.OBJECT_BYTES_MAX:
        raise InvalidError(
            f"object `{key}`: {len(data)} bytes: at most {limits.OBJECT_BYTES_MAX} in one object"
        )


def check_range(start: int, end: int | None) -> None:
    """Raises ``InvalidError`` for a byte range that runs backwards."""
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


def object_exists(store: Store, key: str) -> bool:
    """Returns whether an object exists. Asks the store, since a listing may be stale."""
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


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


def check_owner(store: Store, key: str, owner: bytes, what: str, name: str = "NAME") -> None:
    """Raises ``InvalidError`` unless the folder has our owner object; ``name`` is the archive's."""
    try:
        found = store.get(key)
    except NotFoundError:
        raise InvalidError(f"{what}: {lost_remedy(key, name)}") from None
    if found != owner:
        raise InvalidError(
            f"{what}: its `{key}` says `{found[:200].decode('utf-8', 'replace')}`, not "
            f"`{owner.decode()}`: the folder belongs to another home: create another archive, or "
            "put the object back if you are sure that no other home uses the folder"
        )
