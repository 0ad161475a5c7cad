"""Every planted bug fits the product of today: it cannot pass for caught by failing itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim import archive_planted, journal_planted, planted
from tests.sim.stale import Planted, StalePlantError, check_kind, misfit, replacements
from tidelog.errors import InternalError, unexpected


def _patched(bug: planted.Bug) -> Callable[[Any], None]:
    def plant(patch: Any) -> None:
        for owner, name, wrong in bug.patches:
            patch.setattr(owner, name, wrong)

    return plant


PLANTS: dict[str, Callable[[Any], None]] = {
    **{name: _patched(bug) for name, bug in planted.BUGS.items()},
    **{name: bug.plant for name, bug in journal_planted.BUGS.items()},
    **{name: bug.plant for name, bug in archive_planted.BUGS.items()},
}
BY_CLASS = {name for name, bug in planted.BUGS.items() if not bug.patches}  # with parts of a world


def test_every_replacement_takes_what_the_replaced_function_takes() -> None:
    count = len(planted.BUGS) + len(journal_planted.BUGS) + len(archive_planted.BUGS)
    assert len(PLANTS) == count, "two bugs have one name"
    found = {name: replacements(plant) for name, plant in PLANTS.items()}
    assert {name for name, each in found.items() if not each} == BY_CLASS
    wrong = {name: [misfit(one) for one in each] for name, each in found.items()}
    assert {name: each for name, each in wrong.items() if any(each)} == {}


def test_plant_of_a_name_that_is_gone_is_refused() -> None:
    owner = SimpleNamespace(here=len)
    with pytest.raises(AttributeError):
        replacements(lambda patch: patch.setattr(owner, "gone", len))


@pytest.mark.parametrize(
    "wrong", [lambda one: None, lambda one, two, three: None, lambda one, two, *, four: None, 7]
)
def test_replacement_with_other_parameters_does_not_fit(wrong: Any) -> None:
    def real(one: int, two: int = 0, *, three: int = 0) -> None: ...

    assert misfit(Planted(SimpleNamespace(), "real", real, wrong))
    assert not misfit(Planted(SimpleNamespace(), "real", real, lambda *given, **how: None))


@pytest.mark.parametrize("error", [NameError, AttributeError, TypeError, ImportError])
def test_failure_of_a_plant_itself_does_not_count_as_caught(error: type[Exception]) -> None:
    with pytest.raises(StalePlantError):
        check_kind(unexpected("archive `day`", error("gone")))
    check_kind(InternalError("a check of the product"))
    check_kind(AssertionError("a promise is broken"))
