"""Ranges that the catalog has forgotten: they are set aside, so that no event counts twice.

A catalog restored from a backup is older than its store. Ranges committed in between have published
their files, but no row names them. The pipeline will do them again: with other limits and other
bytes, possibly with other events, since the source may be a topic of the same catalog. Such files
must not stay where readers list them.

Their manifests are still in the store. ``looked`` in a head is its epoch when a driver last looked
for forgotten ranges and then wrote the head. Forgotten ranges have that epoch or a later one, and
no sweep deletes such manifests. A driver lists them when it claims a source partition. After that,
if no range is decided:

1. Of the manifests that no commit names, choose those from the
   head's ordinal on whose files have the right size and
   checksum, and are not those of a commit.                   → crash: nothing has changed
2. Decide, in one write that expects the head: a row
   ``aside/<manifest>`` for each range, which never changes,
   and new ``names`` in the head, which become part of every
   later file name.                                           → crash: the next driver does 3
3. Set folders of these files that have a ``_SUCCESS``, also
   by another layout, to ``reopening``, for the next finalize. → crash: the same
4. Copy each file below ``_aside`` of the archive's folder,
   create-only.                                               → crash: two copies, one of them
                                                                where no reader lists
5. Delete the files.                                          → done

No range begins until all files named by ``aside`` rows are deleted where readers list them. The
next driver that claims the partition finds the rows and resumes.

A replay of dead letters publishes into the same folders, under the same kind of names. It reads
what its generation has committed, so a generation with forgotten ranges may have forgotten replays
of them. These events are no dead letters if the range can parse them now. So before step 2, a
driver that finds forgotten ranges of a generation and any manifest of a replay that no commit
names:

a. puts new ``names`` into its head, as in step 2             → crash: the next driver does the same
b. claims the partition of the replay, which fences a driver
   there, finishes a decided range, does steps 1 to 5 for the
   replay, and releases it                                    → crash: the next driver does the same

Its own forgotten ranges show that this is to do, until a write after step 5 puts ``looked``.

This module touches no marker, because the row of a folder decides (``archive.finalize``): finalize
deletes a marker that is newer than the restored catalog, and a new one lists the current files.

Step 5 deletes by name, and a driver may stall before it while others do the range again and commit
it. So names decided in step 2 are never reused: later ranges have other ``names``. A driver that
lost the partition before step 2 fails there and has deleted nothing. An attempt that was never
decided has published nothing; a file with its name belongs to another range, committed (its ordinal
shows that while the head is ours) or forgotten too. Ordinals of replays count tries, so a
forgotten replay may have a later one than the replay that has written the same file again: files
that commits name stay. A file that no manifest explains stays: publishing refuses to replace it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.connectors.sink import FileSink
from tidelog.context import Context
from tidelog.coordination.commits import load_manifest, read_commit_rows, read_manifests
from tidelog.coordination.pipeline_rows import (
    generation_pipeline,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model import layout, limits
from tidelog.model.pipeline import Aside, FileEntry, Manifest, Progress
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.date_folders import DateFolders, Span, reopen

__all__ = [
    "NAMES_CHARS",
    "ForgottenRange",
    "SettingAside",
    "committed_manifests",
    "decisions",
    "forgotten_files",
    "manifests_since",
    "read_aside",
]

NAMES_CHARS = 16  # of an id, in a head's ``names``: enough to be unique
_ROWS = (layout.aside_row(""), "aside0")


def manifests_since(context: Context, pipeline: str, partition: str, epoch: int) -> list[str]:
    """Returns the keys of a source partition's manifests of an epoch or later."""
    folder = f"{layout.manifests(pipeline)}{layout.manifest_folder(partition)}/"
    return [info.key for info in context.store.list(folder, start_after=f"{folder}{epoch:010}")]


