"""Errors of Spark's jobs in one line; the messages are those of Spark 4.2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle

from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.spark.failures import cause_of, job_error, worker_name
from tidelog.spark.workers import load_transform

USER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/app/jobs.py", line 28, in clean
    raise ValueError('my own mistake')
ValueError: my own mistake
 SQLSTATE: 38000
"""
CHAINED = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times
Traceback (most recent call last):
  File "/app/jobs.py", line 3, in clean
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/jobs.py", line 5, in clean
app.errors.BadRecord: no field `a`

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException
"""
MISSING = """Job aborted due to stage failure:
Traceback (most recent call last):
  File "/spark/python/pyspark/serializers.py", line 460, in loads
ModuleNotFoundError: No module named 'tidelog.pipeline'
"""
PANDAS = "[PACKAGE_NOT_INSTALLED] Pandas >= 2.2.0 must be installed; however, it was not found."
AWAY = """Traceback (most recent call last):
  File "/spark/store.py", line 1, in get
ConnectionRefusedError: [Errno 111] Connection refused
"""
LOST = "Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited)\nDriver stack:"
JAVA = """An error occurred while calling o78.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 \
times, most recent failure: Lost task 0.0 in stage 0.0 (TID 0) (localhost executor driver): {}
\tat org.apache.spark.sql.vectorized.ColumnarBatch.column(ColumnarBatch.java:1)

Driver stacktrace:
"""
COLUMNS = JAVA.format(
    "java.lang.ArrayIndexOutOfBoundsException: Index 3 out of bounds for length 3"
)
CRASHED = JAVA.format(
    "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)."
)
TYPES = """[UNSUPPORTED_CALL.WITHOUT_SUGGESTION] Cannot call the method "getLong" of the class \
"org.apache.spark.sql.vectorized.ArrowColumnVector$ArrowVectorAccessor".  SQLSTATE: 0A000
"""
RAISED = "[USER_RAISED_EXCEPTION] not expected SQLSTATE: P0001\n\tat org.apache.spark.sql"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (USER, InvalidError, r"failed \(ValueError: my own mistake\): fix it"),
        (CHAINED, InvalidError, r"failed \(app.errors.BadRecord: no field `a`\)"),
        (RAISED, InvalidError, r"failed \(\[USER_RAISED_EXCEPTION\] not expected\): fix it"),
        (MISSING, InvalidError, "tidelog is not installed on the executors: set PYSPARK_PYTHON"),
        (PANDAS, InvalidError, "pandas is not installed"),
        (COLUMNS, InvalidError, r"\(ArrayIndexOutOfBoundsException: Index 3 .* other columns"),
        (TYPES, InvalidError, r"\(\[UNSUPPORTED_CALL.* the method \"getLong\".*\): fix it"),
        (CRASHED, UnavailableError, r"\(SparkException: Python worker exited .*\): try again"),
        (AWAY, UnavailableError, r"\(ConnectionRefusedError: \[Errno 111\].*\): try again"),
        (LOST, UnavailableError, r"\(Job aborted .*ExecutorLostFailure.*\): try again"),
        ("", UnavailableError, r"\(RuntimeError\): try again"),
    ],
)
def test_failed_job_names_its_cause(text: str, kind: type[TidelogError], message: str) -> None:
    with pytest.raises(kind, match=message) as found:
        raise job_error(RuntimeError(text), "try again")
    assert "\n" not in str(found.value)
    assert len(cause_of(RuntimeError(text * 50))) <= 300


def test_this_process_is_not_a_worker() -> None:
    assert worker_name() == ""


def test_functions_of_a_module_in_the_working_folder_go_with_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs_of_mine.py").write_text("def helper(v):\n    return v + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sent = cloudpickle.dumps(load_transform("jobs_of_mine:helper"))
    monkeypatch.delitem(sys.modules, "jobs_of_mine")
    (tmp_path / "jobs_of_mine.py").unlink()
    assert cloudpickle.loads(sent)(1) == 2, "as an executor that does not have the file"


def test_transform_of_another_script_says_where_to_run_it() -> None:
    with pytest.raises(InvalidError, match="run it from the script that has the function"):
        load_transform("__main__:no_such_function")
