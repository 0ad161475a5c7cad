"""Python workers of Spark, and errors in one line: ours as Spark shows them, Spark's as we do.

**Errors.** Spark puts the traceback of a Python worker into its message, and the cause comes last.
A mistake in an option needs no traceback. The other way round, an error of a Spark job is reported
by its cause: the exception that the user's own code raised, or what is missing on the executors.

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
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidelog.errors import InvalidError, TidelogError, UnavailableError

__all__ = [
    "cause_of",
    "job_error",
    "keep_modules",
    "note_path",
    "one_line",
    "start_error",
    "worker_name",
]

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


_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")  # the last line of a traceback
# Spark's errors with the states of SQL for what it cannot do, wrong data, wrong names, and
# `raise_error`.
_SPARK_ERROR = re.compile(r"(\[[A-Z][A-Z0-9_.]+\] .+?)\s*SQLSTATE: (?:0A|22|42|P0)\w{3}", re.DOTALL)
# What a task's Java raised, which Spark hides in the middle of a long line.
_LOST_TASK = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\): (.+)")
# What Java raises for columns that are missing or of another type than a function declares.
_WRONG_COLUMNS = ("ArrayIndexOutOfBoundsException", "ClassCastException")
_MISSING = re.compile(r"No module named '([\w.]+)'")
_NEEDS_PANDAS = re.compile(r"Pandas >= [\d.]+ must be installed", re.IGNORECASE)
_MAY_PASS = ("OSError", "Timeout", "Connection", "MemoryError", "BrokenPipe", "EOFError")
_JAVA_PACKAGE = re.compile(r"^(?:[\w$]+\.)+(?=[\w$]+:)")
_JAVA_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")
_WRONG_SETTINGS = (
    "Could not parse Master URL",
    "IllegalArgumentException",
    "NumberFormatException",
)
_LENGTH_MAX = 300
_HIDE = "SPARK_HIDE_TRACEBACK"  # Spark reads it when it writes down an exception


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


def job_error(exc: Exception, again: str, *, runs_user_code: bool = True) -> TidelogError:
    """Returns the error of a failed Spark job. ``again`` says what to do if it may pass.

    An exception of the user's own code, or a missing package, does not pass: it is an
    ``InvalidError``, so that no driver repeats the job. ``runs_user_code`` is false for a job that
    has none.
    """
    text = str(exc)
    found = _MISSING.search(text)
    missing = "" if found is None else found[1].partition(".")[0]
    if missing == "tidelog":
        return InvalidError(
            "Spark: tidelog is not installed on the executors: set PYSPARK_PYTHON to a Python that "
            "has it, or ship one: `tidelog spark-env --help`"
        )
    if missing == "pandas" or _NEEDS_PANDAS.search(text):
        return InvalidError(
            "Spark: pandas is not installed: Spark needs it to run tasks: install `pandas` where "
            "the driver and the executors run"
        )
    mistake = _mistake(text) if runs_user_code else ""
    if mistake:
        return InvalidError(
            f"Spark: the job failed ({mistake}): fix it and run again", job="failed"
        )
    return UnavailableError(f"Spark: the job failed ({cause_of(exc)}): {again}", job="failed")


def start_error(exc: Exception) -> TidelogError:
    """Returns the error of a session that could not be started, in one line.

    A master or a setting that Spark cannot read is an ``InvalidError``.
    """
    java = getattr(exc, "java_exception", None)  # of the bridge to Java
    text = str(exc) if java is None else str(java)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = _JAVA_CLASS.sub("", lines[0])[:_LENGTH_MAX] if lines else type(exc).__name__
    do = "check --master, --conf and that Java is 17 or later; or work without Spark"
    kind = InvalidError if any(each in text for each in _WRONG_SETTINGS) else UnavailableError
    return kind(f"Spark: could not be started ({cause}): {do}")


def cause_of(exc: BaseException) -> str:
    """Returns the cause of an error of Spark in one line: what Python raised, if it did."""
    text = str(exc)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(exc).__name__
    return (_mistake(text) or _raised(text) or _lost(text) or first)[:_LENGTH_MAX]


def _mistake(text: str) -> str:
    """Returns what user code has done wrong: its exception, or Spark's own for values and names."""
    raised = _raised(text)
    if raised:
        name = raised.partition(":")[0]
        return "" if any(each in name for each in _MAY_PASS) else raised
    lost = _lost(text)
    if lost.startswith(_WRONG_COLUMNS):
        return f"{lost}: a function returned other columns than it declares"
    found = _SPARK_ERROR.search(text)
    return found[1].splitlines()[0][:_LENGTH_MAX] if found is not None else ""


def _lost(text: str) -> str:
    """Returns what Java raised in the task that failed, without its package; "" if unknown."""
    found = _LOST_TASK.search(text)
    return "" if found is None else _JAVA_PACKAGE.sub("", found[1])[:_LENGTH_MAX]


def _raised(text: str) -> str:
    """Returns the last line of the last Python traceback in a text; "" if there is none."""
    found = ""
    _, _, rest = text.rpartition("Traceback (most recent call last):")
    if len(rest) == len(text):
        return ""
    for line in rest.splitlines()[1:]:
        if not line.strip() or line.startswith((" ", "\t")):
            continue
        if _RAISED.fullmatch(line.strip()):
            found = line.strip()
        break
    return found[:_LENGTH_MAX]
