"""Generations of an archive: made anew beside the live one, then promoted.

A backfill is a pipeline of its own, with its own rows, manifests and folder, so the live one runs
on undisturbed. It reads the archive's source, or a backup of it, whose positions are the same; so
the promoted generation goes on from the source where the backfill came to.

Beginning one is one conditional write of the registry row. Promoting, in four steps:

1. the new generation must have come as far as the old one, in every source partition
2. registry row: readers and drivers are told of the new one → dead: drivers switch; old files stay
   then every table of the archive lists the new files        → dead: promote again, or a sweep
3. the old heads are closed, so no driver commits there       → dead: promote again goes on here
4. old files, dead letters, manifests, staged files and
   commit rows go, then the old generation in the registry    → dead: promote again goes on here

A driver of the old generation may still copy files of a range that was decided before its head was
closed; nobody reads that folder any more, and the next promote or sweep removes them. Closed heads
stay for good: they are what keeps such a driver from starting anew.
"""

from __future__ import annotations

import msgspec

from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.log.archives import change_archive, read_partitions, read_progress
from tidelog.log.replays import replay_pipeline
from tidelog.model.archive import Archive, Making
from tidelog.pipeline.account import note_before
from tidelog.pipeline.archive import find_archive, open_sink
from tidelog.pipeline.places import files_at, source_at
from tidelog.pipeline.removal import close_heads, delete_below, remove_work
from tidelog.pipeline.tables import check_tables, replace_files

__all__ = ["begin_backfill", "drop_generation", "promote", "remove_retired", "remove_strays"]


def begin_backfill(home: Home, name: str, making: Making) -> tuple[Archive, int]:
    """A generation to be built with these settings: a new one, or the one that is being built."""
    present = find_archive(home, name)
    files_at(home, present)  # is the folder ours
    makings = {**present.makings, present.newest + 1: making}
    open_sink(msgspec.structs.replace(present, makings=makings), present.newest + 1)
    source_at(home, making.source or present.source).partitions()

    def edit(archive: Archive) -> Archive:
        building = _building(archive)
        if building is None:
            number = archive.newest + 1
            more = {**archive.makings, number: making}
            return msgspec.structs.replace(archive, makings=more, newest=number)
        if archive.makings[building] != making:
            raise InvalidError(
                f"archive `{name}`: generation {building} is being built with other settings: "
                f"backfill with the same ones, or drop it with `archive drop {name} {building}`"
            )
        return archive

    archive = change_archive(home.log, name, edit)
    return archive, max(archive.makings)


def promote(home: Home, name: str, *, force: bool = False, keep: bool = False) -> Archive:
    """Let readers and drivers go over to the newest generation, and remove the old ones.

    ``InvalidError`` when there is none, or when it has not come as far as the present one.
    """
    archive = find_archive(home, name)
    files_at(home, archive)  # before the registry changes
    building = _building(archive)
    if building is None:
        if not _retired(archive):
            raise InvalidError(
                f"archive `{name}`: has no generation to promote: make one with "
                f"`tidelog archive backfill {name}`"
            )
    else:
        check_tables(archive, building)
        if not force:
            _check_as_far(home, archive, building)
        old = (archive.generation, archive.pipeline())
        reason = "--force" if force else ""
        note_before(home.log, old, archive.pipeline(building), home.log.clock.now_ms(), reason)
        archive = change_archive(
            home.log, name, lambda found: msgspec.structs.replace(found, generation=building)
        )
    replace_files(home, archive)  # tables list the new files before the old ones are deleted
    return archive if keep else remove_retired(home, archive)


def drop_generation(home: Home, name: str, generation: int) -> Archive:
    """Give up a generation that is being built, and remove what it has."""
    archive = find_archive(home, name)
    if generation != _building(archive):
        raise InvalidError(
            f"archive `{name}`: generation {generation} is not being built: only such a one can go"
        )
    return _remove(home, archive, generation)


def remove_retired(home: Home, archive: Archive) -> Archive:
    """Steps 3 and 4 for every generation before the promoted one."""
    retired = _retired(archive)
    if retired:
        replace_files(home, archive)  # a promote may have died before it did
    for generation in retired:
        archive = _remove(home, archive, generation)
    return archive


def remove_strays(home: Home, archive: Archive) -> None:
    """What a driver of a removed generation has copied into its folder since."""
    files = files_at(home, archive)
    for generation in range(1, archive.newest):
        if generation not in archive.makings:
            delete_below(files, f"{archive.folder(generation)}/")


def _retired(archive: Archive) -> list[int]:
    """Generations that nobody reads any more."""
    return sorted(number for number in archive.makings if number < archive.generation)


def _building(archive: Archive) -> int | None:
    """The generation that is not promoted yet; there is one at most."""
    newest = max(archive.makings)
    return newest if newest > archive.generation else None


def _check_as_far(home: Home, archive: Archive, building: int) -> None:
    """Step 1."""
    source, old, new = (
        source_at(home, archive.source),
        archive.pipeline(),
        archive.pipeline(building),
    )
    for partition in read_partitions(home.log, old):
        before = read_progress(home.log, old, partition)
        now = read_progress(home.log, new, partition)
        if before is None or before.ordinal == 0:
            continue
        if now is None or source.before(now.position, before.position):
            raise InvalidError(
                f"archive `{archive.name}`: generation {building} has come to "
                f"{now.position if now else 'nothing'} in `{partition}`, the present one to "
                f"{before.position}: run `tidelog archive backfill {archive.name}` again first",
                partition=partition,
            )


def _remove(home: Home, archive: Archive, generation: int) -> Archive:
    """Steps 3 and 4 for one generation."""
    pipeline = archive.pipeline(generation)
    pipelines = (pipeline, replay_pipeline(pipeline))
    files = files_at(home, archive)
    for each in pipelines:
        close_heads(home.log, each)
    delete_below(files, f"{archive.folder(generation)}/")
    delete_below(files, f"{archive.dead}/", lambda key: _is_of(key, generation))
    for each in pipelines:
        remove_work(home.log, each, files)

    def edit(found: Archive) -> Archive:
        makings = {number: each for number, each in found.makings.items() if number != generation}
        return msgspec.structs.replace(found, makings=makings)

    return change_archive(home.log, archive.name, edit)


def _is_of(key: str, generation: int) -> bool:
    """Whether a file's name says that it is of a generation."""
    return key.rpartition("/")[2].startswith(f"{generation}_")
