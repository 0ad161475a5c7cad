"""Carries updates of a topic's events into the files of its archives.

An update changes the topic, and every reader of it, at once. Files that were archived before keep
the old value until this runs. A file is rewritten by the steps of an erasure (``rewrite``), under
its own name, and every table that lists it is corrected. So a reader sees each event once, with its
old or its new value.

The values come from the topic, as they are now, and are compared again at the end: of two updates
at once, the later one is in the files whichever process writes last. An event that is trimmed in
the meantime keeps the value that it had last. A range that a driver began before the update may
have read the old value: this waits for it. A replay, a redo or an archive of an archive reads
files, and may have read one just before it was rewritten. So all archives are looked at again until
nothing had to be changed. Everything may be repeated: a file that has the values is left alone.

An event keeps its file and folder, also where its new value would name another one. Files without
values, and files of a transform's output, are not changed: ``unchanged`` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from tidelog.archive.derived_archives import (
    output_above,
    output_of,
    partitions_of,
    reachable_archives_of,
    with_later_ones,
)
from tidelog.archive.generations import finish_removals
from tidelog.archive.read import ArchiveFiles
from tidelog.catalog.update import rounds
from tidelog.clock import looks
from tidelog.connectors.by_url import files_at
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_partitions, replay_pipeline
from tidelog.erasure.rewrite import (
    ArchiveErasure,
    PartitionRewriter,
    RangeToSettle,
    settle_ranges,
)
from tidelog.erasure.rewrite_range import Offsets
from tidelog.erasure.unfinished_ranges import finish_remedy, is_under_way
from tidelog.errors import NotFoundError, TidelogError, UnavailableError, contained, raise_first
from tidelog.journal.lookup import Lookup
from tidelog.log.topics import read_head
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import Topic

__all__ = ["ArchiveUpdate", "update_archives"]

_WAIT_MS = 10_000  # for unfinished ranges
_LOOK_S = 0.5
_ROUNDS = 20  # while other updates of the same events come

_AGAIN = "build it again with `tidelog archive backfill`"
_CARRIED = f"some files hold the output of an earlier generation's transform or parser: {_AGAIN}"

_Values = Mapping[int, Mapping[int, bytes | None]]
"""New values by partition and offset."""


@dataclass(frozen=True, slots=True)
class ArchiveUpdate:
    """What an update changed in one generation of an archive."""

    archive: str
    generation: int
    files: int = 0
    events: int = 0
    unchanged: str = ""  # why its files keep the old values


_Done = tuple[dict[tuple[str, int], ArchiveUpdate], list[TidelogError]]
"""What was changed, by archive and generation, and what went wrong."""


def update_archives(
    context: Context, lookup: Lookup, ids: Collection[str], wait_ms: int = _WAIT_MS
) -> list[ArchiveUpdate]:
    """Gives archived events of these ids the values that the topic has now.

    Raises ``NotFoundError`` if the topic has none of them.
    Raises ``UnavailableError`` if a range that may hold an old value takes longer than
    ``wait_ms``, and the error of an archive or a table after all others are done. Call it again.
    """
    total: dict[tuple[str, int], ArchiveUpdate] = {}
    values: _Values = {}
    errors: list[TidelogError] = []
    waiting: ArchiveErasure | None = None
    for is_last in looks(context.clock, wait_ms / 1000, _LOOK_S):
        errors.clear()
        waiting, values = _update_until_same(context, lookup, ids, values, (total, errors))
        if is_last or not waiting:
            break
    raise_first(errors)
    if waiting:
        raise UnavailableError(
            f"topic `{lookup.topic.name}`: a range of archive `{waiting.archive}` is under way "
            f"that may hold the old value: {min(waiting.unfinished.values())}, then update its "
            "archives again"
        )
    return list(total.values())


def _update_until_same(
    context: Context, lookup: Lookup, ids: Collection[str], known: _Values, into: _Done
) -> tuple[ArchiveErasure | None, _Values]:
    """Updates until the topic has the values that the archives got, or until something is left.

    Returns a generation with a range that may hold an old value, and the values.
    """
    values, (total, errors) = known, into
    busy = UnavailableError(
        f"topic `{lookup.topic.name}`: these events keep being updated: update its archives again"
    )
    for _ in rounds(_ROUNDS, busy):
        now = _current_values(lookup, ids)
        values = _with_trimmed(context, lookup.topic, now, values)
        if not values:
            raise NotFoundError(
                f"topic `{lookup.topic.name}`: has none of these events any more: archived files "
                "keep the values that they have",
                topic=lookup.topic.name,
            )
        done = _update_generations(context, lookup.topic, values, total, errors)
        is_same = not done.has_changed and _current_values(lookup, ids) == now
        if done.waiting or errors or is_same:
            return done.waiting, values
    raise busy


def _current_values(lookup: Lookup, ids: Collection[str]) -> _Values:
    """Returns the values of all events with these ids; without those that are deleted by now."""
    while True:
        found: dict[int, dict[int, bytes | None]] = {}
        try:
            for events in lookup.find(list(ids), columns=None).events.values():
                for each in events:
                    value = lookup.event(each).value
                    found.setdefault(each.partition, {})[each.offset] = value
        except NotFoundError:
            continue  # a new value was compiled or replaced since: find looks again
        return found


def _with_trimmed(context: Context, topic: Topic, now: _Values, before: _Values) -> _Values:
    """Returns the values that the topic has now, and the last ones of events trimmed since."""
    found = {partition: dict(values) for partition, values in now.items()}
    for partition, values in before.items():
        start = read_head(context, topic, partition)[0].start
        known = found.setdefault(partition, {})
        known |= {at: value for at, value in values.items() if at < start and at not in known}
    return {partition: values for partition, values in found.items() if values}


class _UpdateRound(NamedTuple):
    """What one round of updates in all archives has left."""

    waiting: ArchiveErasure | None  # with a range that may hold an old value
    has_changed: bool


def _update_generations(
    context: Context,
    topic: Topic,
    values: _Values,
    total: dict[tuple[str, int], ArchiveUpdate],
    errors: list[TidelogError],
) -> _UpdateRound:
    """Updates the files of all generations of all archives once."""
    waiting: ArchiveErasure | None = None
    has_changed = False
    for archive, generation in with_later_ones(lambda: reachable_archives_of(context, topic)):
        with contained(f"archive `{archive.name}`", errors.append):
            known = total.get((archive.name, generation), ArchiveUpdate(archive.name, generation))
            why = _why_unchanged(context, archive, generation)
            if why:
                total[archive.name, generation] = ArchiveUpdate(
                    archive.name, generation, unchanged=why
                )
                continue
            output: set[str] = set()
            where = (archive, generation)
            report, was_old = _update_generation(context, where, topic, values, output)
            has_changed |= was_old
            errors += report.failed.values()
            waiting = waiting or (report if report.waiting else None)
            total[archive.name, generation] = ArchiveUpdate(
                archive.name,
                generation,
                known.files + report.files,
                known.events + report.updated,
                _CARRIED if output else "",
            )
    return _UpdateRound(waiting, has_changed)


def _why_unchanged(context: Context, archive: Archive, generation: int) -> str:
    """Returns why files of a generation cannot get new values; empty if they can."""
    written_as = archive.format_of(generation)
    if output := output_of(written_as):
        return f"its files hold the output of a {output}: {_AGAIN}"
    if above := output_above(context, archive, generation):
        return f"its files were made from archive `{above}`, which holds other values: {_AGAIN}"
    if not ArchiveFiles(files_at(context, archive), written_as).restorable:
        return f"its files have columns and no values: {_AGAIN}"
    return ""


def _update_generation(
    context: Context,
    where: tuple[Archive, int],
    topic: Topic,
    values: _Values,
    output: set[str],
) -> tuple[ArchiveErasure, bool]:
    """Updates one generation. Returns also whether something had to be changed.

    Adds to ``output`` the files that may hold such an event, but as output.
    """
    archive, generation = where
    report = ArchiveErasure(archive.name, generation)
    if archive.state_of(generation) == "removing":
        finish_removals(context, archive)
        return report, False
    store, own = files_at(context, archive), archive.pipeline(generation)
    numbers, has_changed = partitions_of(context, own, topic), False
    for pipeline in (own, replay_pipeline(own)):
        todo: list[RangeToSettle] = []
        for partition in read_partitions(context, pipeline):
            here = values.get(numbers.get(partition, -1), {})
            wanted = np.array(sorted(here), np.int64)
            if len(wanted):
                rewriter = _PartitionUpdater(
                    context, store, archive, generation, pipeline, partition
                )
                rewriter.values, rewriter.output = here, output
                # Before the rows are read, on purpose.
                if is_under_way(context, pipeline, partition, wanted):
                    report.waiting += 1
                    report.unfinished[pipeline] = finish_remedy(archive, pipeline)
                todo += [RangeToSettle(rewriter, row, wanted) for row in rewriter.rows(wanted)]
        settle_ranges(context, todo, report)
        has_changed |= any(each.rewriter.has_changed for each in todo)
    return report, has_changed


class _PartitionUpdater(PartitionRewriter):
    """Rewrites the committed ranges of one source partition with new values of events."""

    def _manifest_after(
        self, old: Manifest, staged: Mapping[str, FileEntry], wanted: Offsets
    ) -> Manifest:
        files = tuple(staged.get(entry.target, entry) for entry in old.files)
        return msgspec.structs.replace(old, files=files)
