"""An archive's Parquet files as a table of Delta Lake or Iceberg: registered, never copied.

A table is named by a text: ``delta`` for one whose log stands in the folder of the generation, or
``iceberg:CATALOG#NAMESPACE.TABLE``. Each committed range is registered once. The table itself says
how far it has come in every lane (a source partition of the archive, or of the replays of its dead
letters), in the same commit that adds the files:

1. read how far the table is
2. collect files of the ranges after that
3. add them and the new ends in one commit, which fails if another has moved an end meanwhile

So dying anywhere leaves a table of whole ranges, and the next register goes on; of two at once, one
fails at step 3 and looks again. Dead letters and sidecars are no part of the table.

Folder names such as ``dt=2026-11-15`` become columns that the table is partitioned by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

import pyarrow as pa

from tidelog.codec.formats import open_format, settings_of
from tidelog.codec.formats.parquet import ParquetFormat
from tidelog.codec.parsers import LayoutSettings
from tidelog.errors import ConflictError, InvalidError, UnavailableError
from tidelog.home import Home
from tidelog.log.archives import read_manifests, read_partitions
from tidelog.log.base import Log
from tidelog.log.replays import replay_pipeline
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry

__all__ = [
    "Lot",
    "Plan",
    "Registered",
    "Table",
    "TableFile",
    "check_tables",
    "open_table",
    "register",
    "register_table",
]

_FILES_AT_ONCE = 1_000  # in one commit of a table
_ATTEMPTS = 50  # of a commit that others come before


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file to be registered."""

    key: str  # in the archive's store
    path: str  # below the generation's folder
    entry: FileEntry
    values: Mapping[str, str]  # of the names in its path


@dataclass(frozen=True, slots=True)
class Lot:
    """What one commit of a table adds."""

    files: list[TableFile] = field(default_factory=list)
    through: dict[str, int] = field(default_factory=dict)  # by lane: the ordinal it has come to


@dataclass(frozen=True, slots=True)
class Plan:
    """What a table is made of: the columns of the files, and those that folder names tell."""

    archive: Archive
    columns: pa.Schema
    names: Mapping[str, str]  # what event columns are called in the files

    def partition_fields(self, files: list[TableFile]) -> list[pa.Field]:
        """The columns of folder names that all these files have, and no column of theirs."""
        layout = LayoutSettings(**self.archive.making().layout)
        dates = [part.removesuffix("=%Y-%m-%d") for part in layout.path_format.split("/")]
        common = [
            name
            for name in (files[0].values if files else ())
            if all(name in file.values for file in files) and name not in self.columns.names
        ]
        return [pa.field(name, pa.date32() if name in dates else pa.string()) for name in common]


@dataclass(frozen=True, slots=True)
class Registered:
    """What a register added to one table."""

    table: str
    where: str
    files: int
    events: int


class Table(Protocol):
    """A table of one library."""

    @property
    def where(self) -> str:
        """Where readers find it."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the next commit must hold everything, since it replaces what is there."""
        ...

    def through(self, lanes: list[str]) -> Mapping[str, int]:
        """Up to which ordinal each of these lanes is in it, read now; 0 where nothing is."""
        ...

    def add(self, lot: Lot) -> None:
        """One commit. ``ConflictError`` when another came first, or nobody can know."""
        ...


def check_tables(archive: Archive) -> None:
    """Refuse what no table can be made of. ``InvalidError``."""
    for name in archive.tables:
        _plan(archive)
        _check_name(archive, name)


def register(home: Home, archive: Archive) -> list[Registered]:
    """Bring all tables of an archive up to its commits; for whoever has just committed some.

    Safe to kill, to repeat, and to run twice at once.
    """
    return [register_table(home, archive, name) for name in archive.tables]


def register_table(home: Home, archive: Archive, name: str) -> Registered:
    """Bring one table up to the commits of the promoted generation. ``InvalidError``."""
    table = open_table(home, archive, name)
    files = events = 0
    conflicts = 0
    while conflicts < _ATTEMPTS:
        lot = _next_lot(home.log, archive, table)
        if not lot.files:
            return Registered(name, table.where, files, events)
        try:
            table.add(lot)
        except ConflictError:
            conflicts += 1
            home.log.clock.sleep(home.log.random.random() * 0.1 * conflicts)
            continue
        files += len(lot.files)
        events += sum(file.entry.events for file in lot.files)
    raise UnavailableError(f"table `{name}`: others keep changing it: try again")


def open_table(home: Home, archive: Archive, name: str) -> Table:
    """The table that a name says, made when something is first added."""
    _check_name(archive, name)
    plan, environ = _plan(archive), home.world.environ
    if name == "delta":
        from tidelog.pipeline.delta import DeltaLog  # noqa: PLC0415 - an extra

        return DeltaLog(plan, environ, home.log.clock)
    from tidelog.pipeline.iceberg import IcebergTable  # noqa: PLC0415 - an extra

    return IcebergTable(plan, name.removeprefix("iceberg:"), environ)


def _plan(archive: Archive) -> Plan:
    making = archive.making()
    opened = open_format(making.format, making.codec or None, settings_of(making.format_settings))
    if not isinstance(opened, ParquetFormat):
        raise InvalidError(
            f"archive `{archive.name}`: its files are {making.format}, and tables are made of "
            "parquet: make a generation in that format"
        )
    return Plan(archive, opened.columns.schema, opened.columns.names)


def _check_name(archive: Archive, name: str) -> None:
    kind, _, rest = name.partition(":")
    catalog, _, table = rest.rpartition("#")
    if name != "delta" and (kind != "iceberg" or not catalog or "." not in table.strip(".")):
        raise InvalidError(
            f"archive `{archive.name}`: table `{name}`: give delta, or "
            "iceberg:CATALOG#NAMESPACE.TABLE"
        )


def _next_lot(log: Log, archive: Archive, table: Table) -> Lot:
    """Steps 1 and 2."""
    lanes = dict(_lanes(log, archive))
    through = table.through(list(lanes))
    lot, limit = Lot(), None if table.whole else _FILES_AT_ONCE
    for lane, (pipeline, partition) in lanes.items():
        for manifest in read_manifests(log, pipeline, partition, through.get(lane, 0)):
            files = [file for file in manifest.files if file.kind == "data"]
            if not files:
                continue
            lot.files.extend(_table_file(archive, file) for file in files)
            lot.through[lane] = manifest.ordinal + manifest.read
            if limit is not None and len(lot.files) >= limit:
                return lot
    return lot


def _lanes(log: Log, archive: Archive) -> Iterator[tuple[str, tuple[str, str]]]:
    own = archive.pipeline()
    for pipeline in (own, replay_pipeline(own)):
        for partition in read_partitions(log, pipeline):
            yield f"{pipeline}/{partition}", (pipeline, partition)


def _table_file(archive: Archive, entry: FileEntry) -> TableFile:
    path = entry.target.removeprefix(f"{archive.folder()}/")
    named = [part.partition("=") for part in path.split("/")[:-1]]
    values = {name: unquote(value) for name, equals, value in named if equals and name}
    return TableFile(entry.target, path, entry, values)
