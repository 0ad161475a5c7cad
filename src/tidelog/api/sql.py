"""SQL over topics and archives by name: DuckDB runs it, Tidelog reads the events.

A query has a DuckDB of its own in memory, with a view for each topic and archive whose name is in
the text of the query (``sql_tables``). Rows are read as the caller reads the result, and an error
of DuckDB becomes one line.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from tidelog.api.sql_tables import (
    ArchiveTable,
    EventTable,
    Scans,
    TopicTable,
    Unreadable,
    as_dataset,
)
from tidelog.concurrency import Pool
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_archives
from tidelog.errors import InternalError, InvalidError, TidelogError
from tidelog.log.topics import list_topics
from tidelog.model.address import nearest
from tidelog.model.archive import Archive
from tidelog.model.event import check_utf8
from tidelog.model.topic import Topic

__all__ = ["Allow", "SqlValues", "printable", "run_query"]

T = TypeVar("T")

SqlValues = Sequence[object] | Mapping[str, object] | None
"""Values for the ``?`` or ``$name`` of a query."""
Allow = Callable[[str, str], bool]
"""Whether a query may see a ``topic`` or an ``archive`` of this name."""

_BATCH_ROWS = 2_048  # of a result; DuckDB has as many in memory anyway
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a table is never a Python variable
}
_SETUP = """
SET TimeZone = 'UTC';
CREATE SCHEMA topic;
CREATE SCHEMA archive;
CREATE MACRO as_text(bytes) AS try(decode(bytes));
CREATE MACRO as_json(bytes) AS TRY_CAST(try(decode(bytes)) AS JSON);
"""
_BYTES_AS_JSON = re.compile(
    r"\b(value|key)\s*->|\bjson_\w+\s*\(\s*(?:\w+\s*\.\s*)?(value|key)\b", re.IGNORECASE
)
_LISTS = re.compile(r"\b(show|describe|information_schema|duckdb_\w+)\b", re.IGNORECASE)
_OWN_VIEW = re.compile(r"duckdb_|pg_|sqlite_|pragma_", re.IGNORECASE)
_NEAR = re.compile(r'syntax error at or near "(.+?)"')
_MISSING = re.compile(r"Table with name (\S+) does not exist")
_BARE_OFFSET = re.compile(r"\nLINE .*(?<![\w.\"])offset\b", re.IGNORECASE)
_FIELD_OF_BYTES = re.compile(r"Cannot extract field '(.+?)' from expression \"(key|value)\"")
_MISSING_COLUMN = re.compile(r'^Binder Error: Referenced column "(.+?)" not found in FROM')
_CHANGES = ("ALTER", "CREATE", "CREATE_FUNC", "DELETE", "DROP", "INSERT", "MERGE_INTO", "UPDATE")
_INTERRUPT_S = 0.05
# Its readers raise Arrow's. A message may not be UTF-8: it cuts a quoted value at a byte.
_DUCKDB_ERRORS = (duckdb.Error, pa.ArrowException, OSError, UnicodeDecodeError)


def run_query(
    context: Context,
    query: str,
    values: SqlValues = None,
    *,
    allow: Allow = lambda kind, name: True,
    prepare: Callable[[duckdb.DuckDBPyConnection], None] | None = None,
    batch_rows: int = _BATCH_ROWS,
) -> pa.RecordBatchReader:
    """Returns the rows of a query, which are read as the caller reads them.

    ``allow`` decides which topics and archives are there. ``prepare`` may change the connection's
    settings and refuse the query, after the tables are there and before the query runs; such a
    query has no folder for what does not fit into memory. Raises ``InvalidError`` for a query that
    DuckDB refuses, and what reading events raises, also from the returned reader.
    """
    if not isinstance(query, str):
        raise InvalidError(f"sql: query is {type(query).__name__}: give text")
    check_utf8("sql", query)
    _check_bytes(query)
    session = _Session(context, query, allow, may_spill=prepare is None)
    try:
        if prepare is not None:
            prepare(session.connection)
        found = session.start(query, values, batch_rows)
    except BaseException:
        session.close()
        raise
    names = _unique(found.schema.names)
    schema = pa.schema(
        [each.with_name(name) for each, name in zip(found.schema, names, strict=True)]
    )
    return pa.RecordBatchReader.from_batches(schema, session.batches(found, schema))


def printable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows to print: sums of whole numbers, which DuckDB gives as decimals, as integers."""
    columns = []
    for each in batch.columns:
        column = each
        if pa.types.is_decimal(each.type) and each.type.scale == 0:
            with contextlib.suppress(pa.ArrowInvalid):  # more than 64 bits: stays as text
                column = each.cast(pa.int64())
        columns.append(column)
    return pa.record_batch(columns, names=batch.schema.names)


