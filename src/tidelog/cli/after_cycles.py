"""What ``archive run`` does after its cycles: register tables, keep a file of metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tidelog.cli.driving import Watch
from tidelog.cli.metrics_file import check_metrics_file, write_metrics_file
from tidelog.errors import TidelogError, unexpected
from tidelog.home import Home
from tidelog.pipeline.archive import find_archive
from tidelog.pipeline.cycle import CycleReport
from tidelog.pipeline.metrics import metrics_text
from tidelog.pipeline.status import Waiting
from tidelog.pipeline.tables import register

__all__ = ["AfterCycles"]

_METRICS_S = 15.0  # between two writes of the file


class AfterCycles:
    """An error here is told, and does not stop the archive: the next cycle tries again."""

    def __init__(self, home: Home, name: str, metrics: Path | None) -> None:
        self._home = home
        self._name = name
        check_metrics_file(metrics)
        self._metrics = metrics
        self._waiting = Waiting()
        self._written_s: float | None = None

    def cycle(self, watch: Watch, report: CycleReport) -> None:
        """One cycle has ended."""
        watch.cycle(report)
        with self._told(watch):
            if report.committed:
                register(self._home, find_archive(self._home, self._name))
            self._write_metrics(_METRICS_S)

    def outage(self, watch: Watch, error: TidelogError, wait_s: float) -> None:
        """Report that the source cannot be reached, and write that to the metrics."""
        watch.outage(error, wait_s)
        with self._told(watch):
            self._write_metrics(_METRICS_S)

    def finish(self) -> None:
        """The last cycle has ended; what could not be done until now is an error."""
        register(self._home, find_archive(self._home, self._name))
        self._write_metrics(0.0)

    @contextlib.contextmanager
    def _told(self, watch: Watch) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a full disk must not stop the archive
            watch.tell(f"after the cycle: {unexpected(f'archive `{self._name}`', exc)}")

    def _write_metrics(self, every_s: float) -> None:
        now_s = self._home.log.clock.monotonic_s()
        if self._metrics is None or now_s - (self._written_s or -every_s) < every_s:
            return
        text = metrics_text(self._home, [find_archive(self._home, self._name)], self._waiting)
        write_metrics_file(self._metrics, text)
        self._written_s = now_s
