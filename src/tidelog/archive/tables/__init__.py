"""An archive's Parquet files as tables of Delta Lake and Iceberg: registered, never copied.

This room promises that each committed range of files is in a table once, whatever crashes and
however many processes register at once. Every recorded table follows every file that is rewritten
or replaced. It must not know how or when files are made.

``base`` defines a table and where its library finds the files. ``registration`` brings a table up
to an archive's commits. ``delta`` and ``iceberg`` are the two kinds; their libraries come with the
extra ``tidelog[tables]``.
"""

from __future__ import annotations

from tidelog.archive.tables.base import RegisterResult
from tidelog.archive.tables.registration import (
    change_tables,
    check_table,
    check_tables,
    forget_files,
    forget_table,
    register,
    register_table,
    repair_tables,
    replace_files,
    settle_tables,
)

__all__ = [
    "RegisterResult",
    "change_tables",
    "check_table",
    "check_tables",
    "forget_files",
    "forget_table",
    "register",
    "register_table",
    "repair_tables",
    "replace_files",
    "settle_tables",
]
