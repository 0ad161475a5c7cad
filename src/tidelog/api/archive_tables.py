"""The Delta and Iceberg tables of an archive."""

from __future__ import annotations

from tidelog.api.archive_view import ArchiveView
from tidelog.archive.tables import (
    RegisterResult,
    change_tables,
    forget_table,
    register_table,
    repair_tables,
)
from tidelog.context import Context
from tidelog.errors import InvalidError

__all__ = ["ArchiveTables"]


class ArchiveTables:
    """The tables of an archive: ``archive.tables``.

    A table is named ``delta``, or ``iceberg:CATALOG#NAMESPACE.NAME``.
    """

    def __init__(self, context: Context, archive: ArchiveView) -> None:
        self._context = context
        self._archive = archive

    def register(self, table: str | None = None, *, keep: bool = False) -> list[RegisterResult]:
        """Create a table of the archive's Parquet files, or bring it up to date.

        Returns what was added to each table; without a name, to all of them. With ``keep`` drivers
        bring it up to date after each cycle from now on. Files are registered where they are.

        >>> [done.events for done in home.archives.get("daily").tables.register("delta")]
        [3]
        """
        found = self._archive.reload()
        if table is None and (keep or not found.tables):
            raise InvalidError(
                f"archive `{found.name}`: has {len(found.tables)} tables: say which with --as"
            )
        names = found.tables if table is None else (table,)
        done = [register_table(self._context, found, each) for each in names]
        if keep:
            change_tables(self._context, found, names[0], keep=True)
        for error in repair_tables(self._context, self._archive.reload()):
            raise error
        return done

    def keep(self, table: str, keep: bool = True) -> None:
        """Let drivers bring a table up to date after each cycle, or no longer.

        >>> tables = home.archives.get("daily").tables
        >>> _ = tables.register("delta", keep=True)
        >>> tables.keep("delta", False)
        """
        change_tables(self._context, self._archive.reload(), table, keep=keep)

    def forget(self, table: str) -> None:
        """Remove a dropped table from the record: erasures and promotes no longer change it.

        >>> tables = home.archives.get("daily").tables
        >>> _ = tables.register("delta")
        >>> tables.forget("delta")
        >>> tables.list()
        []
        """
        forget_table(self._context, self._archive.reload(), table)

    def list(self) -> list[str]:
        """Return the names of all tables that erasures and promotes correct.

        >>> home.archives.get("daily").tables.list()
        []
        """
        return list(self._archive.reload().tables)
