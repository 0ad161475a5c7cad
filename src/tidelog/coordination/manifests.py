"""Reads manifests of pipelines from the store.

A reply may be damaged on its way, and a cache would keep it. So a manifest that does not decode is
read once more, past the cache, and only what fails twice counts as damaged.
"""

from __future__ import annotations

from tidelog.model.pipeline import Manifest, read_manifest
from tidelog.store.base import Store
from tidelog.store.wrappers import reread

__all__ = ["load_manifest"]


def load_manifest(store: Store, key: str) -> Manifest:
    """Returns a manifest. Raises ``NotFoundError``, and ``CorruptError`` for a damaged one."""
    return reread(store, key, lambda _: read_manifest(store.get(key), key))
