"""The file in which a command keeps its metrics, for a textfile collector.

What ``archive run`` does after its cycles: keep a file of metrics.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tidelog.api.archives import ArchiveHandle
from tidelog.archive.status import WaitingTimes
from tidelog.cli.pipeline_options import DriverWatch
from tidelog.errors import InvalidError, TidelogError, unexpected
from tidelog.home import Home
from tidelog.pipeline.cycle import CycleReport

__all__ = [
    "AfterCycles",
    "check_metrics_file",
    "write_metrics_file",
]


def check_metrics_file(file: Path | None) -> None:
    """Refuse a file in a folder that is not there or may not be written, before work begins."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise InvalidError(f"metrics file `{file}`: its folder is not there: make it")
    if not os.access(file.parent, os.W_OK):
        raise InvalidError(f"metrics file `{file}`: its folder may not be written: give the right")


def write_metrics_file(file: Path, text: str) -> None:
    """Put the text there, whole or not at all. ``InvalidError`` where the folder is gone."""
    check_metrics_file(file)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)


_METRICS_S = 15.0  # between two writes of the file


class AfterCycles:
    """Registers tables and writes metrics after cycles; an error does not stop the archive."""

    def __init__(self, home: Home, archive: ArchiveHandle, metrics: Path | None) -> None:
        self._clock = home.context.clock
        self._archive = archive
        check_metrics_file(metrics)
        self._metrics = metrics
        self._waiting = WaitingTimes()
        self._written_s: float | None = None

    def cycle(self, watch: DriverWatch, report: CycleReport) -> None:
        """One cycle has ended."""
        watch.cycle(report)
        with self._told(watch):
            self._write_metrics(_METRICS_S)

    def outage(self, watch: DriverWatch, error: TidelogError, wait_s: float) -> None:
        """Report that the source cannot be reached, and write that to the metrics."""
        watch.outage(error, wait_s)
        with self._told(watch):
            self._write_metrics(_METRICS_S)

    def finish(self) -> None:
        """The last cycle has ended; what could not be done until now is an error."""
        self._write_metrics(0.0)

    @contextlib.contextmanager
    def _told(self, watch: DriverWatch) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a full disk must not stop the archive
            watch.tell(f"after the cycle: {unexpected(f'archive `{self._archive.name}`', exc)}")

    def _write_metrics(self, every_s: float) -> None:
        now_s = self._clock.monotonic_s()
        if self._metrics is None or now_s - (self._written_s or -every_s) < every_s:
            return
        write_metrics_file(self._metrics, self._archive.metrics(self._waiting))
        self._written_s = now_s
