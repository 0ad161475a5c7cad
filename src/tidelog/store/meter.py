"""Count requests, bytes and time by verb, for costs and for finding where the time goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tidelog.clock import Clock
from tidelog.store.base import ObjectInfo, Store, Upload

__all__ = ["Meter", "MeteredStore", "Usage"]

T = TypeVar("T")


@dataclass(slots=True)
class Usage:
    """What one verb has cost so far."""

    requests: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Meter:
    """Usage by verb; shared by threads."""

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
    """A store that counts. Put it inside a ``RetryingStore`` to see each attempt."""

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


def _prove(inner: Store, meter: Meter, clock: Clock) -> Store:
    return MeteredStore(inner, meter, clock=clock)
