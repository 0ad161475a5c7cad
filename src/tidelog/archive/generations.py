"""Generations of an archive: built next to the live one, promoted, rolled back, dropped.

A generation is its own pipeline, with its own rows, manifests and folder, so the live one keeps
running while another is built. Its state is in the archive's row, which only conditional writes
change: ``building`` (a backfill fills it), ``live`` (readers and drivers use it), ``kept`` (it was
live), ``removing`` (its files are being deleted). At most one is being built.

A backfill reads the archive's source, or a backup, and reads what that no longer holds from the
files of the live generation (``fill``). Beginning one is one conditional write of the row.

Promote; rollback is the same with a kept generation, which step 0 turns into a building one:

0. rollback: the row says ``building``                        → crash: rollback or promote resumes
1. check that the new generation's files are there, unless
   forced; catch up: a driver brings it to where the live one
   is, and their coverage is compared                         → crash: nothing has changed
2. the row gets a ``promotion``, with an id                   → crash: a driver or the next promote
                                                                withdraws it
3. freeze: every head of the live generation names that id, so
   no driver commits there; unfinished ranges are settled     → crash: the same; drivers thaw
4. catch up with later commits, and compare again: the new
   one must cover, of every source partition, all that the
   live one covers. If not: withdraw the promotion, release
   the heads and list the ranges. Else copy what the live one
   knows of its source (``freeze``), and record next to the
   new heads what it accounts for                             → crash: the same
5. switch, in one write that expects the promotion's id: the
   new one is live, the other kept, no promotion              → crash: tables list the old files
6. every table of the archive lists the new files             → crash: the next register, or drop

The heads of a kept generation stay frozen: only a rollback opens the gate again (``freeze``). A
generation is kept until ``drop`` deletes it:

1. refuse, with the ranges, if it covers what neither the live
   one nor the source has, and if files of the live one are
   gone                                                       → crash: nothing has changed
2. the row says ``removing``                                  → crash: the next drop or sweep
3. close its heads, so no driver commits there                → crash: the same
4. delete files, dead letters, manifests, staged files, rows  → crash: the same
5. delete the versions of tables that name these files: their
   manifests, then the snapshots                              → crash: the same
6. remove the generation from the row

A driver may still copy files of a range that was decided before its head was closed. No reader uses
that folder, and a sweep deletes them. Closed heads stay forever: they stop such a driver from
starting again. Numbers are never reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import msgspec

from tidelog.archive.account import note_before
from tidelog.archive.archive import check_active, find_archive, open_pipeline, open_sink
from tidelog.archive.coverage import (
    LackingEvents,
    MissingRange,
    are_offsets,
    held_spans,
    is_behind,
    missing_ranges,
    read_covered,
    without,
)
from tidelog.archive.delete import finish_removal
from tidelog.archive.derived_archives import may_hold_output, refuse_circle
from tidelog.archive.erased_events import ErasedBefore
from tidelog.archive.freeze import carry_known, freeze_heads, is_stale, release_heads, withdraw
from tidelog.archive.tables import check_tables, forget_files, replace_files
from tidelog.catalog.base import freeing
from tidelog.connectors.by_url import files_at, pipelines_of, source_at
from tidelog.connectors.source import SourcePartition, bounds_apart
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    change_archive,
    counting_files,
    read_partitions,
    replay_pipeline,
)
from tidelog.coordination.registry import check_shown
from tidelog.coordination.trusted_time import store_now_ms
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.model import limits
from tidelog.model.archive import Archive, ArchiveFormat, ForcedPromote, GenerationState, Promotion
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.registry import close_heads, delete_below, remove_work
from tidelog.pipeline.source_partitions import track
from tidelog.pipeline.tasks import LocalWorkers, Workers
from tidelog.store.base import object_exists

__all__ = [
    "begin_backfill",
    "drop_generation",
    "finish_removals",
    "promote",
    "remove_strays",
    "rollback",
]

_SHOWN = 10  # ranges in a message


def begin_backfill(context: Context, name: str, written_as: ArchiveFormat) -> tuple[Archive, int]:
    """Returns a generation to build with these settings: a new one, or the existing one."""
    present = find_archive(context, name)
    check_active(present)
    files_at(context, present)  # raises unless the folder is ours
    formats = {**present.formats, present.newest + 1: written_as}
    open_sink(msgspec.structs.replace(present, formats=formats), present.newest + 1)
    try:
        if written_as.redo is None:  # else it reads the archive's own files
            source_at(context, written_as.source or present.source).partitions()
    except NotFoundError:
        if written_as.source:
            raise  # else the files can still be built from scratch

    def edit(archive: Archive) -> Archive:
        check_active(archive)
        refuse_circle(context, name, written_as.source)
        building = archive.building
        if building is None:
            number = archive.newest + 1
            more = {**archive.formats, number: written_as}
            begun = _with_states(archive, {number: "building"})
            return msgspec.structs.replace(begun, formats=more, newest=number)
        if archive.formats[building] != written_as:
            raise InvalidError(
                f"archive `{name}`: generation {building} is being built with other settings: "
                f"give the same ones, or drop it with `tidelog archive drop {name} {building}`"
            )
        return archive

    archive = change_archive(context, name, edit)
    return archive, archive.building or archive.newest


def promote(
    context: Context,
    name: str,
    *,
    generation: int | None = None,
    force: bool = False,
    workers: Workers | None = None,
) -> Archive:
    """Makes the generation that was built the live one, and keeps the other.

    Raises ``InvalidError`` if there is none, or if it lacks something that the live one has and
    that neither its source nor the live one's files can provide. With ``force`` it records that
    loss and promotes. Raises ``NotFoundError`` if another ``generation`` is expected.
    """
    archive = find_archive(context, name)
    check_active(archive)
    if generation not in (None, archive.building):
        raise NotFoundError(
            f"archive `{name}`: generation {generation} is not being built any more"
        )
    if archive.building is None:
        kept = f"; `tidelog archive rollback {name}` goes back to a kept one"
        raise InvalidError(
            f"archive `{name}`: has no generation to promote: build one with "
            f"`tidelog archive backfill {name}`{kept if len(archive.formats) > 1 else ''}"
        )
    return _Promote(context, archive, archive.building, workers).run(force)


def rollback(
    context: Context,
    name: str,
    *,
    generation: int | None = None,
    force: bool = False,
    workers: Workers | None = None,
) -> Archive:
    """Makes a kept generation live again, with everything since; otherwise like ``promote``."""
    archive = find_archive(context, name)
    check_active(archive)
    files_at(context, archive)  # raises unless the folder is ours, before any change
    wanted = _kept_generation(archive, generation)
    if wanted == archive.building and wanted > archive.generation:
        # never live, or a rollback to it died: a promote finishes both
        raise _being_built(name, wanted)

    def edit(found: Archive) -> Archive:
        check_active(found)
        if found.building is not None and found.building != wanted:
            raise _being_built(name, found.building)
        if found.state_of(wanted) not in ("kept", "building"):
            raise InvalidError(
                f"archive `{name}`: generation {wanted} is {found.state_of(wanted)}: roll back to "
                "one that is kept"
            )
        return _with_states(found, {wanted: "building"})

    before = archive.state_of(wanted)
    archive = change_archive(context, name, edit)  # step 0
    try:
        return _Promote(context, archive, wanted, workers).run(force)
    except InvalidError:
        if before == "kept":
            change_archive(context, name, lambda found: _kept_again(found, wanted))
        raise


def drop_generation(
    context: Context, name: str, generation: int, *, force: bool = False, dry_run: bool = False
) -> Archive:
    """Deletes a building or kept generation with all its files.

    Raises ``InvalidError`` for the live one, and if it covers what neither the live one nor the
    source has, unless ``force`` accepts that loss. With ``dry_run`` it only does that.
    """
    archive = find_archive(context, name)
    files_at(context, archive)  # raises unless the folder is ours, before any change
    state = archive.state_of(generation)
    if generation == archive.generation:
        do = "promote another one first"
        if archive.ended is not None:
            do = f"delete all with `tidelog archive delete {name} --delete-files`"
        raise InvalidError(f"archive `{name}`: generation {generation} is the live one: {do}")
    if state == "kept" and not force:
        gone = _missing_files(context, archive, archive.generation)
        if gone:
            raise InvalidError(
                f"archive `{name}`: generation {archive.generation}, the live one, lacks "
                f"{_files(gone)}, which generation {generation} may have: restore them from a "
                f"copy, or go back with `tidelog archive rollback {name}`; --force drops it",
                missing=gone,
            )
    if state != "removing" and not force:
        lacking = _only_in(context, archive, generation)
        if lacking:
            raise InvalidError(
                f"archive `{name}`: generation {generation} holds what neither generation "
                f"{archive.generation} nor the source has: {_ranges(lacking)}: keep it, or drop it "
                "with --force",
                missing=[each.text for each in lacking],
            )
    if dry_run:
        return archive

    def edit(found: Archive) -> Archive:
        check_shown(f"archive `{name}`", archive.incarnation, found.incarnation)
        if generation == found.generation or _targets(context, found, generation):
            raise InvalidError(
                f"archive `{name}`: generation {generation} is being promoted: drop it afterwards"
            )
        return _with_states(found, {generation: "removing"})

    with freeing(context.catalog):
        return _remove(context, change_archive(context, name, edit), generation)


def finish_removals(context: Context, archive: Archive) -> Archive:
    """Finishes deletes of generations, or of the archive, that another process left unfinished."""
    if archive.ended is not None and archive.ended.removing:
        finish_removal(context, archive)
        return archive
    for generation in archive.in_state("removing"):
        archive = _remove(context, archive, generation)
    return archive


def remove_strays(context: Context, archive: Archive) -> None:
    """Deletes what a driver of a deleted generation has copied, staged or recorded since."""
    files = files_at(context, archive)
    removed = [each for each in range(1, archive.newest + 1) if each not in archive.formats]
    for generation in removed:
        delete_below(files, f"{archive.folder(generation)}/")
        for each in pipelines_of(archive, generation):
            remove_work(context, each, files)
    if removed:
        dead = tuple(f"{generation}_" for generation in removed)
        delete_below(files, f"{archive.dead}/", lambda key: _name(key).startswith(dead))


def _missing_files(context: Context, archive: Archive, generation: int) -> list[str]:
    """Returns files that count in a generation, and manifests of it, that are not in the store."""
    missing = _missing_now(context, archive, generation)
    if missing:  # a replay or a merge may have replaced some between the reads
        missing &= _missing_now(context, archive, generation)
    return sorted(missing)


def _missing_now(context: Context, archive: Archive, generation: int) -> set[str]:
    store, folders = files_at(context, archive), (archive.folder(generation), archive.dead)
    named, gone = _named_files(context, archive.pipeline(generation))
    there = {info.key for folder in folders for info in store.list(f"{folder}/")}
    return gone | {key for key in named - there if not object_exists(store, key)}


def _named_files(context: Context, pipeline: str) -> tuple[set[str], set[str]]:
    """Returns the files that count in a generation, and manifests that are not there."""
    named: set[str] = set()
    gone: set[str] = set()
    for partition in read_partitions(context, pipeline):
        try:
            named |= {file.target for _, file in counting_files(context, pipeline, partition)}
        except NotFoundError as exc:
            gone.add(str(exc.context.get("key") or exc))
    return named, gone


def _files(missing: Sequence[str]) -> str:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"files that its rows and manifests name: {', '.join(missing[:_SHOWN])}{more}"


class _Promote:
    """One promote or rollback, from step 1 on."""

    def __init__(
        self, context: Context, archive: Archive, generation: int, workers: Workers | None
    ) -> None:
        files_at(context, archive)  # raises unless the folder is ours, before any change
        self._context = context
        self._archive = archive
        self._generation = generation
        self._workers = workers or LocalWorkers()
        self._promotion = Promotion(context.ids.new(), generation, context.clock.now_ms())
        self._events = _lacking_events(context, archive, archive.generation, generation)

    def run(self, force: bool) -> Archive:
        if not force:
            self._check_files()
        lacking = self._catch_up(force)  # step 1
        if lacking and not force:
            raise self._refusal(lacking)
        check_tables(self._context, self._archive, self._generation)
        self._begin()
        context, live = self._context, self._live()
        try:
            for pipeline in live:
                freeze_heads(context, pipeline, self._promotion)
            lacking = self._catch_up(force)
            if lacking and not force:
                raise self._refusal(lacking)
            archive, now_ms = self._archive, context.clock.now_ms()
            before, after = archive.generation, archive.pipeline(self._generation)
            reason = "--force" if force else ""
            carry_known(context, archive.pipeline(), after)
            note_before(context, (before, archive.pipeline()), after, now_ms, reason)
            switched = self._switch(lacking)
        except TidelogError:
            with contextlib.suppress(TidelogError):  # else a driver does it
                withdraw(context, self._archive.name, self._promotion)
                for pipeline in live:
                    release_heads(context, pipeline.id, self._promotion)
            raise
        replace_files(self._context, switched)  # step 6
        return switched

    def _check_files(self) -> None:
        """Raises ``InvalidError`` if files of the new generation are gone.

        A restored catalog may list files that were dropped or replayed after its copy was made.
        """
        gone = _missing_files(self._context, self._archive, self._generation)
        if gone:
            name, number = self._archive.name, self._generation
            raise InvalidError(
                f"archive `{name}`: generation {number} lacks {_files(gone)}: restore them from a "
                f"copy, or drop it with `tidelog archive drop {name} {number}`; --force makes it "
                "the live one without them",
                missing=gone,
            )

    def _catch_up(self, force: bool) -> list[MissingRange]:
        """Steps 1 and 4. Returns what the new generation lacks after that."""
        lacking = self._lacking()
        if not lacking:
            return []
        archive, new = self._archive, self._generation
        pipeline = open_pipeline(self._context, archive, self._workers, new)
        how = DriverOptions(wait=True, policy=FilePolicy(archive.max_bytes, archive.max_age_ms))

        def look(_: CycleReport) -> None:
            """Stops at what the live one has, because a busy source never ends."""
            if not is_behind(self._context, archive, archive.generation, new):
                how.stop.set()

        how.on_cycle = look
        try:
            Driver(self._context, pipeline, how).run()
        except TidelogError:
            if not force:
                raise
        return self._lacking()

    def _lacking(self) -> list[MissingRange]:
        archive = self._archive
        ranges = missing_ranges(self._context, archive, archive.generation, self._generation)
        return ranges or self._events.find()

    def _begin(self) -> None:
        """Step 2."""
        promotion = msgspec.structs.replace(self._promotion, began_ms=store_now_ms(self._context))

        def edit(found: Archive) -> Archive:
            self._check_same(found)
            other = found.promotion
            if (
                other is not None
                and other.id != promotion.id
                and not is_stale(self._context, other)
            ):
                raise InvalidError(
                    f"archive `{found.name}`: generation {other.generation} is being promoted by "
                    "another process: wait for it"
                )
            return msgspec.structs.replace(found, promotion=promotion)

        self._promotion = promotion
        change_archive(self._context, self._archive.name, edit)

    def _live(self) -> list[Pipeline]:
        """Returns the pipelines of the live generation: its own, and that of its dead letters."""
        own = open_pipeline(self._context, self._archive, self._workers)
        return [own, dataclasses.replace(own, id=replay_pipeline(own.id))]

    def _switch(self, lacking: Sequence[MissingRange]) -> Archive:
        """Step 5."""
        old, new = self._archive.generation, self._generation

        def edit(found: Archive) -> Archive:
            if found.generation == new and found.promotion is None:
                return found  # a lost reply: it is done
            self._check_same(found)
            if found.promotion is None or found.promotion.id != self._promotion.id:
                raise InvalidError(
                    f"archive `{found.name}`: this promote took longer than "
                    f"{limits.PROMOTION_MS // 1000} s, and drivers have resumed: promote again"
                )
            states = {**found.states, old: "kept"}
            states.pop(new, None)
            forced = found.forced
            if lacking:
                ranges = tuple((each.partition, each.start, each.end) for each in lacking)
                now_ms = self._context.clock.now_ms()
                listed = ranges[: limits.FORCED_RANGES_MAX]
                more = len(ranges) - len(listed)
                forced = (*forced, ForcedPromote(old, new, now_ms, listed, more))
            # From now on it follows the source, whichever part of it was written again.
            written_as = msgspec.structs.replace(found.format_of(new), redo=None)
            return msgspec.structs.replace(
                found,
                generation=new,
                states=states,
                formats={**found.formats, new: written_as},
                promotion=None,
                forced=forced,
            )

        return change_archive(self._context, self._archive.name, edit)

    def _check_same(self, found: Archive) -> None:
        mine, number = self._archive, self._generation
        same = (found.incarnation, found.generation) == (mine.incarnation, mine.generation)
        if not same or number not in found.formats or found.state_of(number) != "building":
            raise InvalidError(
                f"archive `{mine.name}`: its generations have changed meanwhile: look at "
                f"`tidelog archive status {mine.name}`, and try again"
            )

    def _refusal(self, lacking: Sequence[MissingRange]) -> InvalidError:
        name = self._archive.name
        return InvalidError(
            f"archive `{name}`: generation {self._generation} lacks what generation "
            f"{self._archive.generation} has: {_ranges(lacking)}: run `tidelog archive backfill "
            f"{name}` again first, or lose that with --force",
            missing=[each.text for each in lacking],
        )


def _kept_generation(archive: Archive, generation: int | None) -> int:
    """Returns the generation to roll back to."""
    kept = archive.in_state("kept") or archive.in_state("building")
    if generation is not None:
        archive.format_of(generation)
        return generation
    if len(kept) == 1:
        return kept[0]
    if not kept:
        raise InvalidError(f"archive `{archive.name}`: keeps no other generation to roll back to")
    raise InvalidError(
        f"archive `{archive.name}`: keeps generations {', '.join(map(str, kept))}: say which with "
        "--to"
    )


def _being_built(name: str, generation: int) -> InvalidError:
    return InvalidError(
        f"archive `{name}`: generation {generation} is being built: promote it, or drop it with "
        f"`archive drop {name} {generation}`, before a rollback"
    )


def _kept_again(archive: Archive, generation: int) -> Archive:
    building = generation in archive.formats and archive.state_of(generation) == "building"
    return _with_states(archive, {generation: "kept"}) if building else archive


def _with_states(archive: Archive, states: dict[int, GenerationState]) -> Archive:
    return msgspec.structs.replace(archive, states={**archive.states, **states})


def _targets(context: Context, archive: Archive, generation: int) -> bool:
    """Returns whether a promote of this generation is running."""
    promotion = archive.promotion
    under_way = promotion is not None and promotion.generation == generation
    return under_way and promotion is not None and not is_stale(context, promotion)


def _only_in(context: Context, archive: Archive, generation: int) -> list[MissingRange]:
    """Returns what a generation covers and neither the live one nor the source has."""
    lacking = missing_ranges(context, archive, generation, archive.generation)
    only = _lacking_events(context, archive, generation, archive.generation).find()
    if not lacking and not only:
        return []
    pipeline = archive.pipeline(generation)
    try:
        source = source_at(context, archive.source)
        track(context, pipeline, source)
        held = bounds_apart(source, source.partitions(), {})
    except TidelogError:
        return [*lacking, *only]  # a source that cannot be reached counts as empty
    left: list[MissingRange] = []
    for each in (*lacking, *only):
        partition = SourcePartition.named(each.partition)
        bounds, covered = held.get(partition), read_covered(context, pipeline, each.partition)
        if bounds is None or covered is None or not are_offsets(each.start, each.end):
            left.append(each)
            continue
        if bounds.incarnation != covered.incarnation:  # an unknown one may be another
            left.append(each)
            continue
        if each in only and not bounds.is_dense:  # a source that may have been incomplete
            left.append(each)
            continue
        spans = held_spans(source, partition, bounds, covered, complete=True)
        pieces = without([(int(each.start), int(each.end))], spans)
        left += [MissingRange(each.partition, str(start), str(end)) for start, end in pieces]
    return left


def _lacking_events(context: Context, archive: Archive, old: int, new: int) -> LackingEvents:
    erased = ErasedBefore(context, archive, new, with_topic=True)
    return LackingEvents(context, archive, old, new, erased)


def _ranges(ranges: Sequence[MissingRange]) -> str:
    more = len(ranges) - _SHOWN
    shown = ", ".join(each.text for each in ranges[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _remove(context: Context, archive: Archive, generation: int) -> Archive:
    """Steps 3 to 6 of a drop."""
    replace_files(context, archive)  # a promote may have crashed before it did this
    pipelines = pipelines_of(archive, generation)
    files = files_at(context, archive)
    for each in pipelines:
        close_heads(context, each)
    delete_below(files, f"{archive.folder(generation)}/")
    delete_below(files, f"{archive.dead}/", lambda key: _is_of(key, generation))
    for each in pipelines:
        remove_work(context, each, files)
    forget_files(context, archive, generation)

    def edit(found: Archive) -> Archive:
        check_shown(f"archive `{archive.name}`", archive.incarnation, found.incarnation)
        formats = {number: each for number, each in found.formats.items() if number != generation}
        states = {number: each for number, each in found.states.items() if number != generation}
        given = found.formats[generation].source if generation in found.formats else ""
        former = {**found.former, generation: given} if given else found.former
        gone = [each for number, each in found.formats.items() if number == generation]
        had_output = found.had_output or any(map(may_hold_output, gone))
        return msgspec.structs.replace(
            found, formats=formats, states=states, former=former, had_output=had_output
        )

    return change_archive(context, archive.name, edit)


def _is_of(key: str, generation: int) -> bool:
    """Returns whether a file's name has this generation."""
    return _name(key).startswith(f"{generation}_")


def _name(key: str) -> str:
    return key.rpartition("/")[2]
