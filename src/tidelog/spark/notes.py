"""Notes that Python workers of a Spark session leave for each other on one machine.

They are in a folder inside the one in which Spark keeps its own blocks. Only the user of the
session can read and write there, and Spark removes the folder when the session or its executor
ends: a note of a task that died needs no other cleanup.
"""

from __future__ import annotations

import os
from pathlib import Path

from tidelog.errors import InvalidError

__all__ = ["note_path"]

_BLOCKS = "SPARK_LOCAL_DIRS"  # Spark sets it for each Python worker, to folders of the session
_FOLDER = "tidelog-notes"


def note_path(name: str) -> Path:
    """Returns where workers of this session leave a note of this name, on this machine.

    Raises ``InvalidError`` outside of a Python worker of Spark.
    """
    blocks = os.environ.get(_BLOCKS, "").partition(",")[0]  # noqa: TID251 - Spark sets it there
    if not blocks:
        raise InvalidError("Spark: this runs outside of its Python workers: start it by a query")
    folder = Path(blocks) / _FOLDER
    folder.mkdir(0o700, exist_ok=True)
    return folder / name
