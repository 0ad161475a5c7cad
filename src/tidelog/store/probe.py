"""Tests a store's promises before anything is built on them.

Some gateways and emulators silently ignore conditional requests. On such a store two writers could
both believe that they created the same object. So when a home is created, two threads race to
create one object: exactly one must win, over several rounds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tidelog.clock import Ids
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, TidelogError
from tidelog.model import layout
from tidelog.store.base import Store

__all__ = ["probe_store"]

_ROUNDS = 3


def probe_store(store: Store, ids: Ids) -> None:
    """Raises ``InvalidError`` unless the store keeps its promises; leaves nothing behind."""
    keys = [layout.probe(ids.new()) for _ in range(_ROUNDS)]
    copied = layout.probe(ids.new())
    try:
        for key in keys:
            _probe_create(store, key)
        _probe_copy(store, keys[0], keys[1], copied)
        _probe_replace(store, keys[0])
    except Exception:
        with contextlib.suppress(TidelogError):  # the first error is the relevant one
            store.delete([*keys, copied])
        raise
    store.delete([*keys, copied])


def _probe_create(store: Store, key: str) -> None:
    bodies = (b"first", b"second")
    start = threading.Barrier(len(bodies))

    def create(body: bytes) -> bool:
        start.wait()
        try:
            store.put(key, body)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as racers:
        won = list(racers.map(create, bodies))
    if sum(won) != 1:
        raise _broken(store, f"{sum(won)} of {len(bodies)} racing creates of one object succeeded")
    if store.get(key) != bodies[won.index(True)]:
        raise _broken(store, "the object holds the bytes of the create that was refused")


def _probe_copy(store: Store, source: str, taken: str, free: str) -> None:
    _must_refuse(store, "a copy over an object", lambda: store.copy(source, taken))
    store.copy(source, free)
    if store.get(free) != store.get(source):
        raise _broken(store, "a copy differs from its source")


def _probe_replace(store: Store, key: str) -> None:
    etag = store.head(key).etag
    store.replace(key, b"third", etag)
    _must_refuse(store, "a replace with an old etag", lambda: store.replace(key, b"fourth", etag))
    if store.get(key) != b"third":
        raise _broken(store, "a replaced object does not hold the new bytes")


def _must_refuse(store: Store, what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (AlreadyExistsError, ConflictError):
        return
    raise _broken(store, f"{what} was not refused")


def _broken(store: Store, what: str) -> InvalidError:
    return InvalidError(
        f"store `{store.url}`: {what}, so events could be lost there: "
        "use a store with conditional writes (If-None-Match, If-Match)"
    )
