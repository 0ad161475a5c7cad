"""Ranges that the catalog has forgotten: set aside, so that no event counts twice.

A catalog that was restored from a back-up is older than the store beside it. Ranges that were
committed in between have published their files, but no row names them, and the pipeline will do
them again: with other limits and other bytes, perhaps even with other events, since the source may
be a topic of the same catalog. Such files must not stay where readers list them.

Their manifests are still in the store. A head says under which epoch a driver has last looked for
such ranges, and then written the head (``looked``): the forgotten ones are of that epoch or
later, and no sweep deletes manifests that are. A driver lists these when it adopts a source
partition. Once that is adopted and has no decided range:

1. of the manifests that no commit names, take those from the head's ordinal on whose files are
   there with the size and checksum that they say             → dead: nothing has changed
2. decide, in one write that expects the head: a row
   ``aside/<manifest>`` for each range, which is never changed
   again, and fresh ``names`` into the head, which are part of
   the name of every file from here on                         → dead: the next resumes with 3
3. make date folders of these files that have a ``_SUCCESS``
   ``reopening``, for the next finalize (``counting.reopen``)   → dead: the same
4. copy each file below ``_aside`` of the archive's folder,
   create-only                                                 → dead: files that are there twice,
                                                                 once where no reader lists
5. delete them                                                 → done

No range begins before all files that ``aside`` rows name are deleted where readers list them: the
next driver that adopts the partition finds the rows, and resumes.

No marker is touched here, as the row of a folder is the truth about it (``finalize``): finalize
deletes one that was put after the copy of the catalog, and a new one lists the files as they are.

Step 5 deletes by name, and a driver may stall before it for any time, while others do
the range again and commit it. So names that step 2 has decided on must never be used again: those
of later ranges have other ``names`` in them. A driver that lost the partition before step 2 fails
there, and has deleted nothing. An attempt that was never decided has published nothing; what is at
its names is another one's, either committed, which the ordinal shows as long as the head is ours,
or forgotten too. A file that no manifest explains is left alone: publishing refuses to replace it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.connectors.sink import AsideSink
from tidelog.context import Context
from tidelog.coordination.dead_letter_rows import generation_pipeline
from tidelog.coordination.pipeline_rows import read_commit_rows, read_partitions
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model import layout, limits
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.pipeline import Aside, FileEntry, Manifest, Progress, read_manifest
from tidelog.pipeline.date_folders import DateFolders, Span, reopen

__all__ = [
    "ForgottenRange",
    "SettingAside",
    "committed_manifests",
    "decisions",
    "late_manifests",
    "read_aside",
]

_ROWS = (layout.aside_row(""), "aside0")


def late_manifests(context: Context, pipeline: str, epoch: int) -> dict[str, list[str]]:
    """The keys of manifests that were recorded under an epoch or later, by ``manifest_folder``."""
    found: dict[str, list[str]] = {}
    folder = layout.manifests(pipeline)
    for info in context.store.list(folder, start_after=f"{folder}{epoch:010}"):
        found.setdefault(layout.folder_of_manifest(info.key), []).append(info.key)
    return found


class SettingAside(NamedTuple):
    """The steps for an adopted source partition that has no decided range."""

    context: Context
    pipeline: str
    partition: str
    sink: AsideSink

    def look(self, keys: Iterable[str], known: set[str], head: Progress) -> list[ForgottenRange]:
        """Step 1: what is to be decided, and what was decided and is not done yet."""
        rows = {row.row: decode_row(row.value, Aside, row.row) for row in self._rows()}
        found: list[ForgottenRange] = []
        taken: set[str] = set()
        for name, manifest in _forgotten(self.context, set(keys) - known, head):
            decided = rows.get(layout.aside_row(name))
            files = [file for file in self.sink.published(manifest) if file.target not in taken]
            if decided is not None:
                files = [file for file in files if self.sink.aside(file, name) in decided.files]
            if files:
                taken.update(file.target for file in files)
                record = decided or self._record(name, manifest, files)
                found.append(ForgottenRange(name, record, tuple(files), decided is not None))
        return found

    def move(self, found: ForgottenRange) -> None:
        """Steps 3 to 5 for a range that is decided."""
        for span in self._spans(found.files):
            if self.sink.is_marked(span.folder):
                reopen(self.context, generation_pipeline(self.pipeline), span)
        self.sink.set_aside(found.files, found.name)

    def _spans(self, files: Iterable[FileEntry]) -> list[Span]:
        """The dated folders of files."""
        folders = DateFolders(self.sink.layout())
        return sorted(
            {
                span
                for file in files
                if file.kind == "data"
                for span in folders.spans(self.sink.folder(file), file.path_ms)
            },
            key=lambda span: span.folder,
        )

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
    """A forgotten range."""

    name: str
    record: Aside
    files: tuple[FileEntry, ...]  # that are still where readers list them
    is_decided: bool  # its row is there

    def row(self) -> Put:
        """What step 2 puts."""
        return Put(layout.aside_row(self.name), encode_row(self.record), expect=ABSENT)


def decisions(found: Iterable[ForgottenRange]) -> Iterator[list[Put]]:
    """The rows that step 2 is to put, as many at a time as fit beside the head."""
    rows = [each.row() for each in found if not each.is_decided]
    for first in range(0, len(rows), limits.CHANGES_MAX - 1):
        yield rows[first : first + limits.CHANGES_MAX - 1]


def committed_manifests(context: Context, pipeline: str, partition: str) -> set[str]:
    """The keys of all manifests that commits name."""
    found: set[str] = set()
    for row in read_commit_rows(context, pipeline, partition):
        found |= {row.committed.manifest, row.committed.rewrite, *row.committed.replaced}
    return found


def read_aside(context: Context, pipeline: str) -> list[Aside]:
    """The ranges of a pipeline that were set aside."""
    return [
        decode_row(row.value, Aside, f"row `{row.row}`")
        for partition in read_partitions(context, pipeline)
        for row in context.catalog.scan(layout.pipeline_partition(pipeline, partition), *_ROWS)
    ]


def _forgotten(
    context: Context, keys: Iterable[str], head: Progress
) -> Iterator[tuple[str, Manifest]]:
    """The manifests of ranges from the head's ordinal on, each with a name; also merged ones'."""
    for key in sorted(keys):
        found = _read(context, key)
        name = key.rpartition("/")[2].removesuffix(".json")
        if found is None:
            continue
        for number, manifest in enumerate(found.parts):
            if manifest.ordinal >= head.ordinal:
                yield f"{name}-{number:04}" if found.ranges else name, manifest


def _read(context: Context, key: str) -> Manifest | None:
    """A manifest; None for one that a sweep has deleted, or that is damaged."""
    with contextlib.suppress(NotFoundError, CorruptError):
        return read_manifest(context.store.get(key), key)
    return None
