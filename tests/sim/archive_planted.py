"""Bugs planted into archives and pipelines, so that their simulation proves itself.

Each replaces one function of the product by what it did once, or could have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from tests.sim.archive_world import ArchivesWorld
from tidelog.catalog.base import Check, Delete, Put
from tidelog.errors import TidelogError
from tidelog.log.replays import Replays
from tidelog.model.pipeline import Totals
from tidelog.pipeline import (
    compact,
    cycle,
    erase,
    generations,
    replay,
    sweep,
)
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.driver import Driver
from tidelog.pipeline.finalize import Finalizer
from tidelog.sources.base import Bounds, Missing

__all__ = ["BUGS", "Bug", "notices", "seeds_until_caught"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """What is planted, and which promise it breaks."""

    breaks: str
    plant: Callable[[Patch], None]


def seeds_until_caught(bug: Bug, seeds: int) -> int | None:
    """How many seeds it takes until the world notices; None: more than these."""
    return next((seed + 1 for seed in range(seeds) if notices(bug, seed)), None)


def notices(bug: Bug, seed: int) -> bool:
    """Whether the world notices a bug with this seed, which must find nothing without it."""
    with Patch.context() as patch:
        bug.plant(patch)
        try:
            ArchivesWorld(seed).run()
        except (AssertionError, TidelogError):
            pass
        else:
            return False
    _run_without(seed)
    return True


@lru_cache
def _run_without(seed: int) -> None:
    """A seed without a bug; many bugs are found by the same one."""
    ArchivesWorld(seed).run()


# The cycle.


def _no_fence(patch: Patch) -> None:
    """Writes of a driver do not expect the head, so two work under one epoch."""
    write = Cycle._write

    def anyhow(self: Cycle, track: Any, *changes: Any) -> str:
        open_ = [
            replace(each, expect=None) if isinstance(each, Put | Delete) else each
            for each in changes
            if not isinstance(each, Check)
        ]
        return write(self, track, *open_)

    patch.setattr(Cycle, "_write", anyhow)


def _published_before_decided(patch: Patch) -> None:
    """Files are published before the intent names their manifest."""
    record = Cycle._record

    def first(self: Cycle, track: Any, produced: Any) -> Any:
        intent = track.intent
        manifest = cycle.Manifest(
            self._pipeline.id,
            track.partition.text,
            intent.start,
            produced.end,
            0,
            0,
            0,
            files=produced.staged.files,
        )
        self._pipeline.sink.publish(manifest)
        return record(self, track, produced)

    patch.setattr(Cycle, "_record", first)


def _staged_files_go_too_early(patch: Patch) -> None:
    """What was staged goes once the manifest is recorded, before it is published."""
    record = Cycle._record

    def early(self: Cycle, track: Any, produced: Any) -> Any:
        manifest = record(self, track, produced)
        self._pipeline.sink.discard(manifest)
        return manifest

    patch.setattr(Cycle, "_record", early)


def _commit_before_publish(patch: Patch) -> None:
    """The range is committed first, and published after that."""
    publish, finish = Cycle._publish, Cycle._finish

    def late(self: Cycle, track: Any, manifest: Any, report: Any) -> None:
        patch.setattr(Cycle, "_publish", lambda *_: 0)
        discard = self._pipeline.sink.discard
        try:
            self._pipeline.sink.discard = lambda _: None  # type: ignore[method-assign]
            finish(self, track, manifest, report)
        finally:
            patch.setattr(Cycle, "_publish", publish)
        publish(self, track, manifest)
        discard(manifest)

    patch.setattr(Cycle, "_finish", late)


def _gaps_are_not_recorded(patch: Patch) -> None:
    """A loss that was accepted leaves no gap in the head."""
    patch.setattr(cycle, "joined_gaps", lambda gaps, more: gaps)


def _deleted_offsets_are_not_counted(patch: Patch) -> None:
    """A manifest does not say how many offsets of its range held no event any more."""
    patch.setattr(Cycle, "_missing", lambda *_: Missing())


def _totals_forget_the_dead(patch: Patch) -> None:
    """Totals of a head leave dead letters out."""
    plus = Totals.plus

    def without(self: Totals, manifest: Any, now_ms: int) -> Totals:
        return msgspec.structs.replace(plus(self, manifest, now_ms), dead=self.dead)

    patch.setattr(Totals, "plus", without)


def _later_partitions_are_skipped(patch: Patch) -> None:
    """With ``--start latest`` a partition that appears later begins at the end that it has."""
    begin = Driver._begin

    def at_end(self: Driver, partition: Any, held: Bounds) -> Any:
        found = begin(self, partition, held)
        if self._how.start != "latest" or found.reason == "latest":
            return found
        return msgspec.structs.replace(found, position=held.end, reason="latest")

    patch.setattr(Driver, "_begin", at_end)


# Generations.


def _fill_leaves_dead_letters_out(patch: Patch) -> None:
    """A backfill takes data files of the live generation, and not its dead letters."""
    from tidelog.sources import archive_read

    patch.setattr(archive_read, "_KINDS", ("data",))


def _sweep_removes_kept_generations(patch: Patch) -> None:
    """A sweep removes the files of generations that are not live."""
    finish = sweep.finish_removals

    def all_others(home: Any, archive: Any) -> Any:
        store = generations.files_at(home, archive)
        for generation in archive.in_state("kept"):
            generations.delete_below(store, f"{archive.folder(generation)}/")
        return finish(home, archive)

    patch.setattr(sweep, "finish_removals", all_others)


# Dead letters.


def _replayed_letters_count_twice(patch: Patch) -> None:
    """Dead letters count, although a replay has placed them."""
    patch.setattr(Replays, "replaces", lambda *_, **__: False)


def _replay_removes_first(patch: Patch) -> None:
    """A replay removes files of dead letters before its commit."""
    publish = replay.ReplaySink.publish

    def early(self: Any, manifest: Any) -> None:
        publish(self, manifest)
        store = self._files._store()
        folder = f"{self._settings.dead}/"
        store.delete([each.key for each in store.list(folder) if "_replayed" not in each.key])

    patch.setattr(replay.ReplaySink, "publish", early)


# Sweeps and compaction.


def _sweep_removes_what_is_under_way(patch: Patch) -> None:
    """A sweep takes what the present epoch has staged for what nobody will finish."""
    read = sweep._read_named

    def blind(home: Any, pipeline: str) -> Any:
        named = read(home, pipeline)
        named.keys.clear()
        named.epoch = 1_000_000
        return named

    patch.setattr(sweep, "_read_named", blind)


def _compaction_forgets_a_range(patch: Patch) -> None:
    """A merged manifest lacks the files of its last range."""
    merged = compact._merged_manifest

    def less(parts: Any) -> Any:
        last = msgspec.structs.replace(parts[-1], files=())
        return merged([*parts[:-1], last])

    patch.setattr(compact, "_merged_manifest", less)


# Erasure.


def _erasure_counts_nothing(patch: Patch) -> None:
    """An erasure does not count what it took out of files."""
    patch.setattr(erase, "read_erased_row", lambda _: erase.ErasedEvents(-1, 0))


# Markers.


def _marker_without_bound(patch: Patch) -> None:
    """The watermark is the present, however far the archive is behind."""
    patch.setattr(Finalizer, "_watermark_ms", lambda self, now_ms, delay_ms: now_ms)


# Copies and trims.


def _trim_passes_over_archives(patch: Patch) -> None:
    """A trim does not ask whether archives have read the events."""
    from tidelog import home

    patch.setattr(home, "check_readers", lambda *_: None)


BUGS: Mapping[str, Bug] = {
    "drivers are not fenced": Bug("P4", _no_fence),
    "files are published before they are decided": Bug("P4", _published_before_decided),
    "staged files are removed too early": Bug("P4", _staged_files_go_too_early),
    "commit comes before publish": Bug("P4", _commit_before_publish),
    "gaps are not recorded": Bug("P4a", _gaps_are_not_recorded),
    "deleted offsets are not counted": Bug("P4a", _deleted_offsets_are_not_counted),
    "dead letters are not in the totals": Bug("P4a", _totals_forget_the_dead),
    "later partitions begin at their end": Bug("P4a", _later_partitions_are_skipped),
    "a backfill leaves dead letters out": Bug("P4a", _fill_leaves_dead_letters_out),
    "a sweep removes kept generations": Bug("P4a", _sweep_removes_kept_generations),
    "replayed dead letters count twice": Bug("P4", _replayed_letters_count_twice),
    "a replay removes before it commits": Bug("P4", _replay_removes_first),
    "a sweep removes a range under way": Bug("P4", _sweep_removes_what_is_under_way),
    "a merged manifest lacks files": Bug("P4", _compaction_forgets_a_range),
    "erased events are not counted": Bug("P4a", _erasure_counts_nothing),
    "a marker bounded by nothing": Bug("P4a", _marker_without_bound),
    "a trim passes over archives": Bug("P4a", _trim_passes_over_archives),
}