class SettingAside(NamedTuple):
    """The steps for a claimed source partition without a decided range."""

    context: Context
    pipeline: str
    partition: str
    sink: FileSink

    def run(
        self,
        keys: Iterable[str],
        head: Progress,
        decide: Callable[[Sequence[Put]], None],
        set_replays_aside: Callable[[], list[Aside]],
    ) -> list[Aside]:
        """Sets forgotten ranges aside, after ``decide`` has put their rows. Returns which.

        ``set_replays_aside`` does steps a and b, and is called if they are to do.
        """
        known = committed_manifests(self.context, self.pipeline, self.partition)
        forgotten = list(_forgotten_manifests(self.context, set(keys) - known, head))
        replayed = set_replays_aside() if forgotten and self._has_unnamed_replays() else []
        found = self.look(forgotten)
        for rows in decisions(found):
            decide(rows)
        for each in found:
            self.move(each)
        return [*replayed, *(each.record for each in found)]

    def look(self, forgotten: Iterable[tuple[str, Manifest]]) -> list[ForgottenRange]:
        """Step 1: returns ranges to decide, and decided ranges that are not finished."""
        rows = {row.row: decode_row(row.value, Aside, row.row) for row in self._rows()}
        found: list[ForgottenRange] = []
        there = [(*each, list(self.sink.published(each[1]))) for each in forgotten]
        taken = self._committed_files() if any(files for *_, files in there) else set()
        for name, manifest, published in there:
            decided = rows.get(layout.aside_row(name))
            files = [file for file in published if file.target not in taken]
            if decided is not None:
                files = [file for file in files if self.sink.aside(file, name) in decided.files]
            if files:
                taken.update(file.target for file in files)
                record = decided or self._record(name, manifest, files)
                found.append(ForgottenRange(name, record, tuple(files), decided is not None))
        return found

    def move(self, found: ForgottenRange) -> None:
        """Steps 3 to 5 for a decided range."""
        for span in self._spans(found.files):
            if self.sink.has_success(span.folder):
                reopen(self.context, generation_pipeline(self.pipeline), span)
        self.sink.set_aside(found.files, found.name)

    def _committed_files(self) -> set[str]:
        """Returns the names of files that commits of the generation or its replays name."""
        generation = generation_pipeline(self.pipeline)
        return {
            file.target
            for pipeline in (generation, replay_pipeline(generation))
            for manifest in read_manifests(self.context, pipeline, self.partition)
            for file in manifest.files
        }

    def _has_unnamed_replays(self) -> bool:
        """Returns whether this is a generation with a manifest of a replay that no commit names."""
        if generation_pipeline(self.pipeline) != self.pipeline:
            return False
        replays = replay_pipeline(self.pipeline)
        keys = manifests_since(self.context, replays, self.partition, 0)
        known = committed_manifests(self.context, replays, self.partition) if keys else set()
        return not known.issuperset(keys)

    def _spans(self, files: Iterable[FileEntry]) -> list[Span]:
        """Returns the folders of files that may have a marker.

        A generation that the catalog forgot may have had another layout than the one that has its
        number now. So folders that this one does not date are among them, without times.
        """
        folders = DateFolders(self.sink.folders())
        found: dict[str, Span] = {}
        for file in (each for each in files if each.kind == "data"):
            folder = self.sink.folder(file)
            for name in accumulate(folder.split("/"), "{}/{}".format) if folder else ():
                found.setdefault(name, Span(name, 0, 0))
            found |= {span.folder: span for span in folders.spans(folder, file.path_ms)}
        return [found[name] for name in sorted(found)]

    def _rows(self) -> Iterator[Row]:
        where = layout.pipeline_partition(self.pipeline, self.partition)
        return iter(self.context.catalog.scan(where, *_ROWS))

    def _record(self, name: str, manifest: Manifest, files: Sequence[FileEntry]) -> Aside:
        return Aside(
            partition=self.partition,
            start=manifest.start,
            end=manifest.end,
            events=sum(file.events for file in files if file.kind == "data"),
            files=tuple(self.sink.aside(file, name) for file in files),
            at_ms=self.context.clock.now_ms(),
            incarnation=manifest.incarnation,
        )


class ForgottenRange(NamedTuple):
    """A range that the catalog has forgotten."""

    name: str
    record: Aside
    files: tuple[FileEntry, ...]  # still where readers list them
    is_decided: bool  # its row exists

    def row(self) -> Put:
        """Returns the row for step 2."""
        return Put(layout.aside_row(self.name), encode_row(self.record), expect=ABSENT)


def decisions(found: Iterable[ForgottenRange]) -> Iterator[list[Put]]:
    """Yields the rows for step 2, in groups that fit into one write with the head."""
    rows = [each.row() for each in found if not each.is_decided]
    for first in range(0, len(rows), limits.CHANGES_MAX - 1):
        yield rows[first : first + limits.CHANGES_MAX - 1]


def forgotten_files(context: Context, pipeline: str) -> Iterator[FileEntry]:
    """Yields the files of ranges that a restored catalog forgot; a driver will set them aside."""
    heads: dict[str, Progress | None] = {}
    known: dict[str, set[str]] = {}
    for info in context.store.list(layout.manifests(pipeline)):
        found = _read(context, info.key)
        if found is None:
            continue
        partition = found.each_range[0].partition
        if partition not in heads:
            heads[partition] = read_progress(context, pipeline, partition)
            known[partition] = committed_manifests(context, pipeline, partition)
        head = heads[partition] or Progress("", 0, 0)
        is_unchecked = int(info.key.split("/")[-2]) >= head.looked
        if is_unchecked and info.key not in known[partition]:
            for _, manifest in _forgotten_manifests(context, [info.key], head):
                yield from manifest.files


def committed_manifests(context: Context, pipeline: str, partition: str) -> set[str]:
    """Returns the keys of all manifests that commits name."""
    found: set[str] = set()
    for row in read_commit_rows(context, pipeline, partition):
        found |= {row.committed.manifest, row.committed.rewrite, *row.committed.replaced}
    return found


def read_aside(context: Context, pipeline: str) -> list[Aside]:
    """Returns the ranges of a pipeline that were set aside."""
    return [
        decode_row(row.value, Aside, f"row `{row.row}`")
        for partition in read_partitions(context, pipeline)
        for row in context.catalog.scan(layout.pipeline_partition(pipeline, partition), *_ROWS)
    ]


def _forgotten_manifests(
    context: Context, keys: Iterable[str], head: Progress
) -> Iterator[tuple[str, Manifest]]:
    """Yields manifests from the head's ordinal on, each with a name; includes merged ones."""
    for key in sorted(keys):
        found = _read(context, key)
        name = key.rpartition("/")[2].removesuffix(".json")
        if found is None:
            continue
        for number, manifest in enumerate(found.each_range):
            if manifest.ordinal >= head.ordinal:
                yield f"{name}-{number:04}" if found.ranges else name, manifest


def _read(context: Context, key: str) -> Manifest | None:
    """Reads a manifest; None if a sweep deleted it or it is damaged."""
    with contextlib.suppress(NotFoundError, CorruptError):
        return load_manifest(context.store, key)
    return None
