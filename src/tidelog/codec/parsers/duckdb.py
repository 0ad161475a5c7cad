"""DuckDB over Arrow: one expression for a whole column of text, on the caller's own core.

It reads no files, loads no extension and uses no network. The column is named ``v``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pyarrow as pa

from tidelog.codec.parsers.base import shown
from tidelog.errors import InternalError, InvalidError

if TYPE_CHECKING:
    import duckdb

__all__ = ["Engine", "literal"]

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,  # a task has one core
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """Returns one connection for each process: opening takes longer than parsing many events."""
    import duckdb  # noqa: PLC0415 - slow to load

    return duckdb.connect(":memory:", config=_SETTINGS)


class Engine:
    """Belongs to one thread, as a connection of DuckDB does."""

    def __init__(self) -> None:
        self._connection = _database().cursor()
        self._connection.execute("SET TimeZone = 'UTC'")  # what a time without a zone means

    def column(self, expression: str, texts: pa.Array) -> pa.Array:
        """Returns the expression's value for every row, in order.

        Raises ``InvalidError`` if DuckDB refuses the expression or some row.
        """
        import duckdb  # noqa: PLC0415 - slow to load

        self._connection.register("rows_of_batch", pa.table({"v": texts}))
        try:
            query = f"SELECT {expression} AS found FROM rows_of_batch"  # noqa: S608 - quoted by literal
            found = self._connection.sql(query).to_arrow_table().column(0).combine_chunks()
        except (
            duckdb.InvalidInputException,
            duckdb.BinderException,
            duckdb.ConversionException,
            duckdb.OutOfRangeException,
        ) as exc:
            raise InvalidError(_first_line(exc)) from exc
        except duckdb.Error as exc:
            raise InternalError(f"DuckDB failed on `{expression}`: {_first_line(exc)}") from exc
        finally:
            self._connection.unregister("rows_of_batch")
        if len(found) != len(texts):
            raise InternalError(f"`{expression}` gave {len(found)} values for {len(texts)} rows")
        return found

    def check(self, expression: str) -> None:
        """Raises ``InvalidError`` unless the expression compiles."""
        self.column(expression, pa.array([""], pa.string()))


def literal(text: str) -> str:
    """Returns text as a constant inside an expression."""
    return "'" + text.replace("'", "''") + "'"


def _first_line(exc: duckdb.Error) -> str:
    line = (str(exc).splitlines() or [""])[0]
    return shown(line.partition(": ")[2] or line)
