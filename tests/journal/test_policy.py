"""Which rows become one journal: by size, by age, by amendments, and never too often."""

from __future__ import annotations

import pytest

from tidelog.errors import InvalidError
from tidelog.journal.compile_steps import (
    JOURNALS_AT_ONCE,
    RUNS_AT_ONCE,
    Candidate,
    CompilePolicy,
    choose_groups,
)
from tidelog.model.topic import Journal, Run

NOW_MS = 1_000_000_000
PLAIN = CompilePolicy(
    min_events=100,
    min_bytes=10_000,
    older_than_ms=60_000,
    min_amendments=10,
    amended_before_ms=600_000,
    max_events=1_000,
    max_bytes=100_000,
    max_raw_bytes=1_000_000,
)


class Rows:
    """Rows one after another."""

    def __init__(self) -> None:
        self.journals: list[Candidate] = []
        self.runs: list[Candidate] = []
        self._at = 0

    def journal(self, events: int, amendments: int = 0, amended_ms: int | None = None) -> Rows:
        run = self._run(events, Journal(0, 0, events, 0), NOW_MS)
        self.journals.append(Candidate(run, amendments, amended_ms))
        return self

    def run(self, events: int, committed_ms: int = NOW_MS, amendments: int = 0) -> Rows:
        self.runs.append(Candidate(self._run(events, None, committed_ms), amendments))
        return self

    def groups(self, policy: CompilePolicy = PLAIN) -> list[list[int]]:
        """The events of each row, group by group."""
        found = choose_groups(self.journals, self.runs, policy, NOW_MS)
        for group in found:
            assert [row.end for row in group.rows[:-1]] == [row.base for row in group.rows[1:]]
            assert len(group.journals) <= JOURNALS_AT_ONCE
        return [[row.events for row in group.rows] for group in found]

    def _run(self, events: int, journal: Journal | None, committed_ms: int) -> Run:
        base, self._at = self._at, self._at + max(1, events)
        count = max(1, events)
        size = events * 50
        return Run(base, count, "k", 0, size, 0, 0, 0, size * 4, committed_ms, journal=journal)


def test_nothing_makes_nothing() -> None:
    assert Rows().groups() == []
    assert Rows().groups(CompilePolicy.everything()) == []


def test_runs_wait_until_there_are_enough_events_or_bytes() -> None:
    assert Rows().run(50).run(49).groups() == []
    assert Rows().run(50).run(50).groups() == [[50, 50]]
    few_bytes = CompilePolicy(min_events=1_000, min_bytes=50 * 50)
    assert Rows().run(49).groups(few_bytes) == []
    assert Rows().run(50).groups(few_bytes) == [[50]]


def test_old_runs_wait_no_longer() -> None:
    assert Rows().run(1, NOW_MS - 59_999).groups() == []
    assert Rows().run(1, NOW_MS - 60_000).run(1).groups() == [[1, 1]]
    never = CompilePolicy(min_events=100, older_than_ms=None)
    assert Rows().run(1, 0).groups(never) == []


def test_a_journal_is_filled_and_the_rest_waits() -> None:
    rows = Rows().run(400).run(400).run(400).run(30)
    assert rows.groups() == [[400, 400], [400, 30]]
    rows = Rows().run(900).run(90).run(90)
    assert rows.groups() == [[900, 90]], "what does not fit waits by itself"
    assert Rows().run(5_000).groups() == [[5_000]], "a run is never cut"


def test_a_group_has_so_many_rows_at_most() -> None:
    rows = Rows()
    for _ in range(RUNS_AT_ONCE + 5):
        rows.run(1)
    many = CompilePolicy(min_events=1_000_000)
    assert [len(group) for group in rows.groups(many)] == [RUNS_AT_ONCE]


def test_amended_runs_take_those_before_them_along() -> None:
    assert Rows().run(1).run(1, amendments=9).run(1).groups() == []
    assert Rows().run(1).run(1, amendments=10).run(1).groups() == [[1, 1, 1]]


