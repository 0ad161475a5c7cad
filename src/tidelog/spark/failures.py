"""Errors of the data source in one line, as Spark shows them.

Spark puts the traceback of a Python worker into its message, and the cause comes last. A mistake
in an option needs no traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.errors import TidelogError

__all__ = ["one_line", "worker_name"]

_HIDE = "SPARK_HIDE_TRACEBACK"  # Spark reads it when it writes down an exception


def worker_name() -> str:
    """Returns the module of Spark's Python worker that this process runs; "" if it is none."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if main is None else str(main.name)
    if name == "pyspark.daemon" and len(sys.argv) > 1:
        return sys.argv[1]
    return name if name.startswith("pyspark.") else ""


@contextmanager
def one_line() -> Iterator[None]:
    """Leaves the traceback out of Tidelog's own errors, in a Python worker of Spark.

    The worker ends with its first exception, so no other task is affected.
    """
    try:
        yield
    except TidelogError:
        if worker_name():
            os.environ[_HIDE] = "1"  # noqa: TID251 - Spark reads it there
        raise
