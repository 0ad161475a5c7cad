"""A table of an archive's files in the AWS Glue catalog, as Hive, Athena and Trino read it.

The table names folders, not files: one partition for each folder that is named as Hive does
(``dt=2026-11-15``). Readers list these folders, so they see the archive's files and nothing else
that is there: readers skip names that begin with ``_``. The table's parameters say how far it is.

Glue has no transactions over partitions. Steps of ``add``, each of which may be repeated:

1. create the table                                     → crash: an empty table
2. create the partitions of new folders; of another
   generation: also move those that are there, and drop
   those that it does not have                          → crash: the next call does the rest
3. put how far the table is into its parameters, by its
   version

A partition whose files an erasure has emptied is dropped (``change``): its name may come from the
erased events. The next file in its folder adds it again. That file may arrive while the partition
is dropped, and a register may have found the partition just before: so ``change`` looks at the
folder again after the drop.

A register that stalls during a promote may move partitions back to the old generation. It then
fails at step 3, and corrects them; after a crash the next ``add`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from tidelog.archive.read import count_rows
from tidelog.archive.table_files import (
    CatalogTable,
    Table,
    TableAddition,
    TableFile,
    TablePlan,
    TablePosition,
    date_of,
)
from tidelog.archive.table_files import object_url as url_of
from tidelog.errors import ConflictError, InvalidError, UnavailableError
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.fetch import opened

try:
    from botocore import exceptions as sdk

    from tidelog.aws_session import aws_session
except ImportError as exc:
    raise InvalidError("glue tables are not installed: pip install 'tidelog[aws]'") from exc

__all__ = ["GlueTable"]

_STATE = "tidelog.through"
_CREATED_AT_ONCE = 100  # Glue's own limits
_DELETED_AT_ONCE = 25
_HIVE = "org.apache.hadoop.hive.ql.io.parquet"
_FORMATS = {
    "InputFormat": f"{_HIVE}.MapredParquetInputFormat",
    "OutputFormat": f"{_HIVE}.MapredParquetOutputFormat",
    "SerdeInfo": {"SerializationLibrary": f"{_HIVE}.serde.ParquetHiveSerDe"},
}
_CONFLICTS = ("ConcurrentModificationException", "VersionMismatchException")

_Partitions = dict[tuple[str, ...], str]
"""Locations of partitions, by their values."""


class GlueTable(CatalogTable[dict[str, Any]]):
    """One table of a Glue database."""

    def __init__(
        self, plan: TablePlan, name: str, store: Store, environ: Mapping[str, str]
    ) -> None:
        super().__init__(plan)
        self.where = name
        self._database, _, self._name = name.rpartition(".")
        self._store = store
        self._environ = environ
        self._known: Any = None  # the client

    def check(self, files: Iterable[TableFile]) -> None:
        """Raises ``InvalidError`` for folders that no partition would show, and without a database.

        Partitions of another generation do not count: ``add`` moves them.
        """
        every = list(files)
        with self._translate_errors():
            self._check_database()
            self._table = self._read()
            self._root(every)
            if every:
                self._check_dates(
                    self._wanted(self._keys(every), [file for file in every if file.entry.events])
                )

    def add(self, addition: TableAddition) -> None:
        same = self._through is not None and not self.holds_another
        after = self._plan.after(self._through, addition)
        with self._translate_errors():
            files = [file for file in addition.files if file.entry.events]  # others were erased
            keys = self._keys(addition.files)
            found, root = self._wanted(keys, files), self._root(addition.files)
            table = self._with_columns(self._table or self._create(addition.files))
            location = table["StorageDescriptor"]["Location"]
            if addition.files:
                if same and location.startswith(self._url("")) and location != self._url(root):
                    raise self._many_topics(2)
                location = self._url(root)
            if keys:
                self._put_partitions(table, found, is_all=not same)
            try:
                self._update(table, after, location)
            except sdk.ClientError as exc:
                if keys and _code(exc) in _CONFLICTS:
                    self._move_others(self._read())
                raise

    def change(self, files: list[TableFile]) -> bool:
        """Drops the partitions of folders whose files have no events left.

        Returns whether there was something to change; the caller repeats it until there is not.
        """
        with self._translate_errors():
            table = self._read() if any(not file.entry.events for file in files) else None
            keys = _keys(table or {})
            if table is None or not keys:
                return False
            empty = [file for file in files if not file.entry.events]
            listed, is_ours = self._partitions(), not self._plan.is_of_another(self._state(table))
            gone: list[tuple[str, ...]] = []
            back: _Partitions = {}
            for values, location in dict.fromkeys(self._locations(keys, empty)):
                if listed.get(values) == location and self._is_empty(location):
                    gone.append(values)
                elif is_ours and values not in listed and not self._is_empty(location):
                    back[values] = location  # a file arrived while it was dropped
            self._delete(gone)
            self._put_partitions(table, back, is_all=False)
            return bool(gone or back)

    def paths(self) -> list[str]:
        """Returns none: it lists folders, and files that were set aside are in none of them."""
        return []

    def count(self) -> None:
        """Returns None: it lists folders."""

    def forget(self, generation: int) -> bool:
        """Moves or drops partitions in the folder of a generation; ``add`` has left none there.

        A register that stalled during a promote may have created them since.
        """
        archive = self._plan.archive
        old = url_of(archive.store, f"{archive.folder(generation)}/")
        with self._translate_errors():
            return self._move(self._read(), lambda at: at.startswith(old))

    def stale(self, files: list[TableFile]) -> list[str]:
        """Returns none: it knows no sizes and counts of files."""
        return []

    def outside(self) -> list[str]:
        """Returns none: its partitions are folders of the generation."""
        return []

    # Partitions.

    def _keys(self, files: list[TableFile]) -> list[str]:
        """Returns the names of the table's partition keys, also before it is created."""
        if self._table is not None:
            return _keys(self._table)
        return [_column(each)["Name"] for each in self._plan.partition_fields(files)]

    def _root(self, files: Sequence[TableFile]) -> str:
        """Returns the folder of all these files: that of their topic."""
        roots = {file.path.split("/")[0] for file in files}
        if len(roots) > 1:
            raise self._many_topics(len(roots))
        return next(iter(roots), "")

    def _locations(
        self, keys: Sequence[str], files: Sequence[TableFile]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields the partition values of files with their folders; without files outside of any."""
        for file in files:
            parts = file.path.split("/")[:-1]
            names = [part.split("=")[0].lower() for part in parts]
            given = {name.lower(): value for name, value in file.values.items()}
            if all(key in given for key in keys):
                last = max((number for number, name in enumerate(names) if name in keys), default=0)
                yield tuple(given[key] for key in keys), self._url("/".join(parts[: last + 1]))

    def _wanted(self, keys: Sequence[str], files: Sequence[TableFile]) -> _Partitions:
        """Returns the folders of files by partition values.

        Raises ``InvalidError`` for a file that no partition would show: a partition is one folder.
        """
        found: _Partitions = {}
        for file in files:
            values, location = next(self._locations(keys, [file]), ((), ""))
            if found.setdefault(values, location) != location or (keys and not location):
                raise self._not_shown(file.path)
        return found

    def _not_shown(self, path: str) -> InvalidError:
        return InvalidError(
            f"table `glue:{self.where}`: a partition is one folder, and the folder of `{path}` "
            "has no date of its own, or shares it with another folder: register the archive as a "
            "Delta or an Iceberg table, or write its folders again without `split`"
        )

    def _many_topics(self, count: int) -> InvalidError:
        return InvalidError(
            f"table `glue:{self.where}`: the archive has files of {count} topics, and a folder of "
            "a date holds one: create an archive for each topic"
        )

    def _put_partitions(self, table: dict[str, Any], wanted: _Partitions, *, is_all: bool) -> None:
        """Step 2."""
        if not wanted and not is_all:
            return
        listed = self._partitions()
        own = self._url("")
        for values, location in wanted.items():
            if listed.get(values, location) != location and listed[values].startswith(own):
                raise self._not_shown(location.removeprefix(own))
        new = [each for each in wanted.items() if each[0] not in listed]
        moved = [each for each in wanted.items() if listed.get(each[0], each[1]) != each[1]]
        for some in _lots(new, _CREATED_AT_ONCE):
            given = [_partition(table, values, location) for values, location in some]
            self._call("batch_create_partition", PartitionInputList=given)
        for values, location in moved:
            self._move_partition(table, values, location)
        if is_all:
            self._delete([values for values in listed if values not in wanted])
        elif any(not at.startswith(own) for at in listed.values()):
            self._move_others(table)

    def _move_others(self, table: dict[str, Any] | None) -> None:
        """Moves or drops partitions in folders of generations that the table does not have."""
        state = self._state(table)
        if state is not None:
            archive = msgspec.structs.replace(self._plan.archive, generation=state.generation)
            plan = replace(self._plan, archive=archive)
            present = GlueTable(plan, self.where, self._store, self._environ)
            present._move(table, lambda at: not at.startswith(present._url("")))

    def _move(self, table: dict[str, Any] | None, is_moved: Callable[[str], bool]) -> bool:
        """Moves partitions from folders of other generations to this one's, or drops them."""
        if table is None or not table.get("PartitionKeys"):
            return False
        root = url_of(self._plan.archive.store, f"{self._plan.archive.root}/")
        left = {
            values: self._url(at.removeprefix(root).partition("/")[2])
            for values, at in self._partitions().items()
            if at.startswith(root) and is_moved(at)
        }
        gone = [values for values, location in left.items() if self._is_empty(location)]
        for values, location in left.items():
            if values not in gone:
                self._move_partition(table, values, location)
        self._delete(gone)
        return bool(left)

    def _move_partition(
        self, table: dict[str, Any], values: tuple[str, ...], location: str
    ) -> None:
        given = _partition(table, values, location)
        self._call("update_partition", PartitionValueList=list(values), PartitionInput=given)

    def _delete(self, gone: Sequence[tuple[str, ...]]) -> None:
        for some in _lots(gone, _DELETED_AT_ONCE):
            given = [{"Values": list(values)} for values in some]
            self._call("batch_delete_partition", PartitionsToDelete=given)

    def _partitions(self) -> _Partitions:
        pages = self._client().get_paginator("get_partitions")
        where = {"DatabaseName": self._database, "TableName": self._name}
        return {
            tuple(each["Values"]): each["StorageDescriptor"]["Location"]
            for page in pages.paginate(**where)
            for each in page["Partitions"]
        }

    def _is_empty(self, location: str) -> bool:
        """Returns whether no file of a folder has an event."""
        root = self._url("")
        folder = f"{self._plan.archive.folder()}/{location.removeprefix(root)}/"
        return not any(
            self._count(info) for info in self._store.list(folder) if info.key.endswith(".parquet")
        )

    def _count(self, info: ObjectInfo) -> int:
        with opened(self._store, info.key, info.size) as data:
            return count_rows("parquet", data, f"archive file `{info.key}`")

    # The table itself.

    def _read(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._client().get_table(
                DatabaseName=self._database, Name=self._name
            )["Table"]
        except sdk.ClientError as exc:
            if _code(exc) != "EntityNotFoundException":
                raise
            return None
        return found

    def _check_dates(self, wanted: _Partitions) -> None:
        for number, key in enumerate((self._table or {}).get("PartitionKeys", ())):
            for values in wanted if key["Type"] == "date" else ():
                date_of(values[number], f"table `glue:{self.where}`", key["Name"])

    def _check_database(self) -> None:
        try:
            self._client().get_database(Name=self._database)
        except sdk.ClientError as exc:
            if _code(exc) == "EntityNotFoundException":
                raise self._no_database() from exc
            if _code(exc) != "AccessDeniedException":  # tables may be allowed all the same
                raise

    def _no_database(self) -> InvalidError:
        return InvalidError(
            f"table `glue:{self.where}`: Glue has no database `{self._database}`: create it"
        )

    def _state(self, table: dict[str, Any] | None) -> TablePosition | None:
        """Returns how far the table is. Raises ``InvalidError`` for one that is not ours."""
        if table is None:
            return None
        said = table.get("Parameters", {}).get(_STATE, "{}")
        return self._plan.read_through(said, f"table `glue:{self.where}`")

    def _create(self, files: list[TableFile]) -> dict[str, Any]:
        """Step 1."""
        keys = self._plan.partition_fields(files)
        archive = self._plan.archive
        first = TablePosition(archive.incarnation, archive.generation, {}, self._plan.home)
        root = self._root(files)
        table: dict[str, Any] = {
            "Name": self._name,
            "TableType": "EXTERNAL_TABLE",
            "PartitionKeys": [_column(each) for each in keys],
            "StorageDescriptor": {
                "Columns": [_column(each) for each in self._plan.columns],
                "Location": self._url(root),
                **_FORMATS,
            },
            "Parameters": {
                "EXTERNAL": "TRUE",
                "classification": "parquet",
                _STATE: msgspec.json.encode(first).decode(),
            },
        }
        try:
            self._client().create_table(DatabaseName=self._database, TableInput=table)
        except sdk.ClientError as exc:
            if _code(exc) == "EntityNotFoundException":
                raise self._no_database() from exc
            if _code(exc) == "AlreadyExistsException":
                raise ConflictError(f"table `glue:{self.where}`: another made it first") from exc
            raise
        return table

    def _with_columns(self, table: dict[str, Any]) -> dict[str, Any]:
        """Returns a table with the columns of this generation; keys stay as they are."""
        keys = _keys(table)
        columns = [_column(each) for each in self._plan.columns if each.name.lower() not in keys]
        return {**table, "StorageDescriptor": {**table["StorageDescriptor"], "Columns": columns}}

    def _update(self, table: dict[str, Any], after: TablePosition, location: str) -> None:
        """Step 3."""
        storage = {**table["StorageDescriptor"], "Location": location}
        parameters = {**table["Parameters"], _STATE: msgspec.json.encode(after).decode()}
        given = {
            "Name": self._name,
            "TableType": table.get("TableType", "EXTERNAL_TABLE"),
            "PartitionKeys": table.get("PartitionKeys", []),
            "StorageDescriptor": storage,
            "Parameters": parameters,
        }
        version = {"VersionId": table["VersionId"]} if table.get("VersionId") else {}
        self._client().update_table(DatabaseName=self._database, TableInput=given, **version)

    def _call(self, method: str, **given: Any) -> None:
        """Calls Glue for some partitions; one that is there, or gone, is what was wanted."""
        found = getattr(self._client(), method)(
            DatabaseName=self._database, TableName=self._name, **given
        )
        fine = ("AlreadyExistsException", "EntityNotFoundException")
        for error in found.get("Errors", ()):
            said = error["ErrorDetail"]
            if said["ErrorCode"] not in fine:
                raise UnavailableError(
                    f"table `glue:{self.where}`: {said['ErrorCode']}: {said['ErrorMessage']}"
                )

    def _url(self, folder: str) -> str:
        path = f"{self._plan.archive.folder()}/{folder}"
        return url_of(self._plan.archive.store, path)

    def _client(self) -> Any:
        if self._known is None:
            environ = self._environ
            endpoint = environ.get("AWS_ENDPOINT_URL_GLUE") or environ.get("AWS_ENDPOINT_URL")
            region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
            self._known = aws_session().client("glue", region_name=region, endpoint_url=endpoint)
        return self._known

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sdk.ClientError as exc:
            if _code(exc) in _CONFLICTS:
                raise ConflictError(
                    f"table `glue:{self.where}`: another change came first"
                ) from exc
            if _code(exc) in ("AccessDeniedException", "UnrecognizedClientException"):
                raise InvalidError(
                    f"table `glue:{self.where}`: {exc}: check the credentials and their rights"
                ) from exc
            raise UnavailableError(f"table `glue:{self.where}`: {exc}: try again") from exc
        except sdk.BotoCoreError as exc:
            raise UnavailableError(f"table `glue:{self.where}`: {exc}: try again") from exc


_T = TypeVar("_T")


def _lots(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _code(exc: sdk.ClientError) -> str:
    return str(exc.response["Error"].get("Code"))


def _partition(table: dict[str, Any], values: tuple[str, ...], location: str) -> dict[str, Any]:
    storage = {**table["StorageDescriptor"], "Location": location}
    return {"Values": list(values), "StorageDescriptor": storage}


def _keys(table: Mapping[str, Any]) -> list[str]:
    return [each["Name"] for each in table.get("PartitionKeys", ())]


def _column(field: pa.Field) -> dict[str, str]:
    return {"Name": field.name.lower(), "Type": _hive_type(field.type)}


_PLAIN = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float32, "float"),
    (pa.types.is_floating, "double"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_date, "date"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_large_binary, "binary"),
)


def _hive_type(kind: pa.DataType) -> str:
    """Returns Hive's name of a type; what it does not know is read as text."""
    for is_kind, name in _PLAIN:
        if is_kind(kind):
            return name
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"map<{_hive_type(kind.key_type)},{_hive_type(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{_hive_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return f"struct<{','.join(f'{each.name}:{_hive_type(each.type)}' for each in fields)}>"
    return "string"


_: type[Table] = GlueTable
