"""Defines a table: the files of an archive, how far they go, and their columns.

Also translates a store's URL into the settings of the table libraries. Credentials come from the
environment, as for our own stores; without any, the libraries look for profiles and roles
themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date
from typing import Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from tidelog.codec.parsers import FolderSettings
from tidelog.errors import InvalidError
from tidelog.model.address import Address, parse_address
from tidelog.model.archive import Archive
from tidelog.model.decoding import decode_json
from tidelog.model.pipeline import FileEntry

__all__ = [
    "CatalogTable",
    "RegisterResult",
    "Table",
    "TableAddition",
    "TableFile",
    "TablePlan",
    "TablePosition",
    "date_of",
    "delta_options",
    "iceberg_properties",
    "object_url",
]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file to register."""

    path: str  # below the generation's folder
    entry: FileEntry
    values: Mapping[str, str]  # of the names in its path


@dataclass(frozen=True, slots=True)
class TableAddition:
    """What one commit of a table adds."""

    files: list[TableFile] = field(default_factory=list)
    through: dict[str, int] = field(default_factory=dict)  # by lane: the ordinal after it


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What a table is made of."""

    archive: Archive
    home: str  # id
    columns: pa.Schema  # of the files
    names: Mapping[str, str]  # the names of event columns in them, if kept

    def partition_fields(self, files: list[TableFile]) -> list[pa.Field]:
        """Returns columns for folder names that all these files have, but do not contain.

        Delta, Hive and many readers of Iceberg do not distinguish capital letters in names.
        """
        known = {name.lower() for name in self.columns.names}
        layout = FolderSettings(**self.archive.format_of().layout)
        dates = [part.removesuffix("=%Y-%m-%d") for part in layout.path_format.split("/")]
        return [
            pa.field(name, pa.date32() if name in dates else pa.string())
            for name in files[0].values
            if all(name in file.values for file in files) and name.lower() not in known
        ]

    def read_through(self, said: str, what: str) -> TablePosition:
        """Returns how far a table is, from its property.

        Raises ``InvalidError`` for a table that this archive of this home has not made.
        """
        try:
            found = decode_json(said, TablePosition)
        except msgspec.MsgspecError as exc:
            raise InvalidError(
                f"{what}: was not made by `tidelog archive register`: give the name of another one"
            ) from exc
        if found.home != self.home:
            raise InvalidError(
                f"{what}: belongs to archive `{self.archive.name}` of home `{found.home}`, of "
                "which this home was a copy: give the name of another one"
            )
        if found.archive != self.archive.incarnation:
            raise InvalidError(
                f"{what}: belongs to another archive than `{self.archive.name}`: give the name of "
                "another one"
            )
        return found

    def is_of_another(self, known: TablePosition | None) -> bool:
        """Returns whether a table has the files of another generation."""
        return known is not None and known.generation != self.archive.generation

    def after(self, known: TablePosition | None, addition: TableAddition) -> TablePosition:
        """Returns how far a table is once it has these files."""
        lanes = {} if known is None or self.is_of_another(known) else known.lanes
        archive = self.archive
        return TablePosition(
            archive.incarnation, archive.generation, {**lanes, **addition.through}, self.home
        )


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """What was added to one table."""

    table: str
    where: str
    files_added: int  # of data; a table has no others
    events_added: int
    files_now: int | None = None  # that it lists; None: it lists folders, or was not asked


@dataclass(frozen=True, slots=True)
class TableStatus:
    """How far a table is."""

    table: str
    where: str
    is_kept: bool  # drivers bring it up to date after each cycle
    files: int  # that wait to be added
    events: int
    is_behind: bool  # it is empty, or lists files of another generation
    error: str = ""  # why it could not be read


class TablePosition(msgspec.Struct, frozen=True):
    """How far a table is, from its property."""

    archive: str  # incarnation
    generation: int
    lanes: dict[str, int]
    home: str = ""  # id


class Table(Protocol):
    """A table of one library. Each call may reach servers and raise ``UnavailableError``."""

    @property
    def where(self) -> str:
        """Returns where readers find it."""
        ...

    def through(self, lanes: list[str]) -> Mapping[str, int] | None:
        """Reads up to which ordinal each of these lanes is in it.

        Returns None if it has another generation, or nothing: then one commit must add everything,
        and replaces what is there. Raises ``InvalidError`` for a table that is not ours.
        """
        ...

    @property
    def holds_another(self) -> bool:
        """Returns whether ``through`` found files of another generation, which ``add`` replaces."""
        ...

    def check(self, files: Iterable[TableFile]) -> None:
        """Raises ``InvalidError`` if ``add`` would refuse a table of these files."""
        ...

    def add(self, addition: TableAddition) -> None:
        """Adds files and ends in one commit, based on what ``through`` read.

        Raises ``ConflictError`` if another commit came first, and if the outcome is unknown.
        """
        ...

    def change(self, files: list[TableFile]) -> bool:
        """Corrects the entries of files whose bytes changed; skips files that it does not list.

        Returns whether any had another size or count. Idempotent. Raises ``ConflictError`` like
        ``add``.
        """
        ...

    def paths(self) -> list[str]:
        """Returns the files of the generation that it lists, by their paths in its folder."""
        ...

    def count(self) -> int | None:
        """Returns how many files it lists; None if it lists folders."""
        ...

    def forget(self, generation: int) -> bool:
        """Deletes the versions of the table that name files of a dropped generation.

        Returns whether there were any. Idempotent. The current version names none of them. Raises
        ``ConflictError`` like ``add``.
        """
        ...

    def stale(self, files: list[TableFile]) -> list[str]:
        """Returns the paths of files that it lists with a wrong size or count."""
        ...

    def outside(self) -> list[str]:
        """Returns where writers put files of the table, except below the archive's folder."""
        ...


