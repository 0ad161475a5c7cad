"""Bugs planted into what drivers and ``archive verify`` do after a restore of the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.archive import verify
from tidelog.erasure.rewrite_range import RangeRewriter
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.forgotten_ranges import SettingAside

__all__ = ["BUGS"]

Patch = pytest.MonkeyPatch


def files_written_again_are_set_aside(patch: Patch) -> None:
    """A file counts as that of a forgotten replay, though a later replay has written it again."""
    patch.setattr(SettingAside, "_committed_files", lambda self: set())


def forgotten_ranges_stay(patch: Patch) -> None:
    """No driver looks for ranges that a restored catalog has forgotten."""
    patch.setattr(Cycle, "_unchecked_manifests", lambda self, partition, epoch: ())


def forgotten_replays_stay(patch: Patch) -> None:
    """A driver sets its own forgotten ranges aside, and leaves replays of them to the next one."""
    patch.setattr(SettingAside, "_has_unnamed_replays", lambda self: False)


def staged_files_are_not_missed(patch: Patch) -> None:
    """``verify`` does not look for what a decided range has staged."""

    def nothing(store: Any, files: Any, is_under_way: Any) -> list[Any]:
        return []

    patch.setattr(verify, "check_decided", nothing)


def forgotten_rewrites_stay_forgotten(patch: Patch) -> None:
    """A repeated delete does not look for the manifest of a file that an erasure has rewritten."""
    patch.setattr(RangeRewriter, "find_rewrite", lambda self, old, known, wanted: None)


BUGS = {
    "a driver leaves forgotten ranges in the folder": ("P4", forgotten_ranges_stay),
    "a driver leaves forgotten replays in the folder": ("P4", forgotten_replays_stay),
    "a delete refuses files that were rewritten before": ("P5a", forgotten_rewrites_stay_forgotten),
    "a file that was replayed again is set aside": ("P4a", files_written_again_are_set_aside),
    "verify does not miss staged files": ("P4a", staged_files_are_not_missed),
}
