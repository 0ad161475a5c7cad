"""What a promoted generation lacks of the one before it, as verify recounts it."""

from __future__ import annotations

import pytest

from tidelog.archive.account import check_before
from tidelog.model.archive import Account
from tidelog.model.pipeline import Begin, Gap, PreviousAccount


def lacks(before: tuple[int, int, tuple[Gap, ...]], now: tuple[int, int]) -> list[str]:
    begin, end, gaps = before
    was = PreviousAccount(1, str(begin), str(end), end - begin, end - begin, 0, 0, 0, 0, gaps, 0)
    first, last = now
    account = Account("t/0", Begin(str(first), "retention"), str(last), last - first, False)
    return [problem.what for problem in check_before(was, account)]


def gap(start: int, end: int) -> Gap:
    return Gap(str(start), str(end), "retention", end - start)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param((0, 0, ()), (4, 9), id="nothing was archived before"),
        pytest.param((0, 9, (gap(0, 4),)), (4, 9), id="the begin that is missing was a gap"),
        pytest.param((0, 9, (gap(0, 2), gap(2, 4))), (4, 9), id="it was two gaps"),
    ],
)
def test_generation_that_lacks_nothing_passes(
    before: tuple[int, int, tuple[Gap, ...]], now: tuple[int, int]
) -> None:
    assert lacks(before, now) == []


def test_what_is_missing_is_named_without_the_gaps_that_were_there() -> None:
    found = lacks((0, 9, (gap(0, 2),)), (4, 7))
    assert found == [
        "generation 1 accounted for 2 to 4, this one begins at 4",
        "generation 1 accounted for 7 to 9, this one ends at 7",
    ]
