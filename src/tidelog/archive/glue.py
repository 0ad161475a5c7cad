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
erased events. The next file in its folder adds it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from tidelog.archive.table_files import Table, TableAddition, TableFile, TablePlan, Through
from tidelog.archive.table_files import object_url as url_of
from tidelog.codec.formats.raw_columns import count_rows
from tidelog.connectors.files.objects import opened
from tidelog.errors import ConflictError, InvalidError, UnavailableError
from tidelog.store.base import ObjectInfo, Store

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


class GlueTable:
    """One table of a Glue database."""

    def __init__(
        self, plan: TablePlan, name: str, store: Store, environ: Mapping[str, str]
    ) -> None:
        self.where = name
        self._database, _, self._name = name.rpartition(".")
        self._plan = plan
        self._store = store
        self._environ = environ
        self._known: Any = None  # the client
        self._table: dict[str, Any] | None = None
        self._through: Through | None = None

    @property
    def holds_another(self) -> bool:
        return self._plan.is_of_another(self._through)

    def through(self, lanes: list[str]) -> Mapping[str, int] | None:
        with self._translate_errors():
            self._table = self._read()
        self._through = self._state(self._table)
        if self._through is None or self.holds_another:
            return None
        return self._through.lanes

    def add(self, addition: TableAddition) -> None:
        same = self._through is not None and not self.holds_another
        after = self._plan.after(self._through, addition)
        with self._translate_errors():
            table = self._table or self._create(addition.files)
            keys = [each["Name"] for each in table.get("PartitionKeys", ())]
            found, root = self._locations(keys, addition.files)
            location = table["StorageDescriptor"]["Location"]
            if addition.files:
                if same and location.startswith(self._url("")) and location != self._url(root):
                    raise self._many_topics(2)
                location = self._url(root)
            if keys:
                self._put_partitions(table, found, is_all=not same)
            self._update(table, after, location)

    def change(self, files: list[TableFile]) -> bool:
        """Drops the partitions of folders whose files have no events left."""
        with self._translate_errors():
            table = self._read() if any(not file.entry.events for file in files) else None
            keys = [each["Name"] for each in (table or {}).get("PartitionKeys", ())]
            if not keys:
                return False
            empty = [file for file in files if not file.entry.events]
            found, _ = self._locations(keys, empty)
            listed = self._partitions()
            gone = [
                values
                for values, location in found.items()
                if listed.get(values) == location and self._is_empty(location)
            ]
            self._delete(gone)
            return bool(gone)

    def lists(self, paths: list[str]) -> list[str]:
        """Returns none: it lists folders, and files that were set aside are in none of them."""
        return []

    def forget(self, generation: int) -> bool:
        """Moves or drops partitions in the folder of a generation; ``add`` has left none there.

        A register that stalled during a promote may have created them since.
        """
        old = url_of(self._plan.archive.store, f"{self._plan.archive.folder(generation)}/")
        with self._translate_errors():
            table = self._read()
            if table is None or not table.get("PartitionKeys"):
                return False
            found = {values: at for values, at in self._partitions().items() if at.startswith(old)}
            left = {values: self._url(at.removeprefix(old)) for values, at in found.items()}
            gone = [values for values, location in left.items() if self._is_empty(location)]
            wanted = {values: at for values, at in left.items() if values not in gone}
            self._put_partitions(table, wanted, is_all=False)
            self._delete(gone)
            return bool(found)

    def stale(self, files: list[TableFile]) -> list[str]:
        """Returns none: it knows no sizes and counts of files."""
        return []

    # Partitions.

    def _locations(
        self, keys: Sequence[str], files: Sequence[TableFile]
    ) -> tuple[_Partitions, str]:
        """Returns the folders of files by partition values, and the folder of all of them."""
        found: _Partitions = {}
        roots = {file.path.split("/")[0] for file in files}
        if len(roots) > 1:
            raise self._many_topics(len(roots))
        for file in files:
            parts = file.path.split("/")[:-1]
            named = [number for number, part in enumerate(parts) if part.split("=")[0] in keys]
            folder = "/".join(parts[: max(named, default=0) + 1])
            values = tuple(file.values.get(key, "") for key in keys)
            found[values] = self._url(folder)
        return found, next(iter(roots), "")

    def _many_topics(self, count: int) -> InvalidError:
        return InvalidError(
            f"table `glue:{self.where}`: the archive has files of {count} topics, and a folder of "
            "a date holds one: create an archive for each topic"
        )

    def _put_partitions(self, table: dict[str, Any], wanted: _Partitions, *, is_all: bool) -> None:
        """Step 2."""
        listed = self._partitions()
        new = [each for each in wanted.items() if each[0] not in listed]
        moved = [each for each in wanted.items() if listed.get(each[0], each[1]) != each[1]]
        for some in _lots(new, _CREATED_AT_ONCE):
            given = [_partition(table, values, location) for values, location in some]
            self._call("batch_create_partition", PartitionInputList=given)
        for values, location in moved:
            given_one = _partition(table, values, location)
            self._call(
                "update_partition", PartitionValueList=list(values), PartitionInput=given_one
            )
        if is_all:
            self._delete([values for values in listed if values not in wanted])

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

    def _state(self, table: dict[str, Any] | None) -> Through | None:
        """Returns how far the table is. Raises ``InvalidError`` for one that is not ours."""
        if table is None:
            return None
        said = table.get("Parameters", {}).get(_STATE, "{}")
        return self._plan.read_through(said, f"table `glue:{self.where}`")

    def _create(self, files: list[TableFile]) -> dict[str, Any]:
        """Step 1."""
        keys = self._plan.partition_fields(files)
        archive = self._plan.archive
        first = Through(archive.incarnation, archive.generation, {}, self._plan.home)
        _, root = self._locations([], files)
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
                raise InvalidError(
                    f"table `glue:{self.where}`: Glue has no database `{self._database}`: create it"
                ) from exc
            if _code(exc) == "AlreadyExistsException":
                raise ConflictError(f"table `glue:{self.where}`: another made it first") from exc
            raise
        return table

    def _update(self, table: dict[str, Any], after: Through, location: str) -> None:
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
