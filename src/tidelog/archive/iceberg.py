"""An archive's files as an Iceberg table, in a catalog that the user names.

A catalog is ``sqlite:///FILE``, ``postgresql://…`` or ``http://…`` (REST), with ``?warehouse=…`` if
it needs one, or a name in pyiceberg's own configuration. The table's property ``tidelog.through``
says how far it is; the commit that adds the files sets it. That commit asserts the snapshot it is
based on, so of two at once one fails. It is never retried on another snapshot, as pyiceberg itself
would. It is a property, not part of a snapshot's summary, because snapshots expire.

Data files have no columns for folder names. The table has them as partition columns, whose values
readers get from the metadata.

``SmallFileIO`` writes metadata to S3 with one request per file, because the files are small.
Arrow's streams begin every file as a multipart upload, which takes three requests. The property
``py-io-impl`` of a catalog names this class.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import date

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, S3FileSystem

from tidelog.archive.table_files import (
    CatalogTable,
    Table,
    TableAddition,
    TableFile,
    TablePlan,
    TablePosition,
    date_of,
    iceberg_properties,
    object_url,
)
from tidelog.concurrency import Pool
from tidelog.errors import ConflictError, CorruptError, InvalidError, TidelogError, UnavailableError
from tidelog.model.address import parse_address
from tidelog.model.decoding import decode_json

__all__ = ["IcebergTable", "SmallFileIO"]

try:
    from pyiceberg import exceptions as theirs
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import (
        PyArrowFileIO,
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table import Table as Snapshot
    from pyiceberg.table import TableProperties
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot as Version
    from pyiceberg.typedef import EMPTY_DICT, Properties, Record
except ImportError as exc:
    raise InvalidError("iceberg tables are not installed: pip install 'tidelog[tables]'") from exc


_STATE = "tidelog.through"
_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path")
_FOOTERS_AT_ONCE = 8
_EPOCH_DAY = date(1970, 1, 1)
_LOST = (
    theirs.CommitFailedException,
    theirs.CommitStateUnknownException,
    theirs.TableAlreadyExistsError,
)


class IcebergTable(CatalogTable[Snapshot]):
    """One Iceberg table."""

    def __init__(self, plan: TablePlan, name: str, environ: Mapping[str, str]) -> None:
        super().__init__(plan)
        self.where = name
        uri, _, self._name = name.rpartition("#")
        self._store = plan.archive.store
        self._root = object_url(self._store, plan.archive.folder())
        self._properties = {**_catalog_properties(uri), **iceberg_properties(self._store, environ)}
        self._uri = uri
        self._known: Catalog | None = None

    def check(self, files: Iterable[TableFile]) -> None:
        """Raises ``InvalidError`` if a table that is there cannot have the columns or the folders.

        A folder's name must be a date where the table has one.
        """
        with self._translate_errors():
            table = self._read()
            if table is None:
                return
            try:
                table.transaction().update_schema().union_by_name(self._plan.columns)
            except (ValueError, theirs.ValidationError, theirs.ResolveError) as exc:
                raise InvalidError(
                    f"iceberg table `{self._name}`: cannot have the columns of the archive's files "
                    f"({_gist(exc)}): register the archive under another name"
                ) from exc
            for file in files:
                self._partition(table.metadata, file)

    def add(self, addition: TableAddition) -> None:
        with self._translate_errors():
            table = self._table or self._create(addition.files)
            known, same = self._through, not self.holds_another
            said = msgspec.json.encode(self._plan.after(known, addition)).decode()
            with _once(table).transaction() as change:
                if not same:
                    with change.update_schema() as columns:  # a generation may have more of them
                        columns.union_by_name(self._plan.columns)
                metadata = change.table_metadata
                mapping = metadata.schema().name_mapping.model_dump_json()
                files = self._data_files(table, addition.files, metadata)
                if not same:
                    # Its manifests name the files of the previous generation.
                    change.delete(AlwaysTrue(), {_STATE: msgspec.json.encode(known).decode()})
                change.set_properties({_STATE: said, TableProperties.DEFAULT_NAME_MAPPING: mapping})
                if (
                    files or not same
                ):  # the current snapshot must name no file of another generation
                    with change.update_snapshot({_STATE: said}).fast_append() as append:
                        for file in files:
                            append.append_data_file(file)

    def change(self, files: list[TableFile]) -> bool:
        """Replaces the entries of those files in one snapshot."""
        with self._translate_errors():
            table = self._read() if files else None
            stale = [] if table is None else self._stale(table, files)
            if table is None or not stale:
                return False
            fresh = self._data_files(table, [file for _, file in stale], table.metadata)
            said = {_STATE: table.properties[_STATE]} if _STATE in table.properties else {}
            with (
                _once(table).transaction() as change,
                change.update_snapshot(said).overwrite() as swap,
            ):
                for old, _ in stale:
                    swap.delete_data_file(old)
                for new in fresh:
                    swap.append_data_file(new)
            return True

    def forget(self, generation: int) -> bool:
        """Expires the snapshots of a generation, and deletes what only they name.

        Objects are deleted first, so a crash in between leaves snapshots that the next call finds.
        Their files are already deleted: no reader can use them.
        """
        with self._translate_errors():
            table = self._read()
            if table is None:
                return False
            heads = {each.snapshot_id for each in table.metadata.refs.values()}
            old = [
                each
                for each in table.snapshots()
                if each.snapshot_id not in heads and self._is_of(table, each, generation)
            ]
            if not old:
                return False
            ids = {each.snapshot_id for each in old}
            needed = {
                path
                for each in table.snapshots()
                if each.snapshot_id not in ids
                for path in _objects(table, each)
            }
            for path in {path for each in old for path in _objects(table, each)} - needed:
                with contextlib.suppress(FileNotFoundError):
                    table.io.delete(path)
            _once(table).maintenance.expire_snapshots().by_ids(sorted(ids)).commit()
            return True

    def _is_of(self, table: Snapshot, snapshot: Version, generation: int) -> bool:
        """Returns whether a snapshot names files of a generation, by its summary or manifests."""
        said = snapshot.summary.get(_STATE) if snapshot.summary is not None else None
        if said is not None:
            return decode_json(said, TablePosition).generation == generation
        folder = self._plan.archive.folder(generation)
        below = _url(object_url(self._store, f"{folder}/"))
        try:
            return any(
                entry.data_file.file_path.startswith(below)
                for manifest in snapshot.manifests(table.io)
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
            )
        except FileNotFoundError:  # an earlier call crashed after deleting some of them
            return True

    def paths(self) -> list[str]:
        with self._translate_errors():
            table = self._read()
            if table is None or table.current_snapshot() is None:
                return []
            root, found = _url(f"{self._root}/"), table.scan().plan_files()
            listed = sorted(task.file.file_path for task in found)
            return [path.removeprefix(root) for path in listed if path.startswith(root)]

    def count(self) -> int:
        with self._translate_errors():
            table = self._read()
            if table is None or table.current_snapshot() is None:
                return 0
            return sum(1 for _ in table.scan().plan_files())

    def stale(self, files: list[TableFile]) -> list[str]:
        with self._translate_errors():
            table = self._read() if files else None
            return [] if table is None else [file.path for _, file in self._stale(table, files)]

    def outside(self) -> list[str]:
        with self._translate_errors():
            table = self._read()
        if table is None:
            return []
        own = _url(object_url(self._store, f"{self._plan.archive.root}/"))
        given = [table.properties[name] for name in _PATHS if name in table.properties]
        return [each for each in (table.location(), *given) if not each.startswith(own)]

    def _stale(self, table: Snapshot, files: list[TableFile]) -> list[tuple[DataFile, TableFile]]:
        """Returns entries with another size or count than their file has."""
        if table.current_snapshot() is None:
            return []
        wanted = {_url(f"{self._root}/{file.path}"): file for file in files}
        there = {task.file.file_path: task.file for task in table.scan().plan_files()}
        return [
            (each, file)
            for each in there.values()
            if (file := wanted.get(each.file_path)) is not None
            and (each.file_size_in_bytes, each.record_count) != (file.entry.size, file.entry.events)
        ]

    def _state(self, table: Snapshot | None) -> TablePosition | None:
        if table is None:
            return None
        said = table.properties.get(_STATE)
        if said is None and table.current_snapshot() is None:
            return None
        return self._plan.read_through(said or "{}", f"iceberg table `{self._name}`")

    @property
    def _catalog(self) -> Catalog:
        if self._known is None:
            name = "tidelog" if self._properties.get("uri") else self._uri
            self._known = load_catalog(name, **self._properties)
            engine = getattr(self._known, "engine", None)  # of a catalog in SQL
            if engine is not None:
                weakref.finalize(self, engine.dispose)  # closes its connections with the table
        return self._known

    def _read(self) -> Snapshot | None:
        try:
            return self._catalog.load_table(self._name)
        except (theirs.NoSuchTableError, theirs.NoSuchNamespaceError):
            return None

    def _create(self, files: list[TableFile]) -> Snapshot:
        more = self._plan.partition_fields(files)
        namespace = self._name.rpartition(".")[0]
        self._catalog.create_namespace_if_not_exists(namespace)
        root = object_url(self._store, f"{self._plan.archive.root}/_iceberg/{self._name}")
        columns = pa.schema([*self._plan.columns, *more])
        made = self._catalog.create_table_transaction(self._name, columns, location=_url(root))
        with made, made.update_spec() as spec:
            for column in more:
                spec.add_identity(column.name)
        return self._catalog.load_table(self._name)

    def _data_files(
        self, table: Snapshot, files: list[TableFile], metadata: TableMetadata
    ) -> list[DataFile]:
        with Pool(_FOOTERS_AT_ONCE) as pool:
            return list(pool.map(lambda file: self._data_file(table, file, metadata), files))

    def _data_file(self, table: Snapshot, file: TableFile, metadata: TableMetadata) -> DataFile:
        """Returns a file as the table lists it, with the statistics of its footer."""
        path = _url(f"{self._root}/{file.path}")
        with table.io.new_input(path).open() as data:
            footer = pq.read_metadata(data)
        if footer.num_rows != file.entry.events:
            raise CorruptError(
                f"file `{file.entry.target}`: has {footer.num_rows} rows, its manifest says "
                f"{file.entry.events}: keep it, and restore it from a copy"
            )
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=footer,
            stats_columns=compute_statistics_plan(
                metadata.schema(), self._bounds_properties(footer)
            ),
            parquet_column_mapping=parquet_path_to_id_mapping(metadata.schema()),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=self._partition(metadata, file),
            file_size_in_bytes=file.entry.size,
            spec_id=metadata.default_spec_id,
            sort_order_id=None,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def _partition(self, metadata: TableMetadata, file: TableFile) -> Record:
        """Returns the values of the partition columns."""
        schema = metadata.schema()
        values: list[str | int | None] = []
        for field in metadata.spec().fields:
            name = schema.find_column_name(field.source_id) or ""
            text = file.values.get(name)
            if text is not None and str(schema.find_type(field.source_id)) == "date":
                day = date_of(text, f"iceberg table `{self._name}`", name)
                values.append((day - _EPOCH_DAY).days)
            else:
                values.append(text)
        return Record(*values)

    def _bounds_properties(self, footer: pq.FileMetaData) -> dict[str, str]:
        """Returns table properties that ask for bounds of offsets and times only.

        Bounds of other columns would be parts of events, and would stay in old snapshots, where no
        erasure reaches them.
        """
        groups = [footer.row_group(0)] if footer.num_row_groups else []
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        allowed = {self._plan.names.get(each) for each in ("offset", "timestamp")}
        names = [c.path_in_schema for c in chunks if c.is_stats_set and c.path_in_schema in allowed]
        prefix = TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX
        modes = {
            f"{prefix}.{name}": TableProperties.DEFAULT_WRITE_METRICS_MODE_DEFAULT for name in names
        }
        return {TableProperties.DEFAULT_WRITE_METRICS_MODE: "none", **modes}

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except _LOST as exc:
            raise ConflictError(f"iceberg table `{self._name}`: another commit came first") from exc
        except theirs.NotInstalledError as exc:
            raise InvalidError(
                f"iceberg catalog `{self._uri}`: {_gist(exc)}: install that"
            ) from exc
        except TidelogError:
            raise
        except Exception as exc:  # a catalog may be any code
            raise UnavailableError(
                f"iceberg table `{self._name}`: {_gist(exc)}: try again, "
                f"and check the catalog `{self._uri}`"
            ) from exc


def _catalog_properties(uri: str) -> dict[str, str]:
    """Returns properties for pyiceberg; none for a catalog in its own configuration."""
    if ":" not in uri:
        return {}
    address = parse_address(uri)
    options = address.take_options(("warehouse",))
    return {"uri": uri.partition("?")[0], **options}


def _objects(table: Snapshot, snapshot: Version) -> list[str]:
    """Returns the manifest list of a snapshot, and its manifests if that can be read."""
    with contextlib.suppress(FileNotFoundError):
        manifests = [each.manifest_path for each in snapshot.manifests(table.io)]
        return [*manifests, snapshot.manifest_list]
    return [snapshot.manifest_list]


def _once(table: Snapshot) -> Snapshot:
    """Returns the table as it was read; its commits are not retried after a conflict."""
    properties = {**table.metadata.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    return table


def _gist(exc: Exception) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__


def _url(path: str) -> str:
    return f"file://{path}" if path.startswith("/") else path


_: type[Table] = IcebergTable


class SmallFileIO(PyArrowFileIO):
    """Arrow's file systems, with streams that buffer bytes before they begin a multipart upload."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        whole = self.fs_by_scheme
        known: dict[tuple[str, str | None], FileSystem] = {}

        def waiting(scheme: str, netloc: str | None = None) -> FileSystem:
            if (scheme, netloc) not in known:
                known[scheme, netloc] = _waiting(whole(scheme, netloc))
            return known[scheme, netloc]

        self.fs_by_scheme = waiting


def _waiting(found: FileSystem) -> FileSystem:
    """Returns the same file system, rebuilt like unpickling does; that needs keys, not roles."""
    if not isinstance(found, S3FileSystem):
        return found
    make, (options,) = found.__reduce__()
    return make({**options, "allow_delayed_open": True}) if options["access_key"] else found
