"""Bugs planted into how drivers begin files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidelog.connectors.files.source import FilesSource
from tidelog.pipeline import source_partitions
from tidelog.pipeline.source_partitions import TrackedPartitions

__all__ = ["file_is_known_when_it_is_read", "list_has_no_version"]

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
