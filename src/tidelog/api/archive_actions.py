"""Runs of archives and erasures from them: their options, and where metrics of runs go.

Metrics go to a file for a collector, a StatsD server or a Kafka group: ``ArchiveRunOptions`` names
them. :class:`RunMetrics` writes them after cycles, at most every 15 seconds, and when the run ends.

**Erasure** of events from an archive that has no topic, and its proof: :class:`ErasableArchive`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol, Unpack, overload

from tidelog.api.archive_view import ArchiveView
from tidelog.api.erasure import ProveOptions
from tidelog.api.pipelines import RunOptions
from tidelog.api.spark_workers import with_tasks
from tidelog.archive.archive import FormatOptions
from tidelog.archive.metrics import statsd_lines
from tidelog.archive.status import WaitingTimes
from tidelog.clock import Clock
from tidelog.coordination.audit import Why, user_at_host
from tidelog.erasure.archive_only import ErasedFromArchives, erase_archived
from tidelog.erasure.delete import ErasurePlan, plan_archive_erasure
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased_from_archive
from tidelog.errors import InvalidError, TidelogError, UnavailableError, contained
from tidelog.maintenance.erase import ArchivedEvents, ErasureWatch, erase_archived_and_prove
from tidelog.model import defaults
from tidelog.model.event import id_list
from tidelog.model.times import duration_ms
from tidelog.pipeline.pipeline import CycleReport
from tidelog.settings import check_options

__all__ = [
    "ArchiveRunOptions",
    "BackfillOptions",
    "DeadLetterOptions",
    "ErasableArchive",
    "RecordedRunOptions",
    "RedoOptions",
    "RunMetrics",
    "check_metrics_file",
    "send_statsd",
    "write_metrics_file",
]

_PACKET_BYTES = 1_400  # of a datagram, so that networks do not cut it
_EVERY_S = 15.0


class ArchiveRunOptions(RunOptions, total=False):
    """How an archive runs, beside ``follow`` and ``spark``."""

    metrics_file: str | os.PathLike[str] | None  # kept up to date with Prometheus metrics
    statsd: str | None  # HOST:PORT of a server that gets the metrics, as gauges
    kafka_group: str | None  # a consumer group whose offsets follow the positions
    who: str  # for the audit; default: the run leaves no record


class RecordedRunOptions(RunOptions, total=False):
    """How a run goes that leaves a record in the home's audit, such as a restore."""

    who: str  # default: user@host


class BackfillOptions(FormatOptions, RecordedRunOptions, total=False):
    """How a backfill writes files, and how it runs."""


class RedoOptions(RecordedRunOptions, total=False):
    """What a redo changes, and how it runs. Without a value: as the archive does."""

    parser: str | None
    transform: str | None


class DeadLetterOptions(RecordedRunOptions, total=False):
    """How dead letters are tried again. Without a value: as the archive does."""

    generation: int | None
    parser: str
    granularity: str | None
    time_zone: str | None


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


class ErasableArchive(ArchiveView):
    """What erases events from an archive, its files and its copies."""

    @overload
    def erase(
        self,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[True] = ...,
        **options: Unpack[ProveOptions],
    ) -> Proof: ...

    @overload
    def erase(
        self,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[False],
        **options: Unpack[ProveOptions],
    ) -> ErasedFromArchives: ...

    def erase(
        self,
        ids: str | Iterable[str] = (),
        *,
        key: bytes | None = None,
        why: str = "",
        prove: bool = True,
        **options: Unpack[ProveOptions],
    ) -> Proof | ErasedFromArchives:
        """Erases events from the files of the archive and of its copies, and returns the proof.

        Give ids, or a key. For an archive of another system, or of a topic that was deleted: while
        the topic exists, :meth:`Home.erase` erases from its archives too. Files are rewritten, what
        is left over is swept, and then every object that could hold the events is searched. The
        proof covers archives that this one was made of, and others of the same source: it names
        those that still hold one of the events. ``wait`` is how long to wait for ranges that may
        still write such an event. With ``spark``, a Spark master, tasks there search and rewrite.

        ``why``, ``who`` and the proof's hash go to the archive's audit. With ``prove=False`` it
        rewrites the files without a proof: it waits for no range, sweeps nothing, and returns what
        it found. A call that fails can be repeated.

        >>> home.delete_topic("orders")
        >>> proof = home.archives.get("daily").erase(ids=["order-3"], why="request 1234")
        >>> proof.verdict, proof.archive, proof.deleted.archived
        ('erased', 'daily', 1)
        >>> home.archives.get("daily").erase(ids=["order-2"], prove=False).events
        1
        """
        check_options("archive erase", options, ProveOptions, self.erase)
        wanted = id_list(ids)
        if bool(wanted) == (key is not None):
            raise InvalidError("archive erase: give ids or a key")
        who = options.get("who")
        because = Why(user_at_host(self._context.environ) if who is None else who, why)
        spark, conf = options.get("spark"), options.get("spark_conf")
        context = with_tasks(self._context, f"erase {self.name}", spark, conf)
        archive = self.reload()
        if not prove:
            return erase_archived(context, archive, because, wanted, key)
        wait_ms = duration_ms(options.get("wait") or defaults.ERASE_WAIT)
        watch, events = options.get("watch") or ErasureWatch(), ArchivedEvents(archive, wanted, key)
        return erase_archived_and_prove(context, events, because, wait_ms, watch)

    def plan_erase(self, ids: str | Iterable[str] = (), *, key: bytes | None = None) -> ErasurePlan:
        """Returns how many events :meth:`erase` would erase now, and where they are.

        Searches the files of the archive and of its copies. Erases nothing; if it meets a rewrite
        of files that died, it finishes that.

        >>> plan = home.archives.get("daily").plan_erase(ids=["order-2", "order-9"])
        >>> plan.partitions, plan.archives
        ({'orders/0': 1}, {'daily': 1})
        """
        wanted = id_list(ids)
        return plan_archive_erasure(self._context, self.reload(), wanted, key)

    def prove_erased(
        self,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        progress: Callable[[int], None] | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Proof:
        """Searches all objects that could hold erased events and returns what is left of them.

        For events that :meth:`erase` has erased. ``progress`` gets the bytes of each object. With
        ``spark``, a Spark master, tasks there search the files of archives. Changes no rows or
        objects. It removes what the files of a SQLite catalog still hold of deleted rows.
        :meth:`Home.record_proof` writes the proof's hash to the archive's audit.

        >>> home.delete_topic("orders")
        >>> home.archives.get("daily").prove_erased(ids=["order-1"]).verdict
        'not erased'
        """
        wanted = id_list(ids)
        context = with_tasks(self._context, f"prove {self.name}", spark, spark_conf)
        archive, tell = self.reload(), progress or (lambda _: None)
        return prove_erased_from_archive(context, archive, wanted, list(keys), tell)
