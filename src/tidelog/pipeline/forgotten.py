"""Ranges that the catalog has forgotten: set aside, so that no event counts twice.

A catalog that was restored from a back-up is older than the store beside it. Ranges that were
committed in between have published their files, but no row names them, and the pipeline will do
them again: with other limits and other bytes, perhaps even with other events, since the source may
be a topic of the same catalog. Such files must not stay where readers list them.

Their manifests are still in the store. A head says under which epoch a driver has last looked for
such ranges, and then committed one of its own (``looked``): the forgotten ones are of that epoch or
later, and no sweep deletes manifests that are. A driver lists these when it adopts a source
partition. Once that is adopted and has no decided range:

1. of the manifests that no commit names, take those from the head's ordinal on whose files are
   there with the size and checksum that they say             → dead: nothing has changed
2. put a row ``aside/<manifest>`` that records the range        → dead: a record; the next goes on
3. copy each file below ``_aside`` of the archive's folder,
   create-only                                                 → dead: files that are there twice,
                                                                 once where nobody lists
4. delete them, and the ``_SUCCESS`` of their folders           → done

An attempt that was never decided has published nothing, so none of its files is there with its
checksum. A file that no manifest explains is left alone: publishing refuses to overwrite it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tidelog.catalog.base import Put
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.archives import read_commit_rows
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.pipeline import Aside, Manifest, Progress, read_manifest
from tidelog.model.run import decode_row, encode_row
from tidelog.sinks.base import AsideSink

__all__ = ["late_manifests", "read_aside", "set_aside"]


def late_manifests(log: Log, pipeline: str, epoch: int) -> dict[str, list[str]]:
    """The keys of manifests that were recorded under an epoch or later, by ``manifest_folder``."""
    found: dict[str, list[str]] = {}
    folder = layout.manifests(pipeline)
    for info in log.store.list(folder, start_after=f"{folder}{epoch:010}"):
        found.setdefault(layout.folder_of_manifest(info.key), []).append(info.key)
    return found


def set_aside(
    log: Log, pipeline: str, partition: str, head: Progress, keys: Iterable[str], sink: AsideSink
) -> list[Aside]:
    """All steps for the manifests of an adopted source partition that has no decided range."""
    left = set(keys)
    for known in read_commit_rows(log, pipeline, partition) if left else ():
        left -= {known.committed.manifest, known.committed.rewrite, *known.committed.replaced}
    done: list[Aside] = []
    for name, manifest in _forgotten(log, left, head):
        files = sink.published(manifest)
        if not files:
            continue
        record = Aside(
            partition=partition,
            start=manifest.start,
            end=manifest.end,
            events=sum(file.events for file in files if file.kind == "data"),
            files=tuple(sink.aside(file, name) for file in files),
            at_ms=log.clock.now_ms(),
        )
        where = layout.pipeline_shards(pipeline)
        row = Put(layout.aside_row(name), encode_row(record))
        log.catalog.write(where, row, write_id=log.ids.new())
        sink.set_aside(files, name)
        done.append(record)
    return done


def read_aside(log: Log, pipeline: str) -> list[Aside]:
    """The ranges of a pipeline that were set aside."""
    rows = log.catalog.scan(layout.pipeline_shards(pipeline), layout.aside_row(""), "aside0")
    return [decode_row(row.value, Aside, f"row `{row.row}`") for row in rows]


def _forgotten(log: Log, keys: Iterable[str], head: Progress) -> Iterator[tuple[str, Manifest]]:
    """The manifests of ranges from the head's ordinal on, each with a name; also merged ones'."""
    for key in sorted(keys):
        found = _read(log, key)
        name = key.rpartition("/")[2].removesuffix(".json")
        if found is None:
            continue
        for number, manifest in enumerate(found.parts):
            if manifest.ordinal >= head.ordinal:
                yield f"{name}-{number:04}" if found.ranges else name, manifest


def _read(log: Log, key: str) -> Manifest | None:
    """A manifest; None for one that a sweep has deleted, or that is damaged."""
    with contextlib.suppress(NotFoundError, CorruptError):
        return read_manifest(log.store.get(key), key)
    return None
