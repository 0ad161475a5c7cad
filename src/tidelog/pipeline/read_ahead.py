"""Reads ahead: the next range is read while the last one is copied and committed.

Steps 5 to 7 of a cycle (``cycle``) become these where more of a source partition waits:

1. record, in one write: the key of the manifest into the
   ``intent``, and with it the range to read ahead. That one
   begins where the manifest ends, so nothing is guessed      → crash: the next driver commits the
                                                                decided range, forgets the other
                                                                one, and plans again
2. after that, plan what is read ahead, and look for what was
   erased. Its tasks stage files while step 3 runs            → crash: the same; a sweep deletes
                                                                what was staged
3. publish the decided range                                  → crash: the same
4. commit it, in one write: ``commit`` row, ``head`` to the
   end, and the range that is read ahead is the ``intent``    → crash: the next driver does it
5. when its tasks have ended, go to step 1 with what they
   staged; without more to read, to step 5 of the cycle       → crash: as there

What was read ahead counts only if step 4 succeeded: then its ``intent`` is there, undecided, and it
begins where the committed range ended. Otherwise what it staged is deleted. The ``intent`` names
the range from before its first event is read until it is committed, so erasures, proofs, sweeps and
seeks wait for it as for any other range (``Intent.reach``).

A range that ended before a failed cut is followed by none, nor is one whose source cannot count
what waits, or whose source tracks files by what was committed. A cycle without more to read takes
no thread and no further write; one that reads ahead saves the write of each next ``intent``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import NamedTuple

from tidelog.connectors.source import Source, SourcePartition, SourceRange
from tidelog.model.pipeline import Intent, Manifest
from tidelog.pipeline.base import Pipeline, Task
from tidelog.pipeline.ranges import RangeResult, choose_cuts, run_ranges

__all__ = [
    "FindNext",
    "NextRange",
    "RangeRounds",
    "Results",
    "intend_next",
    "read_no_more",
    "run_aside",
]


class NextRange(NamedTuple):
    """What to read after a range that is decided."""

    limit: str
    parts: int  # in about how many tasks


FindNext = Callable[[SourcePartition, str], NextRange | None]
"""Returns what to read from a position on; None to read no more in this cycle."""

Results = Iterable[tuple[SourcePartition, RangeResult]]


def read_no_more(partition: SourcePartition, start: str) -> NextRange | None:
    """Reads nothing ahead."""
    return None


def intend_next(
    source: Source, intent: Intent, manifest: Manifest, wanted: NextRange, now_ms: int
) -> Intent:
    """Returns the range to read ahead of a decided one: it begins where that one ends."""
    partition = SourcePartition.named(manifest.partition)
    whole = SourceRange(partition, manifest.end, wanted.limit)
    return Intent(
        manifest.end,
        wanted.limit,
        began_ms=now_ms,
        incarnation=intent.incarnation,
        cuts=choose_cuts(source, whole, wanted.parts),
    )


class RangeRounds:
    """Runs the tasks of one round, and those of the next one in a thread of its own."""

    def __init__(self, pipeline: Pipeline, drivers: int) -> None:
        """``drivers`` is how many share the rate of the pipeline."""
        self._pipeline = pipeline
        self._drivers = drivers
        self._ahead: Future[Results] | None = None

    def run(self, tasks: Sequence[Task]) -> Results:
        """Returns the results of tasks, as they end."""
        return run_ranges(self._pipeline, tasks, self._drivers) if tasks else ()

    def start(self, tasks: Sequence[Task]) -> None:
        """Starts the tasks of the next round, if there are any."""
        if tasks:
            self._ahead = run_aside(lambda: list(self.run(tasks)))

    def next_results(self) -> Results | None:
        """Returns the results of the round that was started, when all are there; None: of none."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.result()

    def __enter__(self) -> RangeRounds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for tasks that still run, since they use what the caller may close.

        A second stop signal ends the process without that.
        """
        is_over = kind is None or issubclass(kind, Exception)
        if self._ahead is not None and is_over:
            wait([self._ahead])


def run_aside(call: Callable[[], Results]) -> Future[Results]:
    """Returns the future of a call in a thread that does not keep the process alive.

    Makes the call in this thread if no other one can be started.
    """
    done: Future[Results] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - raised by the future's result
            done.set_exception(exc)

    try:
        threading.Thread(target=run, name="tidelog-ahead", daemon=True).start()
    except RuntimeError:
        run()
    return done
