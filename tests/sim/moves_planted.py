"""Bugs planted into redos, seeks, updates of archives, and streams."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidelog.connectors.archive import source as archive_source
from tidelog.connectors.archive.reader import PlannedCommits
from tidelog.connectors.files import source as files_source
from tidelog.connectors.source import MissingOffsets
from tidelog.erasure import updates
from tidelog.pipeline import cycle, gaps, ranges, seek
from tidelog.pipeline.stream import HandlerWorkers

__all__ = [
    "copies_are_not_looked_at_again",
    "folder_claims_what_never_was",
    "late_range_moves_the_position",
    "promote_hides_gaps",
    "pump_passes_late_events",
    "redo_leaves_dead_letters_out",
    "seek_records_no_gap",
    "stream_passes_a_failed_event",
    "update_looks_once",
    "update_passes_over_ranges_under_way",
]

Patch = pytest.MonkeyPatch


def redo_leaves_dead_letters_out(patch: Patch) -> None:
    """A redo of a date copies data files alone."""
    without = PlannedCommits.without

    def data_alone(self: PlannedCommits, is_copied: Any) -> Any:
        plan, copied = without(self, is_copied)
        return plan, [each for each in copied if each[0].kind == "data"]

    patch.setattr(PlannedCommits, "without", data_alone)


def copies_are_not_looked_at_again(patch: Patch) -> None:
    """A redo trusts its copies, even if an erasure or an update rewrites files meanwhile."""
    patch.setattr(ranges, "check_plan", lambda source, reader: None)


def seek_records_no_gap(patch: Patch) -> None:
    """A seek moves the position, and no gap says so."""
    patch.setattr(seek, "joined_gaps", lambda gaps, more: gaps)


def update_passes_over_ranges_under_way(patch: Patch) -> None:
    """An update does not wait for ranges that may have read the old value."""
    patch.setattr(updates, "is_under_way", lambda *_: False)


def update_looks_once(patch: Patch) -> None:
    """An update does not look again for replays that read a file before it was rewritten."""
    update = updates._update_generation

    def once(*arguments: Any) -> Any:
        return update(*arguments)[0], False

    patch.setattr(updates, "_update_generation", once)


def stream_passes_a_failed_event(patch: Patch) -> None:
    """A stream commits a range whose handler has failed."""
    deliver = HandlerWorkers._deliver_unit

    def past(self: HandlerWorkers, task: Any, unit: Any) -> tuple[int, int]:
        return deliver(self, task, unit) or (0, 0)

    patch.setattr(HandlerWorkers, "_deliver_unit", past)


def pump_passes_late_events(patch: Patch) -> None:
    """A pump looks only at what is after its position."""
    patch.setattr(cycle, "span_to_read", lambda head, held: (head.position, held))


def promote_hides_gaps(patch: Patch) -> None:
    """A range counts what the live generation lacks, though it was read from the one before."""
    patch.setattr(archive_source._RangePlan, "within", lambda *_: None)


def folder_claims_what_never_was(patch: Patch) -> None:
    """Offsets that no file of a folder has count as never there."""

    def absent(range: object, found: object, offsets: int) -> MissingOffsets:
        return MissingOffsets(absent=offsets)

    patch.setattr(files_source, "missing_in_files", absent)


def late_range_moves_the_position(patch: Patch) -> None:
    """A range in a gap is committed as one that begins at the position."""
    moved = gaps.late_head

    def behind(head: Any, manifest: Any, totals: Any) -> Any:
        return msgspec.structs.replace(moved(head, manifest, totals), position=manifest.end)

    patch.setattr(gaps, "late_head", behind)