_KEYS = {
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
}
_FILE_IO = "tidelog.archive.iceberg.SmallFileIO"


def object_url(store: str, key: str) -> str:
    """Returns the address of an object for any reader; a plain path if the store is a folder."""
    address = _address(store)
    if address.scheme == "file":
        return f"{address.path.rstrip('/')}/{key}"
    parts = [address.host, *(part for part in address.path.split("/") if part), key]
    return f"{address.scheme}://{'/'.join(parts)}"


def date_of(text: str, table: str, column: str) -> date:
    """Returns the date in a folder's name. Raises ``InvalidError`` for any other text."""
    try:
        return date.fromisoformat(text)
    except ValueError as exc:
        raise InvalidError(
            f"{table}: its column `{column}` has dates, and a folder is named `{text}`: name "
            "folders by dates again, or register the archive under another name"
        ) from exc


def delta_options(store: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the storage options of deltalake."""
    address = _address(store)
    if address.scheme == "az" and "account" in address.options:
        return {"azure_storage_account_name": address.options["account"]}
    if address.scheme != "s3":
        return {}
    endpoint, region, path_style = _s3(address, environ)
    options = {name: environ[name] for name in _KEYS if name in environ}
    if key := address.options.get("kms_key"):  # as for every other object of the store
        options["AWS_SERVER_SIDE_ENCRYPTION"] = "aws:kms"
        options["AWS_SSE_KMS_KEY_ID"] = key
        options["AWS_SSE_BUCKET_KEY_ENABLED"] = "true"
    options |= {"AWS_REGION": region, "conditional_put": "etag"}
    options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "false" if path_style else "true"
    if endpoint:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return options


def iceberg_properties(store: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the FileIO properties of pyiceberg."""
    address = _address(store)
    if address.scheme == "az" and "account" in address.options:
        return {"adls.account-name": address.options["account"]}
    if address.scheme != "s3":
        return {}
    endpoint, region, path_style = _s3(address, environ)
    found = {theirs: environ[name] for name, theirs in _KEYS.items() if name in environ}
    found |= {"s3.region": region, "s3.force-virtual-addressing": str(not path_style).lower()}
    found["py-io-impl"] = _FILE_IO
    if endpoint:
        found["s3.endpoint"] = endpoint
    return found


def _address(store: str) -> Address:
    address = parse_address(store, plain_scheme="file")
    if address.scheme not in ("file", "s3", "gs", "az"):
        raise InvalidError(
            f"store `{store}`: no table can be made of what is there: "
            "use an archive in a folder, S3, Google Cloud Storage or Azure"
        )
    return address


def _s3(address: Address, environ: Mapping[str, str]) -> tuple[str, str, bool]:
    """Returns endpoint, region and whether buckets are in the path, like ``store.remote``."""
    endpoint = address.options.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL") or ""
    region = address.options.get("region") or environ.get("AWS_REGION")
    region = region or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    path_style = address.options.get("path_style", "true" if endpoint else "false") == "true"
    return endpoint, region, path_style


T = TypeVar("T")


class CatalogTable(ABC, Generic[T]):
    """What tables share that a catalog lists, with how far they are in their properties."""

    def __init__(self, plan: TablePlan) -> None:
        self._plan = plan
        self._table: T | None = None
        self._through: TablePosition | None = None

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

    @abstractmethod
    def _translate_errors(self) -> AbstractContextManager[None]:
        """Turns errors of the catalog's library into ours."""

    @abstractmethod
    def _read(self) -> T | None:
        """Reads the table as the catalog lists it."""

    @abstractmethod
    def _state(self, table: T | None) -> TablePosition | None:
        """Returns how far the table is. Raises ``InvalidError`` for one that is not ours."""
