"""An erasure to its end: compiled, carried into archives, swept.

Deletes are seen by readers at once; their bytes go by these steps, each of which may die and be
done again. The scribe does the same in the background, with its grace.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.home import Home
from tidelog.journal.compile import CompileReport, compile_topic
from tidelog.journal.policy import Policy
from tidelog.log.sweep import SweepReport, sweep_home
from tidelog.log.topics import read_head
from tidelog.model.topic import Topic
from tidelog.pipeline.erase import ArchiveErasure, erase_from_archives
from tidelog.pipeline.proof import deleted_offsets
from tidelog.pipeline.sweep import PipelineSweep, sweep_archives

__all__ = ["ArchiveEraser", "Erasure", "carry_out"]


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was done to let erased bytes go."""

    compiled: CompileReport
    archives: list[ArchiveErasure]
    swept: SweepReport
    staging: PipelineSweep


def carry_out(home: Home, topic: Topic, grace_ms: int) -> Erasure:
    """Let all deletes of a topic reach its journals and its archives, and sweep what is left.

    With a grace of 0 what was erased is gone on return; readers under way read the catalog again.
    """
    compiled = compile_topic(home.log, topic, Policy.everything())
    archives = erase_from_archives(home, topic, deleted_offsets(home, topic))
    swept = sweep_home(home.log, grace_ms)
    return Erasure(compiled, archives, swept, sweep_archives(home, grace_ms))


class ArchiveEraser:
    """Carries deletes of all topics into archives, again and again; for a daemon.

    A topic without new deletes costs a read of its heads.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._done: dict[str, int] = {}  # by incarnation: amendments that archives have

    def turn(self) -> list[ArchiveErasure]:
        """What there is to carry now; what could not be carried yet is tried again."""
        reports: list[ArchiveErasure] = []
        for topic in self._home.topics():
            if topic.state == "ready":
                reports += self._topic(topic)
        return reports

    def _topic(self, topic: Topic) -> list[ArchiveErasure]:
        heads = [read_head(self._home.log, topic, p)[0] for p in range(topic.partitions)]
        amendments = sum(head.amendments for head in heads)
        if amendments == self._done.get(topic.incarnation, 0):
            return []
        deleted = deleted_offsets(self._home, topic)
        reports = erase_from_archives(self._home, topic, deleted) if deleted else []
        if not any(report.waiting for report in reports):
            self._done[topic.incarnation] = amendments
        return reports