def test_journals_with_amendments_are_made_again() -> None:
    rows = Rows().journal(900).journal(900, amendments=10).journal(900, amendments=9)
    assert rows.groups() == [[900]]
    assert Rows().journal(900, 1, NOW_MS - 600_000).journal(901).groups() == [[900]]
    assert Rows().journal(900, 1, NOW_MS - 599_999).groups() == []
    assert Rows().journal(900, 1, NOW_MS).groups(CompilePolicy.everything()) == [[900]]


def test_small_neighbours_are_merged() -> None:
    rows = Rows().journal(900)
    for _ in range(4):
        rows.journal(10)
    assert rows.groups() == [[10, 10, 10, 10]]
    assert Rows().journal(10).journal(10).journal(10).groups() == []
    rows = Rows()
    for _ in range(9):
        rows.journal(10)
    assert rows.groups() == [[10] * 6], "so many at once; the rest is met again"


def test_a_large_journal_is_not_rewritten_for_a_little() -> None:
    rows = Rows().journal(240).journal(10).journal(10).journal(10).journal(10)
    assert rows.groups() == [[10, 10, 10, 10]]
    rows = Rows().journal(200).journal(200).journal(10).journal(10).journal(10)
    assert rows.groups() == [[200, 200, 10, 10, 10]]


def test_what_is_compiled_anyway_is_merged_with_small_journals_before_it() -> None:
    rows = Rows().journal(900).journal(10).journal(10).journal(10).run(20, NOW_MS - 60_000)
    assert rows.groups() == [[10, 10, 10, 20]]
    rows = Rows().journal(10).journal(10).journal(10).run(20)
    assert rows.groups() == [], "not for runs that can wait"
    rows = Rows().journal(10).journal(10).journal(10).run(900).run(900)
    assert rows.groups() == [[900], [900]], "nor beside a journal that is full"


def test_emptied_journals_are_merged_too() -> None:
    rows = Rows().journal(0).journal(0).journal(0).journal(0)
    assert rows.groups() == [[0, 0, 0, 0]]


def test_an_event_is_rewritten_a_few_times_however_small_the_turns_are() -> None:
    """Runs of 10 events, each compiled at once: journals of up to 1,000 come of it."""
    policy = CompilePolicy(
        min_events=1, older_than_ms=None, max_events=1_000, max_bytes=10**9, max_raw_bytes=10**9
    )
    journals: list[int] = []
    written = appended = 0
    for _ in range(600):
        journals_now, pending = journals, 10
        appended += 10
        while True:
            rows = Rows()
            for events in journals_now:
                rows.journal(events)
            if pending:
                rows.run(pending)
            found = choose_groups(rows.journals, rows.runs, policy, NOW_MS)
            if not found:
                break
            bases = {row.base for group in found for row in group.rows}
            after = [(each.run.base, each.run.events) for each in rows.journals]
            after = [each for each in after if each[0] not in bases]
            for group in found:
                size = sum(row.events for row in group.rows)
                after.append((group.base, size))
                written += size
            journals_now, pending = [events for _, events in sorted(after)], 0
        journals = journals_now
    assert sum(journals) == appended
    assert written <= 6 * appended
    full = [events for events in journals if events > 250]
    assert len(journals) - len(full) < 12, "but for the newest, all are at least a quarter full"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_events": 0},
        {"min_bytes": 0},
        {"older_than_ms": -1},
        {"min_amendments": 0},
        {"max_events": 0},
        {"max_raw_bytes": -5},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidError, match=next(iter(wrong))):
        CompilePolicy(**wrong)


def test_wait_that_began_by_a_clock_far_ahead_is_over() -> None:
    year_ms = 365 * 86_400_000
    assert Rows().journal(600, 1, NOW_MS + 1_000).groups() == []
    assert Rows().journal(600, 1, NOW_MS + year_ms).groups() == [[600]]
    assert Rows().run(5, NOW_MS + 1_000).groups() == []
    assert Rows().run(5, NOW_MS + year_ms).groups() == [[5]]
