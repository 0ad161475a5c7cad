"""Runs the tasks of maintenance on a Spark session, as ``tasks.TaskRunner`` describes.

Items go out in waves, since callers list them as they read rows. A wave is one job: a DataFrame
whose partitions are groups of items of about the same size. If an executor dies, Spark runs its
group again; if the session's Java process ends, the wave runs again in a new one.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from tidelog.errors import (
    InternalError,
    TidelogError,
    UnavailableError,
    unexpected,
)
from tidelog.spark.failures import job_error
from tidelog.spark.python_worker import keep_modules
from tidelog.spark.session import (
    LOTS_PER_CORE,
    LiveSession,
    cores_of,
    is_alive,
    named_job,
    numbered,
)
from tidelog.tasks import TaskRunner

__all__ = ["SparkTasks"]

T = TypeVar("T")
R = TypeVar("R")

_WAVE_BYTES = 256 << 20  # per core; a wave then takes seconds, and its start a fraction of one
_WAVE_ITEMS = 1_000  # per core; the items of a wave are in memory
_SESSIONS = 3  # in which a wave is tried
_OUTCOMES = ["number", "outcome"]


class SparkTasks:
    """Runs items on a session's executors; opens the session when the first items come."""

    def __init__(self, open_session: Callable[[], SparkSession]) -> None:
        self._live = LiveSession(None, open_session)

    @property
    def parallelism(self) -> int:
        return cores_of(self._live.get())

    def run(
        self, title: str, function: Callable[[T], R], items: Iterable[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        """Implements ``TaskRunner.run``."""
        wave: list[T] = []
        total = 0
        cores = 0
        for item in items:
            cores = cores or self.parallelism
            wave.append(item)
            total += size(item)
            if total >= _WAVE_BYTES * cores or len(wave) >= _WAVE_ITEMS * cores:
                yield from self._run_wave(title, function, wave, size)
                wave, total = [], 0
        if wave:
            yield from self._run_wave(title, function, wave, size)

    def _run_wave(
        self, title: str, function: Callable[[T], R], wave: Sequence[T], size: Callable[[T], int]
    ) -> Iterator[tuple[T, R]]:
        done = self._outcomes(title, function, wave, size)
        for number, item in enumerate(wave):
            outcome = done[number]
            if isinstance(outcome, UnavailableError | InternalError):
                raise outcome
            if not isinstance(outcome, TidelogError):
                yield item, outcome

    def _outcomes(
        self, title: str, function: Callable[[T], R], wave: Sequence[T], size: Callable[[T], int]
    ) -> dict[int, Any]:
        """Returns what the function returned or raised for each item, by number."""
        for left in reversed(range(_SESSIONS)):
            session = self._live.get()
            try:
                lots = _lots(wave, size, session)
                with named_job(session, f"tidelog-{title.partition(' ')[0]}", title):
                    return _run_job(
                        session, functools.partial(_run_lots, function, lots), len(lots)
                    )
            except Exception as exc:
                if left and not is_alive(session):
                    continue
                raise job_error(exc, "run the command again", runs_user_code=False) from exc
        raise InternalError("Spark: a wave ended without an outcome: report it")


def _lots(wave: Sequence[T], size: Callable[[T], int], session: SparkSession) -> list[bytes]:
    """Returns numbered items in pickled lots of about the same size."""
    count = cores_of(session) * LOTS_PER_CORE
    largest = sorted(enumerate(wave), key=lambda each: size(each[1]), reverse=True)
    return [pickle.dumps(largest[first::count]) for first in range(min(count, len(largest)))]


def _run_job(session: SparkSession, function: Any, lots: int) -> dict[int, Any]:
    columns = "number bigint, outcome binary"
    rows = numbered(session, lots).mapInArrow(function, columns).collect()
    return {row["number"]: pickle.loads(row["outcome"]) for row in rows}  # noqa: S301 - our own


def _run_lots(
    function: Callable[[Any], Any], lots: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task."""
    for batch in numbers:
        for lot in batch.column(0).to_pylist():
            for number, item in pickle.loads(lots[lot]):  # noqa: S301 - our own bytes
                try:
                    outcome = function(item)
                except Exception as exc:  # noqa: BLE001 - one item must not stop the others
                    outcome = unexpected("Spark task", exc)
                yield pa.record_batch(
                    [
                        pa.array([number], pa.int64()),
                        pa.array([pickle.dumps(outcome)], pa.binary()),
                    ],
                    ["number", "outcome"],
                )
    keep_modules()


_: type[TaskRunner] = SparkTasks
