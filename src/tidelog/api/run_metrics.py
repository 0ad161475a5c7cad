"""Where the metrics of a run go: a file for a collector, a StatsD server or a Kafka group.

``ArchiveRunOptions`` names them. :class:`RunMetrics` writes them after cycles, at most every 15
seconds, and when the run ends.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Protocol

from tidelog.api.archive_options import ArchiveRunOptions
from tidelog.api.pipelines import RunOptions
from tidelog.archive.metrics import statsd_lines
from tidelog.archive.status import WaitingTimes
from tidelog.clock import Clock
from tidelog.errors import InvalidError, TidelogError, UnavailableError, contained
from tidelog.pipeline.pipeline import CycleReport

__all__ = ["RunMetrics", "check_metrics_file", "send_statsd", "write_metrics_file"]

_PACKET_BYTES = 1_400  # of a datagram, so that networks do not cut it
_EVERY_S = 15.0


def check_metrics_file(file: Path) -> None:
    """Raises ``InvalidError`` if the file's folder is missing or cannot be written."""
    if not file.parent.is_dir():
        raise InvalidError(f"metrics file `{file}`: its folder is not there: make it")
    if not os.access(file.parent, os.W_OK):
        raise InvalidError(f"metrics file `{file}`: its folder may not be written: give the right")


def write_metrics_file(file: Path, text: str) -> None:
    """Writes a text, whole or not at all. Raises ``InvalidError`` like ``check_metrics_file``."""
    check_metrics_file(file)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)


def send_statsd(address: str, text: str) -> None:
    """Sends Prometheus metrics to a StatsD server, as gauges in datagrams.

    Raises ``InvalidError`` for a bad address, and ``UnavailableError``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InvalidError(f"statsd `{address}`: give HOST:PORT")
    packets: list[str] = []
    for line in statsd_lines(text):
        if packets and len(packets[-1]) + len(line) < _PACKET_BYTES:
            packets[-1] += f"\n{line}"
        else:
            packets.append(line)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as sender:
            for packet in packets:
                sender.sendto(packet.encode(), target)
    except OSError as exc:
        raise UnavailableError(f"statsd `{address}`: cannot be sent to ({exc}): try again") from exc


class _MeasuredArchive(Protocol):
    """An archive handle, as far as metrics need it."""

    name: str

    def metrics(self, waiting: WaitingTimes | None = None) -> str: ...

    def publish_offsets(self, group: str) -> int: ...


class RunMetrics:
    """Writes the metrics of one run. An error does not stop the archive: ``on_error`` gets it."""

    def __init__(self, clock: Clock, archive: _MeasuredArchive, options: ArchiveRunOptions) -> None:
        file = options.get("metrics_file")
        self._clock = clock
        self._archive = archive
        self._options = options
        self._file = None if file is None else Path(file)
        self._statsd = options.get("statsd")
        self._group = options.get("kafka_group")
        self._waiting = WaitingTimes()
        self._written_s: float | None = None
        if self._file is not None:
            check_metrics_file(self._file)

    def watch(self) -> RunOptions:
        """Returns the options of the run, with callbacks that also write the metrics."""
        on_cycle, on_outage = self._options.get("on_cycle"), self._options.get("on_outage")

        def cycle(report: CycleReport) -> None:
            if on_cycle is not None:
                on_cycle(report)
            self._write_if_due()

        def outage(error: TidelogError, wait_s: float) -> None:
            if on_outage is not None:
                on_outage(error, wait_s)
            self._write_if_due()

        watched = self._options.copy()
        watched["on_cycle"], watched["on_outage"] = cycle, outage
        return watched

    def finish(self) -> None:
        """Writes the metrics a last time. Raises the error if that fails."""
        if self._group is not None:
            self._archive.publish_offsets(self._group)
        if self._file is None and self._statsd is None:
            return
        text = self._archive.metrics(self._waiting)
        if self._file is not None:
            write_metrics_file(self._file, text)
        if self._statsd is not None:
            send_statsd(self._statsd, text)

    def _write_if_due(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._written_s is not None and now_s - self._written_s < _EVERY_S:
            return
        self._written_s = now_s
        with contained(f"archive `{self._archive.name}`", self._options.get("on_error", _ignore)):
            self.finish()


def _ignore(_: object) -> None:
    pass
