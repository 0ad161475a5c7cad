"""A catalog that watches its own history: no version recurs, and no write could land again.

A repeated packet may arrive at any time. So a write that took effect is checked as soon as a row
that it changed changes again, whether or not a packet is repeated in this world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tidelog.catalog.base import Change, Check, Put, Row, WriteOutcome, judge, versions_of
from tidelog.catalog.memory import MemoryCatalog
from tidelog.model import layout

# Rows that are put without an expectation: a repeated packet may put the same beat twice, or a name
# of a playback, which is not listed without its pin.
UNCONDITIONAL = ("member/", "consumer/", "playback/")

# Lists of unused objects stay true: one that comes back after a sweep is deleted by the next sweep.
# Only a compile makes its plan untrue, by a write that has other rows too. The same holds for notes
# of strays: one that comes back says when its objects were found, and the next sweep reads it.
LISTS = ("unused/", "stray/")


class AuditedCatalog(MemoryCatalog):
    """Knows every version that a row has ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0  # so that a simulation checks only when something has changed
        self.touched: set[str] = set()  # partitions, since a simulation last cleared it
        self.changed: Counter[str] = Counter()  # writes by partition, refused ones too
        self.pipelines: Counter[str] = Counter()  # the same, by pipeline
        self._had: dict[tuple[str, str], set[str]] = {}
        self._done: dict[tuple[str, str], dict[str, tuple[Change, ...]]] = {}  # by row and write

    def bare(self, partition: str) -> dict[str, Row]:
        """The rows of a partition, without a copy."""
        return self._partitions.get(partition, {})

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self.writes += 1
        self.touched.add(partition)
        self.changed[partition] += 1
        if partition.startswith("pipeline/"):
            self.pipelines[partition.split("/", 2)[1]] += 1
        before = {change.row: self.get(partition, change.row) for change in changes}
        super().write(partition, *changes, write_id=write_id)
        changed = [each for each in changes if self.get(partition, each.row) != before[each.row]]
        if not all(each.row.startswith(LISTS) for each in changed):
            self._check(partition, changed)
        if changed and not any(isinstance(each.expect, str) for each in changed):
            for change in changed:
                self._done.setdefault((partition, change.row), {})[write_id] = changes

    def _check(self, partition: str, changed: Sequence[Change]) -> None:
        if self._is_left(partition):
            return
        for change in changed:
            if not change.row.startswith(UNCONDITIONAL):
                self._check_version(partition, change)
                self._check_repeats(partition, change.row)

    def _check_version(self, partition: str, change: Change) -> None:
        """No version of a row recurs."""
        row = self.get(partition, change.row)
        if isinstance(change, Put) and row is not None:
            had = self._had.setdefault((partition, change.row), set())
            assert row.version not in had, f"version {row.version} of {change.row} recurs"
            had.add(row.version)

    def _check_repeats(self, partition: str, changed: str) -> None:
        """No write that took effect could do so once more, if its packet were repeated now.

        Versions do not recur, so only a write can that expects none of the rows that it changes.
        Records of the home's audit are deleted more than a year after their write.
        """
        if partition == layout.HOME_AUDIT:
            return
        for write_id, changes in self._done.get((partition, changed), {}).items():
            rows = {change.row: self.get(partition, change.row) for change in changes}
            if partition.startswith("pipeline/") and all(map(_is_frozen, changes)):
                continue
            outcome = judge(changes, versions_of(rows), write_id)
            names = [each.row for each in changes if not isinstance(each, Check)]
            assert outcome is not WriteOutcome.HOLDS, (
                f"write {write_id} of {names} could land again"
            )

    def _is_left(self, partition: str) -> bool:
        """Whether it is a row of a deleted pipeline, or a consumer's, say, of a deleted topic.

        A repeated packet may bring such a row back. No process uses it, as heads are closed.
        """
        kind, *rest = partition.split("/")
        heads: list[Row] = []
        if kind in ("consumer", "notify", "audit", "erased") and rest:
            heads = self._heads(f"topic/{rest[0]}/0")
        elif kind == "pipeline":
            heads = self._heads(f"pipeline/{rest[0]}/")
        return bool(heads) and all(msgspec.msgpack.decode(each.value)["closed"] for each in heads)

    def _heads(self, start: str) -> list[Row]:
        named = [rows for name, rows in self._partitions.items() if name.startswith(start)]
        return [rows["head"] for rows in named if "head" in rows]


def _is_frozen(change: Change) -> bool:
    """Whether it puts the frozen head of a pipeline's partition that no driver has begun.

    The driver that meets it thaws it (``test_repeated_packets``).
    """
    if not isinstance(change, Put) or change.row != "head":
        return False
    head = msgspec.msgpack.decode(change.value)
    return bool(head.get("frozen")) and not head["position"]


class RecurringCatalog(AuditedCatalog):
    """A planted bug: versions are small numbers that come again."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self._count += 1
        super().write(partition, *changes, write_id=f"v{self._count % 5}")
