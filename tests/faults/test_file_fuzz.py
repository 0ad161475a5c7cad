"""Random lives of rotated log files: each line is archived once, whatever happens beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.file_fuzz import play
from tidelog.archive import archive as archives
from tidelog.archive import freeze as freezing
from tidelog.archive.fill_files import FillFilesSource
from tidelog.connectors.files.row_tracking import RowTracking
from tidelog.connectors.source import Bounds, SourcePartition
from tidelog.context import Context
from tidelog.errors import TidelogError
from tidelog.pipeline import source_partitions as listing
from tidelog.store.base import ObjectInfo, Store

STEPS = 25
FEW = 3
MANY = 200
PLANTED_SEEDS = 30  # at most, until a bug is found

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", range(FEW))
def test_each_line_is_archived_once(tmp_path: Path, seed: int) -> None:
    assert play(tmp_path, seed, STEPS) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_each_line_is_archived_once_in_many_lives(tmp_path: Path, seed: int) -> None:
    assert play(tmp_path, seed, STEPS) == []


def _wrapped_source_is_not_told(patch: Patch) -> None:
    """A generation that is being built knows files by paths, and a promote copies no marks."""
    patch.setattr(FillFilesSource, "track", lambda self, known: None)
    patch.setattr(freezing, "_with_note", lambda head, before: head)
    _file_is_its_first_line(patch)


def _latest_goes_by_the_first_line(patch: Patch) -> None:
    """The end that creation saw is listed without a mark, and a new file may begin there."""
    listed = listing.list_seen

    def unmarked(context: Context, pipeline: str, bounds: Mapping[SourcePartition, Bounds]) -> None:
        listed(context, pipeline, {each: replace(held, note=b"") for each, held in bounds.items()})

    patch.setattr(listing, "list_seen", unmarked)
    patch.setattr(archives, "list_seen", unmarked)
    _file_is_its_first_line(patch)


def _file_is_its_first_line(patch: Patch) -> None:
    same = RowTracking._is_same

    def by_line(
        self: RowTracking,
        store: Store,
        partition: SourcePartition,
        info: ObjectInfo,
        whole: bool = False,
    ) -> bool:
        if self._marks[partition] is not None:
            return same(self, store, partition, info, whole)
        line, known = self._first_line(store, info), self._known[partition].incarnation
        return not line or not known or line == known

    def incarnation(
        self: RowTracking, store: Store, partition: SourcePartition, info: ObjectInfo
    ) -> str:
        return self._first_line(store, info)

    patch.setattr(RowTracking, "_is_same", by_line)
    patch.setattr(RowTracking, "incarnation", incarnation)


@pytest.mark.long
@pytest.mark.parametrize("plant", [_wrapped_source_is_not_told, _latest_goes_by_the_first_line])
def test_old_bugs_are_found(
    tmp_path: Path, monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    plant(monkeypatch)
    for seed in range(PLANTED_SEEDS):
        wrong: list[str] = []
        with contextlib.suppress(TidelogError):  # some are seen at once
            wrong = play(tmp_path / str(seed), seed, STEPS)
        if any(each.startswith(("lost", "doubled")) for each in wrong):
            return
    pytest.fail(f"{PLANTED_SEEDS} seeds find nothing")
