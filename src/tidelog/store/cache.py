"""A bounded cache of reads, where the same range of an object costs one request; and prefetch.

Objects do not change, so nothing expires; the least recently used ranges are dropped when the cache
is full. Readers that want a range while it is being fetched wait for that one request. The
exception is :meth:`Store.replace`, which drops the key here. A process that reads archive files
which another one may replace bypasses the cache.

The cache checks nothing, since the layers above know the checksums. Bytes that fail there were
damaged on their way, or in the store. :func:`reread` drops them here and fetches them once more,
and only what fails twice is reported.

:func:`fetched_ahead` fetches the next objects while the caller decodes one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from tidelog.errors import CorruptError, InvalidError
from tidelog.pool import Pool
from tidelog.store.base import ObjectInfo, Store, Upload

__all__ = ["CacheStats", "CachedStore", "fetched_ahead", "reread"]

T = TypeVar("T")

_Range = tuple[str, int, int | None]


@dataclass(slots=True)
class CacheStats:
    """How well the cache works."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class CachedStore:
    """A store that caches ranges, up to ``bytes_max`` in all."""

    def __init__(self, inner: Store, bytes_max: int) -> None:
        if bytes_max < 0:
            raise InvalidError(f"cache: bytes_max is {bytes_max}: give 0 or more")
        self._inner = inner
        self._bytes_max = bytes_max
        self._held: OrderedDict[_Range, bytes] = OrderedDict()
        self._coming: dict[_Range, Future[bytes]] = {}
        self._lock = threading.Lock()
        self.stats = CacheStats()

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def inner(self) -> Store:
        """Returns the store itself, for callers that must see what exists now."""
        return self._inner

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        wanted = (key, start, end)
        with self._lock:
            if wanted in self._held:
                self._held.move_to_end(wanted)
                self.stats.hits += 1
                return self._held[wanted]
            coming = self._coming.get(wanted)
            if coming is None:
                mine = self._coming[wanted] = Future()
                self.stats.misses += 1
            else:
                self.stats.hits += 1
        if coming is not None:
            return coming.result()
        return self._fetch(wanted, mine)

    def put(self, key: str, data: bytes) -> str:
        return self._inner.put(key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        try:
            return self._inner.replace(key, data, etag)
        finally:
            self.drop({key})

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        try:
            self._inner.delete(wanted)
        finally:
            self.drop(set(wanted))

    def copy(self, source: str, target: str) -> None:
        self._inner.copy(source, target)

    def uploads(self) -> Iterator[Upload]:
        return self._inner.uploads()

    def abort_uploads(self, before_ms: int) -> int:
        return self._inner.abort_uploads(before_ms)

    def presign(self, key: str, expires_s: int) -> str:
        return self._inner.presign(key, expires_s)

    def _fetch(self, wanted: _Range, mine: Future[bytes]) -> bytes:
        try:
            data = self._inner.get(*wanted)
        except BaseException as exc:
            with self._lock:
                self._coming.pop(wanted, None)
            mine.set_exception(exc)
            raise
        with self._lock:
            # A key that was dropped in the meantime is not cached.
            if self._coming.pop(wanted, None) is mine:
                self._keep(wanted, data)
        mine.set_result(data)
        return data

    def _keep(self, wanted: _Range, data: bytes) -> None:
        if len(data) > self._bytes_max:
            return
        self._held[wanted] = data
        self.stats.bytes += len(data)
        while self.stats.bytes > self._bytes_max:
            _, oldest = self._held.popitem(last=False)
            self.stats.bytes -= len(oldest)

    def drop(self, keys: set[str]) -> None:
        """Forgets what was read of these objects; the next read asks the store."""
        with self._lock:
            for wanted in [w for w in self._held if w[0] in keys]:
                self.stats.bytes -= len(self._held.pop(wanted))
            for wanted in [w for w in self._coming if w[0] in keys]:
                del self._coming[wanted]


def reread(store: Store, key: str, read: Callable[[bool], T]) -> T:
    """Returns the result of ``read``; after a ``CorruptError``, drops the object and reads it
    again.

    ``read`` gets its bytes from ``store``, and must do so in the second call, which gets True.
    """
    try:
        return read(False)
    except CorruptError:
        if isinstance(store, CachedStore):
            store.drop({key})
        return read(True)


def _prove(inner: Store) -> Store:
    return CachedStore(inner, 0)


_AHEAD = 3  # objects; each is a round trip on a remote store


def fetched_ahead(wanted: Iterable[T], fetch: Callable[[T], bytes]) -> Iterator[tuple[T, bytes]]:
    """Yields each wanted thing with its bytes, in order; raises an error in its turn.

    ``fetch`` runs in other threads. Only a few results are in memory at a time, even for a slow
    caller.
    """
    waiting: deque[tuple[T, Future[bytes]]] = deque()
    with Pool(_AHEAD, "tidelog-fetch") as pool:
        for each in wanted:
            waiting.append((each, pool.submit(fetch, each)))
            if len(waiting) > _AHEAD:
                first, coming = waiting.popleft()
                yield first, coming.result()
        for first, coming in waiting:
            yield first, coming.result()
