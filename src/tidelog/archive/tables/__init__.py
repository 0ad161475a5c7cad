"""An archive's Parquet files as tables of Delta Lake and Iceberg: registered, never copied.

It promises that each committed range of files is in a table once, whatever dies on the way and
however many register at once, and that every recorded table follows every file that is rewritten
or replaced. It must not know how files are made, nor when.

``base`` says what a table is, ``registration`` brings one up to an archive's commits, ``delta`` and
``iceberg`` are the two kinds, each with a library that comes with the extra ``tables``, and
``places`` tells these libraries where the files are.
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
