"""Bugs that others have shipped, planted into the log, so that the simulation proves itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.sim.audit import RecurringCatalog
from tests.sim.world import Parts
from tidelog.catalog.base import Catalog, Change, Put
from tidelog.codec.segment import Piece, Segment
from tidelog.errors import ConflictError
from tidelog.log.append import Appender, Stored
from tidelog.log.base import Log
from tidelog.log.lease import Lease, Membership, read_lease
from tidelog.log.sweep import sweep_home
from tidelog.model import layout
from tidelog.model.run import encode_row
from tidelog.testing.faults import FaultyCatalog


class CounterBeforeData(Appender):
    """Gives out offsets first and stores the bytes afterwards."""

    def upload(self, segment: Segment) -> Stored:
        key = layout.segment(self.topic.incarnation, self.topic.generation, self._log.ids.new())
        return Stored(segment, key, self.topic.generation)

    def commit(
        self,
        stored: Stored,
        piece: Piece,
        sequences: Sequence[int] | None = None,
        expected_offset: int | None = None,
    ) -> tuple[int, Stored]:
        done = super().commit(stored, piece, sequences, expected_offset)
        self._log.store.put(stored.key, stored.segment.data)
        return done


class NoFence(Membership):
    """Commits whatever has become of the lease."""

    def commit(self, partition: int, cursor: int) -> None:
        held = self.held[partition]
        lease = Lease(self.id, held.lease.epoch, cursor)
        where = layout.lease_partition(self._topic.incarnation, self._name, partition)
        write_id = self._log.ids.new()
        self._log.catalog.write(where, Put("lease", encode_row(lease)), write_id=write_id)
        held.lease, held.version = lease, write_id


class CursorWithoutEpoch(Membership):
    """Expects the version that it finds, not the one that it wrote."""

    def commit(self, partition: int, cursor: int) -> None:
        found = read_lease(self._log, self._topic, self._name, partition)
        if found is not None:
            self.held[partition].version = found[1]
        super().commit(partition, cursor)


class OwnAttemptIsConflict(FaultyCatalog):
    """Takes a lost reply for somebody else's win."""

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        try:
            self.faults.call(
                "write",
                lambda: self.inner.write(partition, *changes, write_id=write_id),
                TimeoutError,
            )
        except TimeoutError as exc:
            raise ConflictError("wrong: it may have landed") from exc


class _NoFloors:
    """A catalog that drops every write of a lone ``head``, which is how a sweep raises a floor."""

    def __init__(self, inner: Catalog) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        if [change.row for change in changes] != ["head"]:
            self._inner.write(partition, *changes, write_id=write_id)


def sweep_without_floor(log: Log, grace_ms: int) -> object:
    """Deletes what nothing refers to, without keeping out commits that are under way."""
    floorless: Any = _NoFloors(log.catalog)
    return sweep_home(replace(log, catalog=floorless), grace_ms)


BUGS = {
    "counter before data": Parts(appender=CounterBeforeData),
    "acknowledge before commit": Parts(acknowledge_early=True),
    "no fence": Parts(membership=NoFence),
    "sweep without a floor": Parts(sweep=sweep_without_floor),
    "cursor without epoch": Parts(membership=CursorWithoutEpoch),
    "a version that recurs": Parts(catalog=RecurringCatalog),
    "own attempt taken for a conflict": Parts(faulty=OwnAttemptIsConflict),
}
