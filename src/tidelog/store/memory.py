"""A store in a dictionary, for tests and experiments. It is lost with the process."""

from __future__ import annotations

import base64
import itertools
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from tidelog.clock import Clock
from tidelog.store.base import (
    ObjectInfo,
    Store,
    Upload,
    check_data,
    check_key,
    check_range,
    exists_already,
    not_found,
    replaced_meanwhile,
)

__all__ = ["MemoryStore"]


class MemoryStore:
    """Objects in a dictionary, behind one lock."""

    url = "memory:"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._keys: list[str] = []  # of all objects, in order
        self._etags = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        check_data(key, data)
        with self._lock:
            if key in self._objects:
                raise exists_already(key)
            return self._store(key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        check_data(key, data)
        with self._lock:
            _, info = self._find(key)
            if info.etag != etag:
                raise replaced_meanwhile(key, etag, info.etag)
            return self._store(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        with self._lock:
            data, _ = self._find(key)
        return data[start:end]

    def head(self, key: str) -> ObjectInfo:
        with self._lock:
            return self._find(key)[1]

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            return iter([self._objects[key][1] for key in self._below(prefix, start_after)])

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                check_key(key)
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def copy(self, source: str, target: str) -> None:
        check_key(target)
        with self._lock:
            data, _ = self._find(source)
            if target in self._objects:
                raise exists_already(target)
            self._store(target, data)

    def uploads(self) -> Iterator[Upload]:
        return iter(())

    def abort_uploads(self, before_ms: int) -> int:
        return 0

    def presign(self, key: str, expires_s: int) -> str:
        return "data:application/octet-stream;base64," + base64.b64encode(self.get(key)).decode()

    def _find(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        if key not in self._objects:
            raise not_found(key)
        return self._objects[key]

    def _below(self, prefix: str, start_after: str = "") -> Iterator[str]:
        first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
        return takewhile(lambda key: key.startswith(prefix), islice(self._keys, first, None))

    def _store(self, key: str, data: bytes) -> str:
        info = ObjectInfo(key, len(data), f"m{next(self._etags)}", self._clock.now_ms())
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = (bytes(data), info)
        return info.etag


def _prove(clock: Clock) -> Store:
    return MemoryStore(clock)
