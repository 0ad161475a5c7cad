"""Keepers: the running ``tidelog up`` processes of a home, and the state of their parts.

A keeper keeps writing one row under an id of its own, and removes it when it ends. So any server of
the home can show which keepers run what. A keeper is considered dead when its row does not change
for three heartbeats by the watcher's own monotonic clock (:class:`Keepers`), since the wall clocks
of hosts may differ. Safety does not depend on these rows: leases and heads decide who may work.
"""

from __future__ import annotations

import contextlib

from tidelog.catalog.base import Delete, Put
from tidelog.context import Context
from tidelog.errors import ConflictError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import decode_row, encode_row

__all__ = ["BEAT_MS", "Keeper", "Keepers", "SupervisedPart", "put_keeper", "remove_keeper"]

BEAT_MS = 10_000  # between two writes of an unchanged row
_SILENT_MS = 3 * BEAT_MS  # after which a keeper is considered dead
_FORGOTTEN_MS = 24 * 3_600_000  # after which its row is removed


class SupervisedPart(Persisted, frozen=True):
    """Something that a keeper runs: a process, or an archive or a pump in one."""

    name: str  # serve, follow, archive daily
    state: str  # starting, running, standing by, failed, stopped
    since_ms: int  # when it entered this state
    pid: int = 0  # of a process
    restarts: int = 0
    error: str = ""  # the last one; empty while healthy
    events: int | None = None  # that it has processed since it started
    waiting: int | None = None  # events that wait for it


class Keeper(Persisted, frozen=True):
    """One running ``tidelog up``."""

    id: str
    host: str
    pid: int
    mark: str  # of its process
    started_ms: int
    beat_ms: int
    url: str = ""  # of its server
    parts: tuple[SupervisedPart, ...] = ()


def put_keeper(context: Context, keeper: Keeper) -> None:
    """Writes a keeper's row, with the state of its parts."""
    change = Put(layout.keeper_row(keeper.id), encode_row(keeper))
    with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next heartbeat repeats it
        context.catalog.write(layout.KEEPERS, change, write_id=context.ids.new())


def remove_keeper(context: Context, keeper_id: str) -> None:
    """Removes the row of a keeper that ends."""
    with contextlib.suppress(ConflictError, UnknownOutcomeError):
        context.catalog.write(
            layout.KEEPERS, Delete(layout.keeper_row(keeper_id)), write_id=context.ids.new()
        )


class Keepers:
    """Watches the keepers of a home, for a process that looks repeatedly."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, tuple[str, float]] = {}  # row → its version, and since when

    def list(self) -> list[Keeper]:
        """Returns the running keepers, oldest first. Removes rows that did not change for a day.

        One that is seen for the first time counts as running, unless its process is known to have
        ended.
        """
        clock, context = self._context.clock, self._context
        # Taken before the rows are read: a slow scan must not count as silence.
        began_s = clock.monotonic_s()
        found: list[Keeper] = []
        seen: dict[str, tuple[str, float]] = {}
        for row in context.catalog.scan(layout.KEEPERS, layout.keeper_row(""), "keeper0"):
            keeper = decode_row(row.value, Keeper, f"keeper row `{row.row}`")
            version, since_s = self._seen.get(row.row, ("", 0.0))
            seen[row.row] = (row.version, since_s if version == row.version else began_s)
            silent_ms = (began_s - seen[row.row][1]) * 1000
            if silent_ms > _FORGOTTEN_MS:
                remove_keeper(context, keeper.id)
            elif silent_ms <= _SILENT_MS and not context.processes.is_dead(keeper.mark):
                found.append(keeper)
        self._seen = seen
        return sorted(found, key=lambda keeper: (keeper.started_ms, keeper.id))
