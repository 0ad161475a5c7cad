"""What is special about a Python worker of Spark: its name, its notes, and its garbage.

**Notes** are what workers of a session leave for each other on one machine. They are in a folder
inside the one in which Spark keeps its own blocks. Only the user of the session can read and write
there, and Spark removes the folder when the session or its executor ends: a note of a task that
died needs no other cleanup.

**Garbage.** Spark collects garbage after each task. With the modules that Tidelog needs, that takes
50 ms of a core, as long as a small task itself; so modules are left out of it.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

from tidelog.errors import InvalidError

__all__ = ["keep_modules", "note_path", "worker_name"]

_BLOCKS = "SPARK_LOCAL_DIRS"  # Spark sets it for each Python worker, to folders of the session
_FOLDER = "tidelog-notes"


def worker_name() -> str:
    """Returns the module of Spark's Python worker that this process runs; "" if it is none."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if main is None else str(main.name)
    if name == "pyspark.daemon" and len(sys.argv) > 1:
        return sys.argv[1]
    return name if name.startswith("pyspark.") else ""


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


@functools.cache
def keep_modules() -> None:
    """Excludes what is loaded from later garbage collections, once, in a Python worker of Spark.

    Call it when the work of a task is done, so that all modules are loaded.
    """
    if worker_name():
        gc.freeze()
