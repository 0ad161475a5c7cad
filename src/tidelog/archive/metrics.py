"""Figures of archives and pipelines: metrics in Prometheus's text format, and an archive's history.

``docs/alerts.yml`` uses these names. Each metric has the archive as a label; those of a source
partition also have that. An unknown value, such as the lag of a source that cannot be reached, is
omitted, never reported as 0.

**The history** says when ranges were committed, and how many events each had. It reads the rows of
the newest ranges only, and no object. Of a long history it shows the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.archive.status import (
    ArchiveStatus,
    PartitionStatus,
    WaitingTimes,
    lag_limit_ms,
    read_status,
)
from tidelog.context import Context
from tidelog.coordination.commits import newest_commits
from tidelog.coordination.pipeline_rows import (
    list_pipelines,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.model.archive import Account, Archive
from tidelog.model.pipeline import DriverFailure, Progress
from tidelog.pipeline.failures import read_failures

__all__ = [
    "ArchiveHistory",
    "ArchivedRange",
    "HistoryBar",
    "metrics_text",
    "pipelines_text",
    "read_history",
    "statsd_lines",
    "status_text",
]


_SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Number = float | int | None


class _Metric(NamedTuple):
    """A metric of archives, or of their source partitions."""

    name: str
    kind: str  # gauge or counter
    what: str


class _OfArchive(NamedTuple):
    metric: _Metric
    value: Callable[[ArchiveStatus], Number]


class _OfPartition(NamedTuple):
    metric: _Metric
    value: Callable[[PartitionStatus, int], Number]


def _of_account(name: str, what: str, value: Callable[[Account], int]) -> _OfPartition:
    """Returns a metric of the account of a source partition; it has no line without one."""
    metric = _Metric(name, "gauge", what)
    return _OfPartition(metric, lambda each, _: value(each.account) if each.account else None)


_ARCHIVES = (
    _OfArchive(
        _Metric("driver_up", "gauge", "1 when a driver of the archive is alive"),
        lambda status: int(status.drivers > 0),
    ),
    _OfArchive(
        _Metric("drivers_silent", "gauge", "Drivers that died, or cannot reach the catalog"),
        lambda status: status.silent,
    ),
    _OfArchive(
        _Metric("source_up", "gauge", "1 when the source of the archive could be reached"),
        lambda status: int(not status.source_error),
    ),
    _OfArchive(
        _Metric("outage_seconds", "gauge", "Time since its driver lost the source; 0: it has it"),
        lambda status: _since_s(status.failure, status.read_ms),
    ),
    _OfArchive(
        _Metric("max_lag_seconds", "gauge", "How long an event may wait by the archive's policy"),
        lambda status: lag_limit_ms(status.archive) / 1000,
    ),
    _OfArchive(
        _Metric("generation", "gauge", "The generation that readers are promoted to"),
        lambda status: status.generation,
    ),
    _OfArchive(
        _Metric("watermark_timestamp_seconds", "gauge", "All events before this time are archived"),
        lambda status: _seconds(status.archive.watermark_ms),
    ),
)

_PARTITIONS = (
    _OfPartition(
        _Metric("lag_events", "gauge", "Events that wait to be archived"),
        lambda each, _: each.lag,
    ),
    _OfPartition(
        _Metric("lag_seconds", "gauge", "Age of the oldest event that waits; 0 when none does"),
        lambda each, _: each.lag_s,
    ),
    _OfPartition(
        _Metric("intent_age_seconds", "gauge", "How long a range is under way; 0 when none is"),
        lambda each, now_ms: max(0, now_ms - (each.intent_ms or now_ms)) / 1000,
    ),
    _OfPartition(
        _Metric("source_lost", "gauge", "1 when the source has lost events not yet archived"),
        lambda each, _: int(bool(each.lost_to or each.unread)),
    ),
    _OfPartition(
        _Metric("failing_seconds", "gauge", "How long its driver fails there; 0: it does not"),
        lambda each, now_ms: _since_s(each.failure, now_ms),
    ),
    _OfPartition(
        _Metric("source_remade", "gauge", "1 when the source partition was deleted and made again"),
        lambda each, _: int(bool(each.remade)),
    ),
    _OfPartition(
        _Metric("dead_letters", "gauge", "Dead letters that no replay has placed"),
        lambda each, _: each.dead,
    ),
    _OfPartition(
        _Metric("dead_letters_total", "counter", "Dead letters so far"),
        lambda each, _: each.totals.dead,
    ),
    _OfPartition(
        _Metric("lost_ranges_total", "counter", "Ranges that the source had lost, and accepted"),
        lambda each, _: each.totals.lost,
    ),
    _OfPartition(
        _Metric("events_total", "counter", "Events read from the source so far"),
        lambda each, _: each.events,
    ),
    _of_account(
        "offsets",
        "Offsets from where the archive begins to its position",
        lambda account: account.span,
    ),
    _of_account(
        "offsets_archived",
        "Offsets whose events are in data files",
        lambda account: account.archived,
    ),
    _of_account(
        "offsets_dead", "Offsets whose events are dead letters", lambda account: account.dead
    ),
    _of_account(
        "offsets_dropped",
        "Offsets whose events the transform dropped",
        lambda account: account.dropped,
    ),
    _of_account(
        "offsets_erased",
        "Offsets whose events were deleted or erased",
        lambda account: account.erased,
    ),
    _of_account(
        "offsets_never_there",
        "Offsets that never held an event for readers",
        lambda account: account.absent,
    ),
    _of_account(
        "offsets_in_gaps",
        "Offsets that were skipped for a recorded reason",
        lambda account: account.skipped,
    ),
    _of_account(
        "offsets_unaccounted",
        "Offsets that do not add up; 0 when all do",
        lambda account: account.span - account.total,
    ),
    _OfPartition(
        _Metric("left_out_total", "counter", "Events left out, as they were erased before"),
        lambda each, _: each.totals.left_out,
    ),
    _OfPartition(
        _Metric("files_total", "counter", "Files written so far"),
        lambda each, _: each.files_written,
    ),
    _OfPartition(
        _Metric("bytes_total", "counter", "Bytes of those files"),
        lambda each, _: each.bytes_written,
    ),
    _OfPartition(
        _Metric("last_commit_timestamp_seconds", "gauge", "When a range was last committed"),
        lambda each, _: _seconds(each.last_commit_ms),
    ),
)


class _OfPipeline(NamedTuple):
    metric: _Metric
    value: Callable[[Progress], Number]


_PIPELINES = (
    _OfPipeline(
        _Metric("events_total", "counter", "Events read from the source so far"),
        lambda head: head.ordinal,
    ),
    _OfPipeline(
        _Metric("left_out_total", "counter", "Events erased from the target before they came"),
        lambda head: head.totals.left_out,
    ),
    _OfPipeline(
        _Metric("lost_ranges_total", "counter", "Ranges that the source had lost, and accepted"),
        lambda head: head.totals.lost,
    ),
    _OfPipeline(
        _Metric("last_commit_timestamp_seconds", "gauge", "When a range was last committed"),
        lambda head: _seconds(head.totals.committed_ms or None),
    ),
)


def metrics_text(
    context: Context, archives: Iterable[Archive], waiting: WaitingTimes | None = None
) -> str:
    """Returns the metrics of some archives, read now.

    Pass the same ``waiting`` to repeated calls, so they do not ask sources for the same events.
    """
    known = waiting or WaitingTimes()
    active = [each for each in archives if each.ended is None]  # an ended archive raises no alarm
    return status_text([read_status(context, archive, waiting=known) for archive in active])


def status_text(found: Iterable[ArchiveStatus]) -> str:
    """Returns the metrics of archives whose status was already read."""
    return "".join(f"{line}\n" for line in _lines(list(found)))


def pipelines_text(context: Context) -> str:
    """Returns the metrics of named pipelines, from one row per partition."""
    found = [
        ([("pipeline", named.name), ("partition", partition)], head)
        for named in list_pipelines(context)
        for partition in read_partitions(context, named.incarnation)
        if (head := read_progress(context, named.incarnation, partition)) is not None
    ]
    lines: list[str] = []
    for metric, value in _PIPELINES:
        lines += _head(metric, "pipeline")
        for labels, head in found:
            lines += _line(metric, labels, value(head), "pipeline")
    lines += _failure_lines(context)
    return "".join(f"{line}\n" for line in lines)


def _failure_lines(context: Context) -> Iterator[str]:
    """Yields failures of pipelines: by source partition, or without a name the whole source."""
    metric = _Metric("failing_seconds", "gauge", "How long its driver fails there")
    yield from _head(metric, "pipeline")
    now_ms = context.clock.now_ms()
    for named in list_pipelines(context):
        for partition, failure in read_failures(context, named.incarnation).items():
            labels = [("pipeline", named.name), ("partition", partition)]
            yield from _line(metric, labels, _since_s(failure, now_ms), "pipeline")


def _lines(found: list[ArchiveStatus]) -> Iterator[str]:
    for metric, value in _ARCHIVES:
        yield from _head(metric)
        for status in found:
            yield from _line(metric, [("archive", status.archive.name)], value(status))
    for metric, value_of in _PARTITIONS:
        yield from _head(metric)
        for status in found:
            for each in status.partitions:
                labels = [("archive", status.archive.name), ("partition", each.partition)]
                yield from _line(metric, labels, value_of(each, status.read_ms))


def _head(metric: _Metric, of: str = "archive") -> Iterator[str]:
    yield f"# HELP tidelog_{of}_{metric.name} {metric.what}."
    yield f"# TYPE tidelog_{of}_{metric.name} {metric.kind}"


def _line(
    metric: _Metric, labels: list[tuple[str, str]], value: Number, of: str = "archive"
) -> Iterator[str]:
    if value is not None:
        shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
        yield f"tidelog_{of}_{metric.name}{{{shown}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _since_s(failure: DriverFailure | None, now_ms: int) -> float:
    return 0 if failure is None else max(0, now_ms - failure.since_ms) / 1000


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def statsd_lines(text: str) -> list[str]:
    """Returns metrics as lines of StatsD: gauges, with the values of labels as parts of names.

    ``tidelog_archive_lag_events{archive="daily"} 5`` is ``tidelog.archive_lag_events.daily:5|g``.
    """
    found = []
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None or line.startswith("#"):
            continue
        name, labels, value = sample.groups()
        parts = [re.sub(r"[^A-Za-z0-9_-]+", "_", each) for _, each in _LABEL.findall(labels or "")]
        dotted = ".".join(["tidelog", name.removeprefix("tidelog_"), *parts])
        found.append(f"{dotted}:{value}|g")
    return found


_RANGES_MAX = 5_000  # in one answer
_WIDTHS_MS = (
    *(1_000 * seconds for seconds in (1, 5, 10, 30)),
    *(60_000 * minutes for minutes in (1, 5, 15, 30)),
    *(3_600_000 * hours for hours in (1, 3, 6, 12, 24, 7 * 24, 30 * 24)),
)


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """A range of a source partition that is in the archive."""

    partition: str
    start: str
    end: str
    events: int
    files: int
    dead: int
    committed_ms: int
    is_replay: bool = False  # of dead letters


@dataclass(frozen=True, slots=True)
class HistoryBar:
    """What was committed in one stretch of time."""

    start_ms: int
    events: int = 0
    files: int = 0
    dead: int = 0
    ranges: int = 0


@dataclass(frozen=True, slots=True)
class ArchiveHistory:
    """Bars of equal width, the oldest first, and the newest ranges, the newest first."""

    width_ms: int
    bars: tuple[HistoryBar, ...]
    ranges: tuple[ArchivedRange, ...]
    is_whole: bool  # otherwise older ranges are left out


def read_history(
    context: Context, archive: Archive, generation: int | None = None, bars: int = 60
) -> ArchiveHistory:
    """Returns the history of a generation in this many bars, the last of which is now."""
    own = archive.pipeline(generation)
    found: list[ArchivedRange] = []
    is_whole = True
    for pipeline in (own, replay_pipeline(own)):
        partitions = read_partitions(context, pipeline)
        most = max(1, _RANGES_MAX // max(1, len(partitions)))
        for partition in partitions:
            commits = newest_commits(context, pipeline, partition, most)
            is_whole = is_whole and len(commits) < most
            found += [
                ArchivedRange(
                    partition=partition,
                    start=each.start,
                    end=each.end,
                    events=each.events,
                    files=each.files,
                    dead=each.dead,
                    committed_ms=each.committed_ms,
                    is_replay=pipeline != own,
                )
                for each in commits
            ]
    found.sort(key=lambda each: (-each.committed_ms, each.partition, each.start))
    width_ms, counted = _bars(found, max(1, bars), context.clock.now_ms())
    return ArchiveHistory(width_ms, counted, tuple(found), is_whole)


def _bars(
    ranges: Sequence[ArchivedRange], most: int, now_ms: int
) -> tuple[int, tuple[HistoryBar, ...]]:
    """Returns the width of the bars up to now, and the bars, also those without a range."""
    times = [each.committed_ms for each in ranges if each.committed_ms > 0]
    if not times:
        return _WIDTHS_MS[0], ()
    first, last = min(times), max(*times, now_ms)
    fitting = (each for each in _WIDTHS_MS if last // each - first // each < most)
    width = next(fitting, -(-(last - first + 1) // most))
    begin = last // width - most + 1
    counts = [[0, 0, 0, 0] for _ in range(most)]
    for each in ranges:
        if each.committed_ms > 0:
            bar = counts[each.committed_ms // width - begin]
            for at, more in enumerate((each.events, each.files, each.dead, 1)):
                bar[at] += more
    return width, tuple(HistoryBar((begin + at) * width, *bar) for at, bar in enumerate(counts))
