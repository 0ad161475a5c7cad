"""Maintenance of a whole home: compiles, erases from archives, sweeps.

``Home.maintain``, ``Home.scribe`` and ``Home.sweep`` call it. So do, through ``Home``, the commands
``scribe``, ``sweep`` and ``up`` and the scribe's function on AWS. None has its own steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tidelog.context import Context
from tidelog.erasure.from_archives import closed_offsets, keep_deletions, settled_offsets
from tidelog.erasure.rewrite import ArchiveErasure, erase_from_archives
from tidelog.errors import TidelogError, UnavailableError, contained
from tidelog.journal.scribe import ScribeOptions, Trouble, Turn
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.maintenance.erase import WAIT_MS, ArchiveEraser, erase_until_settled
from tidelog.maintenance.pipeline_sweep import PipelineSweep, sweep_archives
from tidelog.model.topic import Topic

__all__ = ["ArchiveTurns", "carry_closed_deletes", "carry_deletes", "sweep_everything"]


def sweep_everything(context: Context, grace_ms: int, accept_loss: frozenset[str]) -> SweepReport:
    """Sweeps topics, then archives and pipelines; raises an error of the latter at the end."""
    swept = sweep_home(context, grace_ms, accept_loss)
    return _sum_reports(swept, sweep_archives(context, grace_ms))


def carry_deletes(context: Context, topic: Topic) -> None:
    """Erases from archives what was deleted from a topic, before the topic itself is deleted.

    Its audit is deleted with it, and nothing else says what archives still have to erase. Raises
    ``UnavailableError`` while an unfinished range may hold such an event.
    """
    _check_settled(topic, erase_from_archives(context, topic, settled_offsets(context, topic)))


def carry_closed_deletes(context: Context, topic: Topic) -> None:
    """Does the same after the heads of the topic are closed, for deletes that ended since.

    No later delete can reach the topic, so this is all that archives ever have to erase.
    """
    errors: list[TidelogError] = []
    deleted = closed_offsets(context, topic)
    keep_deletions(context, topic)
    done = erase_until_settled(context, topic, deleted, WAIT_MS, errors.append)
    for error in errors:
        raise error
    _check_settled(topic, done)


def _check_settled(topic: Topic, done: Iterable[ArchiveErasure]) -> None:
    waiting = sorted({each.archive for each in done if each.waiting})
    if waiting:
        raise UnavailableError(
            f"topic `{topic.name}`: a range of archive `{waiting[0]}` is under way that may hold a "
            "deleted event: run the archive, or drop the generation, then delete the topic again"
        )


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
