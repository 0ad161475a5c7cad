"""What a turn of the scribe does beyond topics: erases from archives and sweeps the whole home.

The scribe (``journal/scribe.py``) compiles topics and has the turn's order; these are its last
steps. ``Home.maintain``, ``Home.scribe`` and ``Home.sweep`` put both together. The commands
``scribe``, ``sweep`` and ``up`` and the scribe's function on AWS call these, and none has its own
steps. A turn erases in the background, without waiting; a purge (``purge``) waits for what is under
way.
"""

from __future__ import annotations

from dataclasses import replace

from tidelog.archive.erased_events import PartitionOffsets
from tidelog.context import Context
from tidelog.coordination.audit import forget_actions
from tidelog.coordination.pipeline_rows import is_detached, list_archives
from tidelog.erasure.delete_archived import (
    finish_archive,
    settled_offsets,
)
from tidelog.erasure.rewrite import ArchiveErasure, erase_from_archives
from tidelog.errors import (
    TidelogError,
    contained,
)
from tidelog.journal.compile import compile_partition
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.listing import MovedError, covering
from tidelog.journal.scribe import ScribeOptions, Trouble, Turn
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.status import read_heads
from tidelog.log.topics import list_topics, read_head
from tidelog.maintenance.pipeline_sweep import PipelineSweep, sweep_archives
from tidelog.model import layout
from tidelog.model.topic import Topic

__all__ = ["ArchiveEraser", "ArchiveTurns", "sweep_everything"]

_Made = frozenset[tuple[str, int]]
"""Generations of archives."""

_Seen = tuple[int, int, str]
"""The counts of amendments and erasures in heads, and the version of the last audit record."""

_Starts = tuple[int, ...]


class ArchiveEraser:
    """Carries deletes of all topics into archives, again and again; for a daemon.

    Also compiles journals that hold erased events below their partition's start: no row waits for
    these, so no compile would be due. A topic without new deletes costs a read of its heads and its
    last audit record. Carries deletes into each new generation too. Finishes erasures from archives
    that crashed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._done: dict[str, tuple[_Seen, _Made]] = {}  # by incarnation: what archives have
        self._compiled: dict[str, tuple[_Seen, _Starts]] = {}  # the same for trimmed events
        self.troubles: list[TidelogError] = []  # of the last turn; they are retried

    def turn(self) -> list[ArchiveErasure]:
        """Carries what there is to carry now, and retries what failed before.

        A topic or an archive with an error does not stop the others; see ``troubles``.
        """
        self.troubles = []
        reports: list[ArchiveErasure] = []
        archives = list(list_archives(self._context))
        made = frozenset((each.incarnation, n) for each in archives for n in each.formats)
        for topic in list_topics(self._context):
            if topic.state == "ready":
                with contained(f"topic `{topic.name}`", self.troubles.append):
                    reports += self._topic(topic, made)
        for archive in archives:
            if archive.state == "ready" and not is_detached(self._context, archive):
                with contained(f"archive `{archive.name}`", self.troubles.append):
                    reports += finish_archive(self._context, archive)
        return reports

    def _topic(self, topic: Topic, made: _Made) -> list[ArchiveErasure]:
        heads = read_heads(self._context, topic)
        audit = layout.audit_partition(topic.incarnation)
        last = next(iter(self._context.catalog.scan(audit, limit=1, reverse=True)), None)
        seen = (
            sum(head.amendments for head in heads),
            sum(head.erasures for head in heads),
            "" if last is None else last.version,
        )
        starts = tuple(head.start for head in heads)
        to_compile = (seen, starts) != self._compiled.get(topic.incarnation)
        to_carry = (seen, made) != self._done.get(topic.incarnation)
        if last is None or not (to_compile or to_carry):
            return []
        deleted = settled_offsets(self._context, topic)
        if to_compile and compile_trimmed(self._context, topic, deleted):
            self._compiled[topic.incarnation] = seen, starts
        if not to_carry:
            return []
        errors: list[TidelogError] = []
        reports = erase_from_archives(self._context, topic, deleted, errors.append)
        self.troubles += errors
        if not errors and not any(report.waiting for report in reports):
            self._done[topic.incarnation] = seen, made
        return reports


def compile_trimmed(context: Context, topic: Topic, deleted: PartitionOffsets) -> bool:
    """Compiles journals that hold deleted events below the start of their partition.

    A trim deleted their rows, or they never existed: only archives had the events. Returns whether
    everything is done; False while another process compiles such a partition.
    """
    done = True
    for partition, offsets in deleted.items():
        head, _ = read_head(context, topic, partition)
        below = {each for each in offsets if each < head.start}
        if not below or head.start == head.next:
            continue
        try:
            runs = list(covering(context, topic, partition, head, (head.start, head.start + 1)))
        except MovedError:
            done = False
            continue
        held = (run.trimmed(head.start) for run in runs if run.journal is not None)
        if not all(map(below.isdisjoint, held)):
            reports = list(compile_partition(context, topic, partition, CompilePolicy.trimmed()))
            done &= not any(report.busy for report in reports)
    return done


def sweep_everything(context: Context, grace_ms: int, accept_loss: frozenset[str]) -> SweepReport:
    """Sweeps topics, then archives and pipelines; raises an error of the latter at the end."""
    swept = sweep_home(context, grace_ms, accept_loss)
    forget_actions(context)
    return _sum_reports(swept, sweep_archives(context, grace_ms))


class ArchiveTurns:
    """The part of a scribe's turn for archives; remembers which deletes they have."""

    def __init__(self, context: Context, how: ScribeOptions) -> None:
        self._context = context
        self._how = how
        self._eraser = ArchiveEraser(context)

    def __call__(self, turn: Turn) -> Turn:
        """Carries deletes into archives, and sweeps these if topics were swept.

        Errors become troubles of the turn, and the next turn retries.
        """
        troubles: list[TidelogError] = []
        events, swept = 0, turn.swept
        with contained("erasures from archives", troubles.append):
            events = sum(each.events for each in self._eraser.turn())
        troubles += self._eraser.troubles
        with contained("sweep of archives", troubles.append):
            if swept is not None and self._how.grace_ms is not None:
                forget_actions(self._context)
                archives = sweep_archives(self._context, self._how.grace_ms)
                troubles += archives.unlisted
                swept = _sum_reports(swept, archives)
        more = tuple(Trouble("", each) for each in troubles)
        return replace(turn, swept=swept, erased=events, troubles=(*turn.troubles, *more))


def _sum_reports(topics: SweepReport, pipelines: PipelineSweep) -> SweepReport:
    """Returns what both sweeps did."""
    return replace(
        topics,
        objects_deleted=topics.objects_deleted + pipelines.objects_deleted,
        bytes_deleted=topics.bytes_deleted + pipelines.bytes_deleted,
        objects_young=topics.objects_young + pipelines.objects_young,
        uploads_aborted=topics.uploads_aborted + pipelines.uploads_aborted,
        unlisted=(*topics.unlisted, *pipelines.unlisted),
        pipelines=pipelines.pipelines,
        commits_merged=pipelines.commits_merged,
    )
