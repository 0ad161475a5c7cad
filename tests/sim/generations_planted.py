"""Bugs planted into generations, replays of dead letters, sweeps and compaction of archives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidelog.archive import archive as archives
from tidelog.archive import dead_letters as replay
from tidelog.archive import generations
from tidelog.archive.coverage import MissingRange
from tidelog.archive.fill import FillSource
from tidelog.coordination.pipeline_rows import Replays, read_partitions, read_progress
from tidelog.maintenance import pipeline_sweep as compact
from tidelog.maintenance import pipeline_sweep as sweep

Patch = pytest.MonkeyPatch


def promote_compares_ends(patch: Patch) -> None:
    """A promote looks at positions alone, and a backfill reads nothing but the source."""

    def behind(context: Any, archive: Any, old: int, new: int) -> list[MissingRange]:
        found = []
        for partition in read_partitions(context, archive.pipeline(old)):
            before = read_progress(context, archive.pipeline(old), partition)
            now = read_progress(context, archive.pipeline(new), partition)
            if before is not None and before.ordinal:
                position = now.position if now else "0"
                if int(position or 0) < int(before.position or 0):
                    found.append(MissingRange(partition, position, before.position))
        return found

    patch.setattr(generations, "missing_ranges", behind)
    patch.setattr(archives, "fill_source", lambda home, archive, number, given: given)


def backup_is_read_to_its_end(patch: Patch) -> None:
    """A backfill reads a backup further than the live generation, though the source holds that."""
    patch.setattr(FillSource, "_until_own", lambda *given: given[-1])


def promote_does_not_freeze(patch: Patch) -> None:
    """Drivers of the live generation commit further while another one is promoted."""
    patch.setattr(generations, "freeze_heads", lambda *_: None)


def fill_leaves_dead_letters_out(patch: Patch) -> None:
    """A backfill takes data files of the live generation, and not its dead letters."""
    from tidelog.connectors.archive import reader as archive_read

    patch.setattr(archive_read, "_KINDS", ("data",))


def sweep_removes_kept_generations(patch: Patch) -> None:
    """A sweep removes the files of generations that are not live."""
    finish = sweep.finish_removals

    def all_others(home: Any, archive: Any) -> Any:
        store = generations.files_at(home, archive)
        for generation in archive.in_state("kept"):
            generations.delete_below(store, f"{archive.folder(generation)}/")
        return finish(home, archive)

    patch.setattr(sweep, "finish_removals", all_others)


def drop_leaves_files(patch: Patch) -> None:
    """What a driver copies into the folder of a removed generation stays there."""
    patch.setattr(sweep, "remove_strays", lambda *_: None)


# Dead letters.


def replayed_letters_count_twice(patch: Patch) -> None:
    """Dead letters count, although a replay has placed them."""
    patch.setattr(Replays, "replaces", lambda *_, **__: False)


def replay_removes_first(patch: Patch) -> None:
    """A replay removes files of dead letters before its commit."""
    publish = replay.ReplaySink.publish

    def early(self: Any, manifest: Any) -> int:
        left_out = publish(self, manifest)
        store = self._files._store()
        folder = f"{self._settings.dead}/"
        store.delete([each.key for each in store.list(folder) if "_replayed" not in each.key])
        return left_out

    patch.setattr(replay.ReplaySink, "publish", early)


# Sweeps and compaction.


def sweep_removes_what_is_under_way(patch: Patch) -> None:
    """A sweep deletes what the present epoch has staged, as if no driver would finish it."""
    read = sweep._read_named

    def blind(home: Any, pipeline: str) -> Any:
        named = read(home, pipeline)
        named.keys.clear()
        named.under_way.clear()
        return named

    patch.setattr(sweep, "_read_named", blind)


def sweep_spares_the_present_epoch(patch: Patch) -> None:
    """A sweep leaves what is staged under the epoch of a head, even if that is frozen or free."""
    read = sweep._read_named

    def present(home: Any, pipeline: str) -> Any:
        named = read(home, pipeline)
        named.under_way |= set(named.epochs.items())
        return named

    patch.setattr(sweep, "_read_named", present)


def compaction_forgets_a_range(patch: Patch) -> None:
    """A merged manifest lacks the files of its last range."""
    merged = compact._merged_manifest

    def less(parts: Any) -> Any:
        last = msgspec.structs.replace(parts[-1], files=())
        return merged([*parts[:-1], last])

    patch.setattr(compact, "_merged_manifest", less)
