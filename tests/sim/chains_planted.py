"""Bugs planted into archives of archives, and into what generations are built of."""

from __future__ import annotations

import pytest

from tidelog.archive.fill import FillSource
from tidelog.connectors.archive.reader import CompletedReader
from tidelog.pipeline import gaps

__all__ = ["backfill_goes_back", "behind_is_remade", "holes_count_as_never_there"]

Patch = pytest.MonkeyPatch


def behind_is_remade(patch: Patch) -> None:
    """An archive that ends before what its reader has read was made again."""
    patch.setattr(gaps, "source_is_behind", lambda head, bounds, source: False)


def backfill_goes_back(patch: Patch) -> None:
    """A backfill stops where the archive's own source holds the rest, even if it is past that."""
    until_own = FillSource._until_own

    def go_back(self: FillSource, partition: object, old: object, held: object) -> object:
        with pytest.MonkeyPatch.context() as without:
            without.setattr(self, "_position", lambda _: None)
            return until_own(self, partition, old, held)  # type: ignore[arg-type]

    patch.setattr(FillSource, "_until_own", go_back)


def holes_count_as_never_there(patch: Patch) -> None:
    """A backfill takes what its source lacks for what was never there; so does a promote."""
    patch.setattr(CompletedReader, "read", lambda self: self.reader.read())
