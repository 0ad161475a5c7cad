"""Verifying slot rows: each run and journal has its own, and there are no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidelog.catalog.base import Row
from tidelog.errors import CorruptError
from tidelog.log.findings import Tally
from tidelog.model import layout
from tidelog.model.run import Run, decode_row
from tidelog.model.slot import journal_slots, slots_of

__all__ = ["SlotCheck"]


class SlotCheck:
    """The slot rows of one partition; ``holds_now`` tells whether a run is still there."""

    def __init__(self, tally: Tally, partition: int, holds_now: Callable[[Run], bool]) -> None:
        self._tally = tally
        self._slot_ms = tally.topic.slot_ms
        self._catalog = tally.log.catalog
        self._name = f"`{tally.topic.name}/{partition}`"
        self._where = layout.topic_partition(tally.topic.incarnation, partition)
        self._holds_now = holds_now
        self._wanted: dict[str, tuple[Run, bool, bool]] = {}  # run, whether live, whether seen
        self._dangling: list[Row] = []

    def expect(self, run: Run, is_live: bool) -> None:
        """A run has been met; one that is not live may have its rows, or not."""
        for name in _names(run, self._slot_ms):
            self._wanted[name] = (run, is_live, False)

    def add(self, row: Row) -> None:
        """A slot row has been met."""
        is_journal = row.value.endswith(b"j")
        name = row.row if is_journal else row.row[: row.row.rindex("/") + 1]
        run, is_live, seen = self._wanted.get(name, (None, False, False))
        if run is None:
            self._dangling.append(row)
        elif seen:
            self._error(row.row, f"is the second one for the run at {run.base}")
        else:
            self._wanted[name] = (run, is_live, True)
            if row.value != f"{run.end}{'j' if is_journal else ''}".encode():
                self._error(row.row, f"says {row.value!r}, the run ends at {run.end}")

    def finish(self, gaps: Sequence[tuple[int, int]]) -> None:
        """All rows have been met; in gaps the runs are missing."""
        for name, (run, is_live, seen) in self._wanted.items():
            if is_live and not seen and not self._is_there(name, run) and self._holds_now(run):
                self._error(name, f"is missing: the run at {run.base} needs it")
        for row in self._dangling:
            if self._is_dangling(row, gaps):
                self._error(row.row, "names no run: nothing is found by it")

    def _is_there(self, name: str, run: Run) -> bool:
        """Whether a journal's slot row is there after all, as it may have come late."""
        return run.journal is not None and self._catalog.get(self._where, name) is not None

    def _is_dangling(self, row: Row, gaps: Sequence[tuple[int, int]]) -> bool:
        """Whether no run has this slot, also none that came after the scan."""
        try:
            base = int(row.row.split("/")[3])
        except (IndexError, ValueError):
            return True
        if any(first <= base < end for first, end in gaps):
            return False  # its run is missing, which is told already
        is_journal = row.value.endswith(b"j")
        name = (layout.journal_row if is_journal else layout.run_row)(base)
        found = self._catalog.get(self._where, name)
        if found is not None:
            try:
                run = decode_row(found.value, Run, "")
            except CorruptError:
                return False  # the run's row is damaged, which is told already
            if run.base != base or not 0 <= run.first_ms <= run.last_ms:
                return False  # so is this
            names = _names(run, self._slot_ms)
            if row.row in names if is_journal else row.row.startswith(tuple(names)):
                return False
        return self._catalog.get(self._where, row.row) is not None

    def _error(self, row: str, what: str) -> None:
        self._tally.add("error", f"partition {self._name}, row `{row}`", what)


def _names(run: Run, slot_ms: int) -> list[str]:
    """The keys of a journal's slot rows; of a run, what they begin with."""
    if run.journal is not None:
        return list(journal_slots(run, slot_ms))
    level, starts = slots_of(run.first_ms, run.last_ms, slot_ms)
    return [layout.slot_row(level, start, run.base, "") for start in starts]
