"""Bugs planted into how drivers begin files, and into chains of archives of files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidelog.archive import fill_files
from tidelog.archive.fill import FillSource
from tidelog.archive.fill_files import FillFilesSource
from tidelog.connectors.files.source import FilesSource
from tidelog.pipeline import source_partitions
from tidelog.pipeline.source_partitions import TrackedPartitions

__all__ = [
    "chain_names_files_itself",
    "file_is_known_when_it_is_read",
    "list_has_no_version",
    "names_mean_the_same_everywhere",
]

Patch = pytest.MonkeyPatch


def list_has_no_version(patch: Patch) -> None:
    """A driver begins what is new to it, whatever another one has begun meanwhile."""

    def add(self: TrackedPartitions, partition: Any) -> None:
        self._cycle._list(partition)

    patch.setattr(TrackedPartitions, "_add", add)
    patch.setattr(source_partitions, "renew_listing", lambda *_: None)


def file_is_known_when_it_is_read(patch: Patch) -> None:
    """Nothing identifies a file of which no rows were read, other than its name."""
    row_bounds = FilesSource._row_bounds

    def unidentified(self: FilesSource, store: Any, partition: Any, info: Any) -> Any:
        found = row_bounds(self, store, partition, info)
        self._tracking._renewed.pop(partition, None)
        return replace(found, identity=b"")

    patch.setattr(FilesSource, "_row_bounds", unidentified)


def names_mean_the_same_everywhere(patch: Patch) -> None:
    """A chain is built of another archive of the same files as if it had named them alike."""
    patch.setattr(fill_files, "FillOtherNamesSource", FillSource)


def chain_names_files_itself(patch: Patch) -> None:
    """A chain that is built of the files goes by their paths, not by the names its source gave."""

    class ByPath(FillFilesSource):
        def __init__(self, context: Any, archive: Any, number: int, source: Any, _: str) -> None:
            super().__init__(context, archive, number, source, "")

    patch.setattr(fill_files, "FillFilesSource", ByPath)
