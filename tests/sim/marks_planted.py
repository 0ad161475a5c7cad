"""Bugs planted into what puts ``_SUCCESS`` into folders, and reopens them."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.archive import finalize
from tidelog.archive.finalize import Finalizer
from tidelog.model import limits
from tidelog.pipeline import date_folders as counting

__all__ = [
    "by_one_clock",
    "chain_is_bounded_by_its_source",
    "folder_is_not_reopened",
    "future_moves_the_watermark",
    "replays_reopen_only_folders_of_their_own",
    "without_bound",
]

Patch = pytest.MonkeyPatch


def without_bound(patch: Patch) -> None:
    """The watermark is the present, however far the archive is behind."""
    patch.setattr(Finalizer, "_watermark_ms", lambda self, now_ms, delay_ms: now_ms)


def by_one_clock(patch: Patch) -> None:
    """The present is what the clock of the machine says, however wrong it is."""
    patch.setattr(finalize, "trusted_now_ms", lambda context: context.clock.now_ms())


def future_moves_the_watermark(patch: Patch) -> None:
    """An event from the future counts as one of the present, whatever waits behind it."""
    patch.setattr(limits, "CLOCK_AHEAD_MS", 1 << 60)


def replays_reopen_only_folders_of_their_own(patch: Patch) -> None:
    """Files of a replay count only in folders that are named as the archive names them."""
    patch.setattr(counting.DateFolders, "_spans_of_replay", lambda self, folder, local: [])


def chain_is_bounded_by_its_source(patch: Patch) -> None:
    """An archive of an archive is complete when it is caught up with that one."""
    patch.setattr(finalize, "_sources", lambda home, archive: [_own(home, archive)])


def _own(home: Any, archive: Any) -> Any:
    return finalize.source_at(home, archive.source)


def folder_is_not_reopened(patch: Patch) -> None:
    """Files that come after a marker leave it as it is."""
    merged = counting._with_files

    def as_before(folder: Any, touches: Any, now_ms: int) -> Any:
        return merged(folder, touches, now_ms) if folder.state == "open" else folder

    patch.setattr(counting, "_with_files", as_before)
