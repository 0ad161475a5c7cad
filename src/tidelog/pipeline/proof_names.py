"""Names that are made of events: of folders, of files, and in the manifests that list them.

A parser such as ``split:user`` names a folder by a field of the events in it. A folder that still
has a file with events has its name from these. One whose events were all erased is named by an
erased event; so are the manifests that list its files, those before the erasure too. Which parts of
a folder's name are no times is in the entry of each file (``FileEntry.named``): the parser of the
archive does not say it, since a replay may have had another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tidelog.errors import CorruptError, NotFoundError
from tidelog.home import Home
from tidelog.log.archives import read_commit_rows, read_partitions
from tidelog.log.base import Log
from tidelog.log.replays import counting_files, replay_pipeline
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest, read_manifest
from tidelog.pipeline.known_objects import folder_values
from tidelog.pipeline.sought import Sought
from tidelog.store.base import Store

__all__ = ["ManifestNames", "erases", "files_named_by_events", "is_named_by_events"]

_MANIFESTS = "pipelines/"


class ManifestNames:
    """Looks for what is sought in the names that manifests list."""

    def __init__(self, home: Home, sought: Sought) -> None:
        self._home = home
        self._sought = sought
        self._living: dict[str, tuple[str, frozenset[str]]] = {}  # by pipeline: folder, living
        self._needed: set[str] = set()

    def note(self, archive: Archive, generation: int, living: Collection[str]) -> None:
        """Note a generation that was searched, and its folders that have events."""
        pipeline = archive.pipeline(generation)
        for each in (pipeline, replay_pipeline(pipeline)):
            self._living[each] = (f"{archive.folder(generation)}/", frozenset(living))
            for partition in read_partitions(self._home.log, each):
                for row in read_commit_rows(self._home.log, each, partition):
                    self._needed.add(row.committed.manifest)

    def is_needed(self, key: str) -> bool:
        """Whether a commit names a manifest."""
        return key in self._needed

    def names_in(self, store: Store, key: str) -> bool | None:
        """Whether a manifest lists a file in a folder that is named by what is sought.

        None for an object that is not a manifest.
        """
        if not key.startswith(_MANIFESTS):
            return None
        try:
            manifest = read_manifest(store.get(key), key)
        except NotFoundError:
            return False
        except CorruptError:
            return None
        root, living = self._living.get(key.split("/")[1], ("", frozenset()))
        return any(
            self._sought.is_in(value)
            for part in manifest.parts
            for file in part.files
            for value in folder_values(_folder(file.target, root), living)
        )


def erases(manifest: Manifest, file: FileEntry, offsets: Sequence[int]) -> bool:
    """Whether some of these offsets were taken out of a file."""
    taken = np.intersect1d(np.array(manifest.erased, np.int64), np.array(offsets, np.int64))
    return bool(((taken >= file.first_offset) & (taken <= file.last_offset)).any())


def is_named_by_events(folder: str, named: int, living: Collection[str]) -> bool:
    """Whether a part of a folder's name is a value of events that were all erased.

    ``named`` parts after the topic's are values of events, whatever parser has filled them. Each is
    such a value if no folder with events has it and all parts before it.
    """
    parts = folder.split("/")
    starts = ["/".join([*parts[: depth + 1], ""]) for depth in range(1, named + 1)]
    return any(not any(f"{each}/".startswith(own) for each in living) for own in starts)


def files_named_by_events(log: Log, archive: Archive) -> Iterator[str]:
    """Yields empty files of an archive whose folders were named by events that were all erased."""
    for generation in archive.in_state("live", "building", "kept"):
        pipeline, root = archive.pipeline(generation), f"{archive.folder(generation)}/"
        files = [
            file
            for partition in read_partitions(log, pipeline)
            for _, file in counting_files(log, pipeline, partition)
            if file.kind == "data"
        ]
        living = {_folder(file.target, root) for file in files if file.events}
        for file in files:
            is_empty = file.erased and not file.events
            if is_empty and is_named_by_events(_folder(file.target, root), file.named, living):
                yield file.target


def _folder(target: str, root: str) -> str:
    """The folder of a file below its generation's; dead letters have none that events name."""
    return target.removeprefix(root).rpartition("/")[0] if target.startswith(root) else ""
