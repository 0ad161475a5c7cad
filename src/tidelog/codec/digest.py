"""A digest of events that does not depend on their order, nor on how they are split into tables.

DuckDB hashes each event, and the hashes are added up. The digest distinguishes a batch that was
computed again from one with other events; it does not withstand an attacker. Another version of
DuckDB may hash differently: digests of different versions are not compared, only the counts are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from tidelog.model.decoding import Persisted

if TYPE_CHECKING:
    import duckdb

__all__ = ["Contents", "contents_of"]

_MODULUS = 1 << 64


class Contents(Persisted, frozen=True):
    """How many events there are, and the sum of their hashes."""

    events: int = 0
    digest: str = ""  # hexadecimal
    by: str = ""  # what computed it

    def plus(self, other: Contents) -> Contents:
        """Returns the contents of both."""
        total = (int(self.digest or "0", 16) + int(other.digest or "0", 16)) % _MODULUS
        return Contents(self.events + other.events, f"{total:016x}", self.by or other.by)

    def differs(self, other: Contents) -> bool:
        """Returns whether these are certainly other events."""
        if self.events != other.events:
            return True
        return self.by == other.by and self.digest != other.digest


def contents_of(table: pa.Table) -> Contents:
    """Returns the contents of the events in a table, over all of its columns."""
    import duckdb  # noqa: PLC0415 - Spark's workers that only read do without it

    columns = ", ".join(f'"{name}"' for name in sorted(table.schema.names))
    connection = _database().cursor()
    connection.register("events_of_batch", table)
    query = f"SELECT sum(hash({columns}))::VARCHAR FROM events_of_batch"  # noqa: S608 - our own names
    try:
        (total,) = connection.execute(query).fetchall()[0]
    finally:
        connection.close()
    found = Contents(table.num_rows, by=f"duckdb {duckdb.__version__}")
    return msgspec.structs.replace(found, digest=f"{int(total or 0) % _MODULUS:016x}")


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """Returns one connection for each process; a task has one core."""
    import duckdb  # noqa: PLC0415

    return duckdb.connect(":memory:", config={"threads": 1})
