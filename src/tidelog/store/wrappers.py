"""Wrappers around a store: retries that settle lost replies, a meter, and a cache.

:class:`RetryingStore` simply repeats reads and deletes. It also repeats a create whose reply was
lost. If the object exists then, it is ours if its bytes are ours, and only otherwise another
writer's. The same holds for a copy, whose bytes are those of its source, and for a replace.

:class:`MeteredStore` counts requests, bytes and time by verb, for costs and performance.

:class:`CachedStore` keeps ranges of objects, and the same range costs one request. Objects do not
change, so nothing expires; the least recently used ranges are dropped when the cache is full.
Readers that want a range while it is being fetched wait for that one request. The exception is
:meth:`Store.replace`, which drops the key here. A process that reads archive files which another
one may replace bypasses the cache.

The cache checks nothing, since the layers above know the checksums. Bytes that fail there were
damaged on their way, or in the store. :func:`reread` drops them here and fetches them once more,
and only what fails twice is reported.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tidelog.clock import Clock
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.limits import COPY_CHUNK_BYTES
from tidelog.model.times import Backoff
from tidelog.store.base import NoRoomError, ObjectInfo, Store, Upload

__all__ = [
    "CacheStats",
    "CachedStore",
    "Meter",
    "MeteredStore",
    "RetryingStore",
    "Usage",
    "reread",
]


T = TypeVar("T")


class RetryingStore:
    """A store that retries, with growing, jittered waits."""

    def __init__(
        self,
        inner: Store,
        *,
        clock: Clock,
        random: random.Random,
        backoff: Backoff,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._random = random
        self._backoff = backoff

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes) -> str:
        def landed() -> str | None:
            return self.head(key).etag if self._holds(key, data) else None

        return self._settle(lambda: self._inner.put(key, data), AlreadyExistsError, landed)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        def landed() -> str | None:
            info = self.head(key)
            return info.etag if info.etag != etag and self._holds(key, data) else None

        return self._settle(lambda: self._inner.replace(key, data, etag), ConflictError, landed)

    def copy(self, source: str, target: str) -> None:
        def landed() -> str | None:
            return target if self._same(source, target) else None

        self._settle(lambda: self._inner.copy(source, target), AlreadyExistsError, landed)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._repeat(lambda: self._inner.get(key, start, end))

    def head(self, key: str) -> ObjectInfo:
        return self._repeat(lambda: self._inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """If a page fails, continues after the last object that it returned."""
        delays = self._backoff.waits_s(self._random, self._clock)
        while True:
            try:
                for info in self._inner.list(prefix, start_after):
                    start_after = info.key
                    yield info
                return
            except UnavailableError:
                if not self._wait(delays):
                    raise

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        self._repeat(lambda: self._inner.delete(wanted))

    def uploads(self) -> Iterator[Upload]:
        yield from self._repeat(lambda: list(self._inner.uploads()))

    def abort_uploads(self, before_ms: int) -> int:
        return self._repeat(lambda: self._inner.abort_uploads(before_ms))

    def presign(self, key: str, expires_s: int) -> str:
        return self._inner.presign(key, expires_s)

    def _settle(
        self,
        attempt: Callable[[], T],
        refusal: type[AlreadyExistsError | ConflictError],
        landed: Callable[[], T | None],
    ) -> T:
        """Retries ``attempt``.

        If refused after a lost reply, checks whether that was our own write. Any other error after
        one leaves the outcome unknown.
        """
        lost: UnknownOutcomeError | None = None
        delays = self._backoff.waits_s(self._random, self._clock)
        while True:
            try:
                return attempt()
            except UnknownOutcomeError as exc:
                lost = exc
                if not self._wait(delays):
                    raise
            except refusal:
                if lost is None:
                    raise
                try:
                    mine = landed()
                except NotFoundError as exc:  # it existed, and was deleted since
                    if not self._wait(delays):
                        raise UnknownOutcomeError(f"{exc}: it was there a moment ago") from exc
                    continue
                except (InvalidError, UnavailableError) as exc:
                    raise UnknownOutcomeError(f"{lost}: then {exc}", **lost.context) from exc
                if mine is None:
                    raise
                return mine
            except (InvalidError, NotFoundError, UnavailableError) as exc:
                is_passing = isinstance(exc, UnavailableError) and not isinstance(exc, NoRoomError)
                if is_passing and self._wait(delays):
                    continue
                if lost is None:
                    raise
                raise UnknownOutcomeError(f"{lost}: then {exc}", **lost.context) from exc

    def _repeat(self, read: Callable[[], T]) -> T:
        delays = self._backoff.waits_s(self._random, self._clock)
        while True:
            try:
                return read()
            except UnavailableError:
                if not self._wait(delays):
                    raise

    def _wait(self, delays: Iterator[float]) -> bool:
        """Waits for the next attempt; returns False if there is none."""
        delay_s = next(delays, None)
        if delay_s is not None:
            self._clock.sleep(delay_s)
        return delay_s is not None

    def _holds(self, key: str, data: bytes) -> bool:
        return self.head(key).size == len(data) and self.get(key) == data

    def _same(self, source: str, target: str) -> bool:
        size = self.head(source).size
        if self.head(target).size != size:
            return False
        starts = range(0, size, COPY_CHUNK_BYTES)
        return all(
            self.get(source, start, start + COPY_CHUNK_BYTES)
            == self.get(target, start, start + COPY_CHUNK_BYTES)
            for start in starts
        )


def _prove(inner: Store, clock: Clock, random: random.Random) -> Store:
    return RetryingStore(inner, clock=clock, random=random, backoff=Backoff())


@dataclass(slots=True)
class Usage:
    """What one verb has cost so far."""

    requests: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Meter:
    """Usage by verb. Thread-safe."""

    verbs: dict[str, Usage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, verb: str, *, seconds: float, size: int = 0, failed: bool = False) -> None:
        with self._lock:
            usage = self.verbs.setdefault(verb, Usage())
            usage.requests += 1
            usage.errors += failed
            usage.bytes += size
            usage.seconds += seconds


class MeteredStore:
    """A store that counts. Put it inside a ``RetryingStore`` to count each attempt."""

    def __init__(self, inner: Store, meter: Meter, *, clock: Clock) -> None:
        self._inner = inner
        self._meter = meter
        self._clock = clock

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes) -> str:
        return self._count("put", lambda: self._inner.put(key, data), len(data))

    def replace(self, key: str, data: bytes, etag: str) -> str:
        return self._count("replace", lambda: self._inner.replace(key, data, etag), len(data))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        began_s = self._clock.monotonic_s()
        data = b""
        failed = True
        try:
            data = self._inner.get(key, start, end)
            failed = False
            return data
        finally:
            seconds = self._clock.monotonic_s() - began_s
            self._meter.add("get", seconds=seconds, size=len(data), failed=failed)

    def head(self, key: str) -> ObjectInfo:
        return self._count("head", lambda: self._inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        yield from self._count("list", lambda: self._inner.list(prefix, start_after))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        self._count("delete", lambda: self._inner.delete(wanted))

    def copy(self, source: str, target: str) -> None:
        self._count("copy", lambda: self._inner.copy(source, target))

    def uploads(self) -> Iterator[Upload]:
        yield from self._count("list", self._inner.uploads)

    def abort_uploads(self, before_ms: int) -> int:
        return self._count("list", lambda: self._inner.abort_uploads(before_ms))

    def presign(self, key: str, expires_s: int) -> str:
        return self._inner.presign(key, expires_s)

    def _count(self, verb: str, call: Callable[[], T], size: int = 0) -> T:
        began_s = self._clock.monotonic_s()
        failed = True
        try:
            result = call()
            failed = False
            return result
        finally:
            seconds = self._clock.monotonic_s() - began_s
            self._meter.add(verb, seconds=seconds, size=0 if failed else size, failed=failed)


def _check_metered(inner: Store, meter: Meter, clock: Clock) -> Store:
    return MeteredStore(inner, meter, clock=clock)


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


def _prove_cached(inner: Store) -> Store:
    return CachedStore(inner, 0)
