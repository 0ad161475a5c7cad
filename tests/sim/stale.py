"""Finds planted bugs that no longer fit the product, so that none passes for caught by itself.

A plant goes stale when the function that it replaces is renamed or takes other parameters, or when
the replacement uses a name that is gone. It then fails with an error of Python's own, which a world
would notice just as well as the bug.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["Planted", "StalePlantError", "check_kind", "misfit", "replacements"]

_OF_PYTHON = (NameError, AttributeError, TypeError, ImportError)


class StalePlantError(Exception):
    """A planted bug failed by itself. No world caught it."""


def check_kind(exc: BaseException) -> None:
    """Raise ``StalePlantError`` for a failure that a plant's own code has caused."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, _OF_PYTHON):
            raise StalePlantError(f"{type(cause).__name__}: {cause}") from exc
        cause = cause.__cause__


@dataclass(frozen=True)
class Planted:
    """One replacement: of what, and by what."""

    owner: Any
    name: str
    real: Any
    wrong: Any


@dataclass
class _Recorder:
    """A ``MonkeyPatch`` that writes down what it replaces."""

    patch: pytest.MonkeyPatch
    found: list[Planted] = field(default_factory=list)

    def setattr(self, owner: Any, name: str, wrong: Any) -> None:
        self.found.append(Planted(owner, name, getattr(owner, name), wrong))
        self.patch.setattr(owner, name, wrong)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.patch, name)


def replacements(plant: Callable[[Any], None]) -> list[Planted]:
    """What a plant replaces. Raises ``AttributeError`` for a name that is gone."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = _Recorder(patch)
        plant(recorder)
        return recorder.found


def misfit(planted: Planted) -> str:
    """Why calls of the replaced function cannot call its replacement; empty if they can."""
    where = f"`{planted.name}` of {getattr(planted.owner, '__name__', planted.owner)}"
    if not callable(planted.real):
        return ""
    if not callable(planted.wrong) and not isinstance(
        planted.wrong, property | staticmethod | classmethod
    ):
        return f"{where}: is a function, and is replaced by {planted.wrong!r}"
    try:
        real, wrong = inspect.signature(planted.real), inspect.signature(planted.wrong)
    except (TypeError, ValueError):
        return ""
    kinds = inspect.Parameter
    given = real.parameters.values()
    by_place = [p for p in given if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: None for p in given if p.kind is kinds.KEYWORD_ONLY}
    try:
        wrong.bind(*by_place, **by_name)
        wrong.bind(
            *(p for p in by_place if p.default is kinds.empty),
            **{p.name: None for p in given if p.name in by_name and p.default is kinds.empty},
        )
    except TypeError as exc:
        return f"{where}: calls do not fit its replacement ({exc})"
    return ""
