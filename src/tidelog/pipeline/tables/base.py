"""What a table is: files of an archive, how far they go, and the columns that they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from tidelog.codec.parsers import LayoutSettings
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry

__all__ = ["Lot", "Plan", "Registered", "Table", "TableFile"]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file to be registered."""

    path: str  # below the generation's folder
    entry: FileEntry
    values: Mapping[str, str]  # of the names in its path


@dataclass(frozen=True, slots=True)
class Lot:
    """What one commit of a table adds."""

    files: list[TableFile] = field(default_factory=list)
    through: dict[str, int] = field(default_factory=dict)  # by lane: the ordinal it comes to


@dataclass(frozen=True, slots=True)
class Plan:
    """What a table is made of."""

    archive: Archive
    home: str  # id
    columns: pa.Schema  # of the files
    names: Mapping[str, str]  # what event columns are called in them, those that are kept

    def partition_fields(self, files: list[TableFile]) -> list[pa.Field]:
        """Columns for the names in folders that all these files have, and that are not in them."""
        layout = LayoutSettings(**self.archive.making().layout)
        dates = [part.removesuffix("=%Y-%m-%d") for part in layout.path_format.split("/")]
        return [
            pa.field(name, pa.date32() if name in dates else pa.string())
            for name in files[0].values
            if all(name in file.values for file in files) and name not in self.columns.names
        ]


@dataclass(frozen=True, slots=True)
class Registered:
    """What was added to one table."""

    table: str
    where: str
    files: int
    events: int


class Table(Protocol):
    """A table of one library. Each call may talk to servers: ``UnavailableError``."""

    @property
    def where(self) -> str:
        """Where readers find it."""
        ...

    def through(self, lanes: list[str]) -> Mapping[str, int] | None:
        """Up to which ordinal each of these lanes is in it, read now.

        None when it has another generation, or nothing: then one commit must bring everything,
        and replaces what is there. ``InvalidError`` for a table that is not ours.
        """
        ...

    @property
    def holds_another(self) -> bool:
        """Whether ``through`` has found files of another generation, which ``add`` replaces."""
        ...

    def add(self, lot: Lot) -> None:
        """Add files and ends in one commit, on top of what ``through`` has read.

        ``ConflictError`` when another commit came first, and when nobody can know.
        """
        ...

    def change(self, files: list[TableFile]) -> bool:
        """Correct the entries of files whose bytes have changed; skip files that it does not list.

        Returns whether there were any of another size or count. Idempotent. ``ConflictError`` as
        for ``add``.
        """
        ...

    def lists(self, paths: list[str]) -> list[str]:
        """Return those of some paths that it lists; without any, nothing is asked."""
        ...

    def forget(self, generation: int) -> bool:
        """Remove the versions of the table that name files of a generation which is dropped.

        Returns whether there were any. Idempotent. The present version names none of them.
        ``ConflictError`` as for ``add``.
        """
        ...

    def stale(self, files: list[TableFile]) -> list[str]:
        """Return the paths of files that it lists with another size or count than they have."""
        ...
