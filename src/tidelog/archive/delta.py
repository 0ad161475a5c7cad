"""An archive's files as a Delta table, with its log in the folder of the generation.

Each lane is an application of the Delta protocol: a commit that adds its files also sets its
transaction version to the ordinal it reached. The protocol refuses a commit if another process has
moved the application since the table was read.

Statistics have only offsets and times, so that no value of an event is in the log. A property of
the table says so: without it, deltalake takes a missing statistic for a null, and a reader that
filters by such a column gets no rows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

import pyarrow as pa

from tidelog.archive.table_files import (
    Table,
    TableAddition,
    TableFile,
    TablePlan,
    delta_options,
    object_url,
)
from tidelog.clock import Clock
from tidelog.errors import ConflictError, InvalidError, TidelogError, UnavailableError
from tidelog.model.event import to_iso

try:
    from deltalake import DeltaTable, Schema
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.transaction import AddAction, CommitProperties, Transaction
except ImportError as exc:
    raise InvalidError("delta tables are not installed: pip install 'tidelog[tables]'") from exc

__all__ = ["DeltaLog"]

_STATS_OF = ("offset", "timestamp")  # fields of events with statistics
_STATS_COLUMNS = "delta.dataSkippingStatsColumns"


class DeltaLog:
    """One Delta table."""

    def __init__(self, plan: TablePlan, environ: Mapping[str, str], clock: Clock) -> None:
        store = plan.archive.store
        self.where = object_url(store, plan.archive.folder())
        self._plan = plan
        self._clock = clock
        self._options = delta_options(store, environ)
        self._table: DeltaTable | None = None

    @property
    def holds_another(self) -> bool:
        """Returns False: each generation's folder has its own log."""
        return False

    def through(self, lanes: list[str]) -> Mapping[str, int]:
        with self._translate_errors():
            self._table = self._read()
            if self._table is None:
                return {}
            wanted = self._configuration()
            if not wanted.items() <= self._table.metadata().configuration.items():
                self._table.alter.set_table_properties(wanted)
                self._table = self._read()
                if self._table is None:
                    return {}
            return {lane: self._table.transaction_version(lane) or 0 for lane in lanes}

    def check(self, files: Iterable[TableFile]) -> None:
        """Accepts all files."""

    def add(self, addition: TableAddition) -> None:
        with self._translate_errors():
            table = self._table or self._create(addition.files)
            columns = table.metadata().partition_columns
            table.create_write_transaction(
                [self._action(file, columns) for file in addition.files],
                "append",
                table.schema(),
                columns,
                commit_properties=CommitProperties(
                    app_transactions=[
                        Transaction(lane, end) for lane, end in addition.through.items()
                    ]
                ),
            )

    def change(self, files: list[TableFile]) -> bool:
        """Adds the paths again: an ``add`` of a listed path replaces the earlier one."""
        with self._translate_errors():
            table = self._read() if files else None
            stale = [] if table is None else _stale(table, files)
            if table is not None and stale:
                columns = table.metadata().partition_columns
                actions = [self._action(file, columns) for file in stale]
                table.create_write_transaction([*actions], "append", table.schema(), columns)
            return bool(stale)

    def paths(self) -> list[str]:
        with self._translate_errors():
            table = self._read()
            return [] if table is None else sorted(_paths(table))

    def count(self) -> int:
        with self._translate_errors():
            table = self._read()
            return 0 if table is None else len(_paths(table))

    def forget(self, generation: int) -> bool:
        """Does nothing: its log is in the folder of the generation, and is deleted with it."""
        return False

    def stale(self, files: list[TableFile]) -> list[str]:
        with self._translate_errors():
            table = self._read() if files else None
            return [] if table is None else [file.path for file in _stale(table, files)]

    def outside(self) -> list[str]:
        """Returns none: its log and what others write are in the folder of the generation."""
        return []

    def _read(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.where, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _create(self, files: list[TableFile]) -> DeltaTable:
        more = self._plan.partition_fields(files)
        fields = [_in_microseconds(each) for each in [*self._plan.columns, *more]]
        try:
            return DeltaTable.create(
                self.where,
                Schema.from_arrow(pa.schema(fields)),
                mode="error",
                partition_by=[each.name for each in more],
                name=self._plan.archive.name,
                configuration=dict(self._configuration()),
                storage_options=self._options,
            )
        except DeltaError as exc:
            if self._read() is None:
                raise
            raise ConflictError(f"delta table `{self.where}`: another made it first") from exc

    def _action(self, file: TableFile, columns: list[str]) -> AddAction:
        return AddAction(
            path=file.path,
            size=file.entry.size,
            partition_values={name: file.values.get(name) for name in columns},
            modification_time=self._clock.now_ms(),
            data_change=True,
            stats=json.dumps(self._stats(file)),
        )

    def _stats(self, file: TableFile) -> dict[str, object]:
        """Returns the statistics by which readers skip a file."""
        least = {"offset": file.entry.first_offset, "timestamp": to_iso(file.entry.first_ms)}
        most = {"offset": file.entry.last_offset, "timestamp": to_iso(file.entry.last_ms)}
        names = self._stats_columns
        count: dict[str, object] = {"numRecords": file.entry.events}
        if not names:
            return count
        return count | {
            "minValues": {name: least[event] for event, name in names.items()},
            "maxValues": {name: most[event] for event, name in names.items()},
            "nullCount": dict.fromkeys(names.values(), 0),
        }

    @property
    def _stats_columns(self) -> dict[str, str]:
        """Returns the columns with statistics, by the field of events that they have."""
        plan = self._plan
        names = {event: plan.names[event] for event in _STATS_OF if event in plan.names}
        return {event: name for event, name in names.items() if name in plan.columns.names}

    def _configuration(self) -> dict[str, str]:
        """Returns the properties that the table needs."""
        columns = ",".join(self._stats_columns.values())
        return {_STATS_COLUMNS: columns} if columns else {}

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except CommitFailedError as exc:
            raise ConflictError(f"delta table `{self.where}`: another commit came first") from exc
        except TidelogError:
            raise
        except Exception as exc:  # the library also raises errors without a type of their own
            raise UnavailableError(
                f"delta table `{self.where}`: {_gist(exc)}: try again, and check its store"
            ) from exc


def _paths(table: DeltaTable) -> list[str]:
    """Returns the paths that a table lists, in the order of its entries."""
    return [unquote(path) for path in table.get_add_actions().column("path").to_pylist()]


def _stale(table: DeltaTable, files: list[TableFile]) -> list[TableFile]:
    """Returns the files that a table lists with a wrong size or count."""
    added = table.get_add_actions()
    listed = zip(
        _paths(table),
        added.column("size_bytes").to_pylist(),
        added.column("num_records").to_pylist(),
        strict=True,
    )
    known = {path: (size, events) for path, size, events in listed}
    return [
        file
        for file in files
        if known.get(file.path) not in (None, (file.entry.size, file.entry.events))
    ]


def _in_microseconds(field: pa.Field) -> pa.Field:
    """Returns the field with Delta's only unit of time; files may have milliseconds."""
    if pa.types.is_timestamp(field.type):
        return field.with_type(pa.timestamp("us", field.type.tz))
    return field


def _gist(exc: Exception) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__


_: type[Table] = DeltaLog
