"""Removing what a pipeline has: its heads are closed, its objects and rows go.

Closed heads stay for good: they are what keeps a driver that slept from starting anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from tidelog.catalog.base import ABSENT, Delete, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.archives import read_partitions
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import Progress
from tidelog.model.run import decode_row, encode_row
from tidelog.store.base import Store

__all__ = ["close_heads", "delete_below", "remove_work"]

_DELETES_AT_ONCE = 1_000  # objects, in one request
_ROWS_AT_ONCE = 25
_ATTEMPTS = 50  # of a write that others keep changing


def close_heads(log: Log, pipeline: str) -> None:
    """Whatever driver has a head fails at its next write, and nobody adopts it again."""
    for partition in read_partitions(log, pipeline):
        _close(log, pipeline, partition)


def remove_work(log: Log, pipeline: str, staged_in: Store) -> None:
    """Staged files, manifests, and rows but the heads, of a pipeline whose heads are closed."""
    delete_below(staged_in, layout.staging_of(pipeline))
    delete_below(log.store, layout.manifests(pipeline))
    for partition in read_partitions(log, pipeline):
        for kind in ("aside", "before", "commit", "erased", "intent"):
            _remove_rows(log, layout.pipeline_partition(pipeline, partition), kind)
    for kind in ("counted", "failure", "folder", "seen", "unsettled", "waiting"):
        _remove_rows(log, layout.pipeline_shards(pipeline), kind)


def delete_below(store: Store, prefix: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Delete objects whose keys begin so, as far as they are wanted."""
    keys: list[str] = []
    for info in store.list(prefix):
        if wanted(info.key):
            keys.append(info.key)
        if len(keys) >= _DELETES_AT_ONCE:
            store.delete(keys)
            keys = []
    if keys:
        store.delete(keys)


def _close(log: Log, pipeline: str, partition: str) -> None:
    where = layout.pipeline_partition(pipeline, partition)
    for _ in range(_ATTEMPTS):
        row = log.catalog.get(where, "head")
        head = Progress("", 0, 0)  # of a partition that a driver may be about to begin
        if row is not None:
            head = decode_row(row.value, Progress, f"head of `{partition}`")
        if head.closed:
            return
        expect = ABSENT if row is None else row.version
        closed = Put("head", encode_row(msgspec.structs.replace(head, closed=True)), expect)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(where, closed, write_id=log.ids.new())
    raise UnavailableError(f"head of `{partition}`: others keep changing it: try again")


def _remove_rows(log: Log, where: str, kind: str) -> None:
    rows = [row.row for row in log.catalog.scan(where, kind, f"{kind}0")]
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        deletes = [Delete(row) for row in rows[first : first + _ROWS_AT_ONCE]]
        with contextlib.suppress(UnknownOutcomeError):  # whoever removes it again meets them
            log.catalog.write(where, *deletes, write_id=log.ids.new())
