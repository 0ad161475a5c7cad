"""A catalog that watches its own history: versions that recur are caught as they are written."""

from __future__ import annotations

from collections import Counter

import msgspec

from tidelog.catalog.base import Change, Put, Row
from tidelog.catalog.memory import MemoryCatalog

# Rows that are put without an expectation: a repeated packet may put the same beat twice.
UNCONDITIONAL = ("member/", "consumer/")


class AuditedCatalog(MemoryCatalog):
    """Knows every version that a row has ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0  # so that a simulation checks only when something has changed
        self.touched: set[str] = set()  # partitions, since a simulation last cleared it
        self.changed: Counter[str] = Counter()  # writes by partition, refused ones too
        self._had: dict[tuple[str, str], set[str]] = {}

    def bare(self, partition: str) -> dict[str, Row]:
        """The rows of a partition, without a copy."""
        return self._partitions.get(partition, {})

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self.writes += 1
        self.touched.add(partition)
        self.changed[partition] += 1
        before = {change.row: self.get(partition, change.row) for change in changes}
        super().write(partition, *changes, write_id=write_id)
        for change in changes:
            row = self.get(partition, change.row)
            if not isinstance(change, Put) or row is None or row == before[change.row]:
                continue
            if change.row.startswith(UNCONDITIONAL) or self._is_left(partition):
                continue
            had = self._had.setdefault((partition, change.row), set())
            assert row.version not in had, f"version {row.version} of {change.row} recurs"
            had.add(row.version)

    def _is_left(self, partition: str) -> bool:
        """Whether it is a row of a deleted topic: consumer, notification, audit or ledger.

        A repeated packet may bring such a row back. No process uses it, as the head is closed.
        """
        kind, *rest = partition.split("/")
        head = self.bare(f"topic/{rest[0]}/0").get("head") if rest else None
        if kind not in ("consumer", "notify", "audit", "erased") or head is None:
            return False
        return bool(msgspec.msgpack.decode(head.value)["closed"])


class RecurringCatalog(AuditedCatalog):
    """A planted bug: versions are small numbers that come again."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self._count += 1
        super().write(partition, *changes, write_id=f"v{self._count % 5}")