class _Session:
    """A connection of DuckDB to the tables of a home, for one query."""

    _remove_folder: Callable[[], object] | None = None

    def __init__(self, context: Context, query: str, allow: Allow, *, may_spill: bool) -> None:
        folder = ""
        if may_spill:
            folder = tempfile.mkdtemp(prefix="tidelog-sql-")
            # Also for a reader that is dropped before its first batch: nothing closes its session.
            self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        settings = {**_SETTINGS, "temp_directory": folder}
        self.connection = duckdb.connect(":memory:", config=settings)
        self._scans = Scans()
        self._thread = Pool(1, "tidelog-sql")
        self._names: list[str] = []  # of all topics and archives, for messages
        try:
            self._run(lambda: self.connection.execute(_SETUP))
            self._add_tables(context, query, allow)
        except BaseException:
            self.close()
            raise

    def _add_tables(self, context: Context, query: str, allow: Allow) -> None:
        """Adds the tables that the query may mean: those whose names are in its text.

        Each is there with its schema, and without it unless a topic and an archive share the name.
        Nor is one that hides a view of DuckDB, by which that lists tables, from a query that does
        not name it.
        """
        topics = {each.name: each for each in list_topics(context) if each.state == "ready"}
        archives = {each.name: each for each in list_archives(context) if each.state == "ready"}
        self._names = [
            *(name for name in topics if allow("topic", name)),
            *(name for name in archives if allow("archive", name)),
        ]
        text = query.casefold()
        named: defaultdict[str, list[tuple[str, EventTable]]] = defaultdict(list)
        for kind, found in (("topic", topics), ("archive", archives)):
            mentioned = [
                name
                for name in found
                if allow(kind, name) and (name.casefold() in text or _LISTS.search(query))
            ]
            for name, problem in _distinct(mentioned, query).items():
                table = Unreadable(problem) if problem else _table(context, found[name])
                named[name].append((kind, table))
        for name, tables in named.items():
            plain: EventTable | None = None
            if name.casefold() in text or not _OWN_VIEW.match(name):
                plain = tables[0][1] if len(tables) == 1 else Unreadable(_is_both(name))
                self._register(name, plain)
            for schema, table in tables:
                given = name if table is plain else f"{schema}:{name}"
                if table is not plain:
                    self._register(given, table)
                view = f"{schema}.{_quoted(name)}"
                self.connection.execute(f"CREATE VIEW {view} AS FROM {_quoted(given)}")

    def _register(self, name: str, table: EventTable) -> None:
        self.connection.register(name, as_dataset(table, self._scans))

    def start(self, query: str, values: SqlValues, batch_rows: int) -> pa.RecordBatchReader:
        """Returns DuckDB's own reader of the rows."""

        def begin() -> pa.RecordBatchReader:
            statements = self.connection.extract_statements(query)
            if len(statements) != 1:
                raise InvalidError(f"sql: found {len(statements)} statements: give one")
            if (kind := statements[0].type.name) in _CHANGES:
                word = kind.partition("_")[0]
                raise InvalidError(
                    f"sql: {word} would change nothing, as topics and archives are read-only here: "
                    "append with `tidelog produce`, change events with `tidelog update` and "
                    "`tidelog delete`, write rows to a file with COPY (SELECT …) TO 'FILE'"
                )
            params = None if values is None else _params(values)
            relation = self.connection.sql(query, params=params)
            if relation is None:
                raise InvalidError("sql: the statement has no rows to return: give a query")
            _check_types(relation)
            return relation.to_arrow_reader(batch_rows)

        return self._run(begin)

    def batches(self, reader: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yields the rows, and then closes everything; also if the caller stops before."""
        try:
            while True:
                try:
                    batch = self._run(reader.read_next_batch)
                except StopIteration:
                    return
                yield pa.record_batch(batch.columns, schema=schema)
        finally:
            self._scans.stop()
            self.connection.interrupt()  # otherwise closing reads everything that is left
            reader.close()
            self.close()

    def close(self) -> None:
        """Closes the connection and deletes what it has on the disk."""
        self._scans.stop()
        self.connection.close()
        self._thread.shutdown(wait=False)
        if self._remove_folder is not None:
            self._remove_folder()

    def _run(self, call: Callable[[], T]) -> T:
        """Returns what DuckDB returns, and stops it if a signal's handler raises meanwhile.

        It works in a thread of its own: in the main thread it notices signals late or, while it
        waits for its own threads, not at all, and it drops what their handlers raise.
        """
        work = self._thread.submit(call)
        try:
            with self._translated():
                return work.result()
        finally:
            while not work.done():
                self._scans.stop()
                self.connection.interrupt()  # without effect until it has begun
                with contextlib.suppress(Exception):
                    work.result(_INTERRUPT_S)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises DuckDB's errors as ours; an error of our own scans as it was."""
        try:
            yield
        except TidelogError:
            raise
        except _DUCKDB_ERRORS as exc:
            failure = self._scans.failure
            if isinstance(failure, TidelogError) or not isinstance(failure, Exception | None):
                raise failure from exc  # such as Ctrl-C while a scan ran in the main thread
            if failure is not None:
                raise InternalError(f"sql: reading failed: {failure!r}") from failure
            if isinstance(exc, duckdb.OutOfMemoryException):
                raise InvalidError(
                    "sql: needs more memory than there is: select fewer rows or columns, or group "
                    "by fewer values"
                ) from exc
            if isinstance(exc, UnicodeDecodeError):
                raise InvalidError(
                    "sql: a value is refused, and DuckDB's message about it is not UTF-8: use "
                    "TRY_CAST or `as_json(value)`, which give NULL for such values"
                ) from exc
            raise self._refusal(str(exc)) from exc

    def _refusal(self, text: str) -> InvalidError:
        missing = _MISSING.search(text)
        if missing is None:
            return InvalidError(f"sql: {_one_line(text)}{_hint(text, self._names)}")
        name = missing[1].strip('"')
        hint = nearest(name, self._names)
        return InvalidError(
            f"sql: topic or archive `{name}` not found{hint}: check the name, and put it into "
            "double quotes if it has other characters than letters, digits and `_`"
        )


def _hint(text: str, names: Sequence[str]) -> str:
    """Returns what to write instead, for columns and names that SQL reads as something else."""
    if field := _FIELD_OF_BYTES.search(text):
        return f": write as_json({field[2]})->>'{field[1]}'"
    if "syntax error" in text and _BARE_OFFSET.search(text):
        return ': write the column as "offset", in double quotes'
    if missing := _MISSING_COLUMN.search(text):
        return f": check the name; a text needs single quotes: '{missing[1]}'"
    near = _NEAR.search(text)
    if near and near[1].casefold() in map(str.casefold, names):
        return f': it is a word of SQL: as the name of a topic or archive, write "{near[1]}"'
    odd = [name for name in names if not name.isidentifier() and f" {name}" in text]
    if "syntax error" in text and odd:
        return f': write "{max(odd, key=len)}", in double quotes'
    return ""


def _one_line(text: str) -> str:
    """Returns DuckDB's message without its kind and without the picture of the query."""
    said = text.partition("\n\nLINE ")[0]
    kind, colon, rest = said.partition(" Error: ")
    said = rest if colon and kind.replace(" ", "").isalpha() else said
    return " ".join(said.split())


def _check_bytes(query: str) -> None:
    """Raises for JSON operators on bytes, where DuckDB finds nothing and says nothing."""
    found = _BYTES_AS_JSON.search(query)
    if found is None:
        return
    name = (found[1] or found[2]).lower()
    if re.search(rf"\bas\s+\"?{name}\b", query, re.IGNORECASE) is None:  # a name for another column
        raise InvalidError(
            f"sql: `{name}` is bytes, not JSON: write as_json({name})->>'field', "
            f"or as_text({name}) for text"
        )


def _check_types(relation: duckdb.DuckDBPyRelation) -> None:
    """Raises for whole numbers of 128 bits without a sign: Arrow would show large ones as wrong."""
    for name, kind in zip(relation.columns, relation.types, strict=True):
        if "UHUGEINT" in str(kind):
            raise InvalidError(
                f"sql: column `{name}` is UHUGEINT, which a result cannot hold: cast it to VARCHAR"
            )


def _unique(names: Sequence[str]) -> list[str]:
    """Returns the names of a result's columns; a repeated one gets a number."""
    found: dict[str, None] = {}
    for name in names:
        tries = (f"{name}_{number}" if number else name for number in itertools.count())
        found[next(each for each in tries if each not in found)] = None
    return list(found)


def _params(values: SqlValues) -> Any:
    return dict(values) if isinstance(values, Mapping) else list(values or ())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_both(name: str) -> str:
    return (
        f"sql: `{name}` is a topic and an archive: write topic.{_quoted(name)} "
        f"or archive.{_quoted(name)}"
    )


def _distinct(names: Sequence[str], query: str) -> dict[str, str]:
    """Returns the names that SQL can distinguish, each with what is wrong with it, if anything.

    SQL ignores case. Of names that differ in nothing else the query's own spelling is chosen.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[name.casefold()].append(name)
    chosen: dict[str, str] = {}
    for group in alike.values():
        wanted = [name for name in group if name in query] or group
        said = " and ".join(f"`{name}`" for name in wanted)
        chosen[wanted[0]] = (
            f"sql: {said} differ only in case, which SQL ignores: query one at a time, as it is "
            "spelled"
            if len(wanted) > 1
            else ""
        )
    return chosen


def _table(context: Context, found: Topic | Archive) -> EventTable:
    if isinstance(found, Topic):
        return TopicTable(context, found)
    try:
        return ArchiveTable(context, found)
    except TidelogError as exc:  # such as a format that is not installed
        return Unreadable(f"archive `{found.name}`: {exc}")
