"""A source that wraps another one passes on all that the other one is, or refuses it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tidelog.archive import fill, fill_files, restore
from tidelog.connectors import source as base
from tidelog.connectors.source import (
    OPTIONAL,
    BranchingSource,
    ChangingReader,
    CompletingSource,
    DividingReader,
    DividingSource,
    ExplainingSource,
    GroupSource,
    KnowsEnds,
    ProbingSource,
    ResumingSource,
    RowSource,
    SkippingSource,
    SparseSource,
    TimedSource,
    TrackingSource,
    VanishingSource,
)
from tidelog.errors import InternalError

ANSWERED: set[type] = {
    BranchingSource,
    ProbingSource,
    CompletingSource,
    TimedSource,
    SparseSource,
    KnowsEnds,
    ResumingSource,
    VanishingSource,
}

# What each wrapper passes on, and what it answers itself: `FillSource` takes all events of sources
# that it numbers itself from the live generation, and refuses what is not named here.
WRAPPERS: dict[type, tuple[set[type], set[type]]] = {
    fill.FillSource: ({ExplainingSource, DividingSource}, ANSWERED),
    fill_files.FillFilesSource: (
        {ExplainingSource, DividingSource, TrackingSource, SkippingSource},
        ANSWERED,
    ),
    restore._ArchiveSnapshot: ({ExplainingSource, DividingSource}, set()),
}


def _methods(protocol: type) -> list[str]:
    return sorted(name for name in vars(protocol) if not name.startswith("_"))


def test_every_optional_protocol_of_sources_is_checked() -> None:
    protocols = {
        each
        for _, each in inspect.getmembers(base, inspect.isclass)
        if getattr(each, "_is_runtime_protocol", False) and each.__module__ == base.__name__
    }
    readers = {ChangingReader, DividingReader}  # what a reader may also be
    direct = {GroupSource, RowSource}  # of sources that are opened for these calls, not wrapped
    assert protocols - readers - direct == set(OPTIONAL)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("protocol", OPTIONAL, ids=lambda each: each.__name__)
def test_wrapper_passes_on_what_its_source_also_is_or_refuses_it(
    wrapper: type[Any], protocol: type
) -> None:
    passed, answered = WRAPPERS[wrapper]
    assert all(hasattr(wrapper, name) for name in _methods(protocol)) == (protocol in passed)
    inner, outer = _inner(protocol), object.__new__(wrapper)
    if protocol in passed | answered:
        base.check_wrapping(outer, inner, tuple(answered))
    else:
        with pytest.raises(InternalError, match=f"is {protocol.__name__}"):
            base.check_wrapping(outer, inner, tuple(answered))


def test_restore_refuses_a_source_that_it_would_not_pass_on() -> None:
    with pytest.raises(InternalError, match="_ArchiveSnapshot does not pass that on"):
        restore._ArchiveSnapshot(_inner(TrackingSource))


def _inner(protocol: type) -> Any:
    members = {name: lambda *_: None for name in _methods(protocol)}
    return type("Inner", (), {**members, "url": "inner:"})()
