"""A catalog in a dictionary, for tests and experiments, and to copy from.

It is lost with the process. It is the simplest implementation that keeps the contract.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from tidelog.catalog.base import (
    Catalog,
    Change,
    Delete,
    Put,
    Row,
    WriteOutcome,
    check_limit,
    check_name,
    check_write,
    conflict,
    judge,
    versions_of,
)
from tidelog.model import limits

__all__ = ["MemoryCatalog"]


class MemoryCatalog:
    """Rows in a dictionary of dictionaries, behind one lock."""

    url = "memory:"

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, Row]] = {}
        self._lock = threading.Lock()

    def get(self, partition: str, row: str) -> Row | None:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_name("row", row, limits.ROW_BYTES_MAX)
        with self._lock:
            return self._partitions.get(partition, {}).get(row)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_limit(limit)
        with self._lock:
            rows = self._partitions.get(partition, {})
            keys = [key for key in rows if key >= start and (end is None or key < end)]
            found = [rows[key] for key in sorted(keys, reverse=reverse)[:limit]]
        return iter(found)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        check_write(partition, changes, write_id)
        with self._lock:
            rows = self._partitions.setdefault(partition, {})
            found = {change.row: rows.get(change.row) for change in changes}
            outcome = judge(changes, versions_of(found), write_id)
            if outcome is WriteOutcome.DONE:
                return
            if outcome is WriteOutcome.FAILED:
                raise conflict(partition, changes, found)
            for change in changes:
                if isinstance(change, Put):
                    rows[change.row] = Row(change.row, bytes(change.value), write_id)
                elif isinstance(change, Delete):
                    rows.pop(change.row, None)

    def close(self) -> None:
        """Does nothing; the rows stay while the object exists."""


_: type[Catalog] = MemoryCatalog
