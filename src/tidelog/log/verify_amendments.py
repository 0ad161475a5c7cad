"""Verifying amendments: where the head says that they are, and with the values that they name."""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.catalog.base import Row
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.findings import Tally
from tidelog.model import layout
from tidelog.model.run import Amendment, Head, decode_row

__all__ = ["AmendmentCheck"]


@dataclass(frozen=True, slots=True)
class _Met:
    """An amendment's row, without its value."""

    offset: int
    row: str
    version: str
    sequence: int
    object: str | None


class AmendmentCheck:
    """The amendments of one partition."""

    def __init__(self, tally: Tally, partition: int) -> None:
        self._tally = tally
        self._partition = partition
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._met: list[_Met] = []

    def add(self, row: Row) -> None:
        """A row has been met."""
        try:
            amendment = decode_row(row.value, Amendment, "value")
            offset = layout.amend_offset(row.row)
        except (CorruptError, ValueError) as exc:
            self._error(row.row, str(exc))
            return
        if row.row != layout.amend_row(offset):
            self._error(row.row, f"amends offset {offset}, whose row has another name")
            return
        if amendment.object is not None:
            self._tally.name(self._partition, amendment.object)
        met = _Met(offset, row.row, row.version, amendment.sequence, amendment.object)
        self._met.append(met)

    def finish(self, head: Head, first: int | None) -> None:
        """All rows have been met; the head was read after them.

        ``first`` is the lowest offset that a living run or journal has. Amendments from there to
        the start stay until that object is written again without what they delete.
        """
        trimmed = 0
        for each in self._met:
            if each.offset < head.start:
                trimmed += first is None or each.offset < first
                continue
            self._tally.amendments += 1
            problem = self._problem_of(each, head)
            if problem is not None and self._is_there(each):
                self._error(each.row, problem)
        if trimmed:
            what = f"{trimmed} amendments of trimmed events: the next trim or sweep ends that"
            self._tally.add("note", f"partition {self._name}", what)

    def _problem_of(self, each: _Met, head: Head) -> str | None:
        first, last = head.amended or (0, -1)
        if not first <= each.offset <= last:
            return "is not where the head says that amendments are: no reader sees it"
        if not 1 <= each.sequence <= head.amendments:
            return f"has sequence {each.sequence}, the head counts {head.amendments}"
        if each.object is None:
            return None
        if not self._tally.owns(each.object):
            return f"object `{each.object}`: is not of this topic"
        try:
            self._tally.size_of(each.object)
        except NotFoundError:
            return f"object `{each.object}`: is missing: restore it from a copy"
        return None

    def _is_there(self, each: _Met) -> bool:
        """Whether the row is still as it was scanned; if not, it was amended again, or applied."""
        row = self._tally.log.catalog.get(self._where, each.row)
        return row is not None and row.version == each.version

    def _error(self, row: str, what: str) -> None:
        self._tally.add("error", f"partition {self._name}, row `{row}`", what)
