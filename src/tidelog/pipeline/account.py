"""Reading the account of a source partition from its rows: what became of every offset.

From two heads and two rows, so that a million commits cost no more than one. Only where dead
letters were erased are the manifests read that have any: a replay may have replaced the files that
they were erased from.
"""

from __future__ import annotations

from tidelog.log.archives import read_erased, read_progress
from tidelog.log.base import Log
from tidelog.log.replays import Replays, replay_pipeline
from tidelog.model.account import Account, account_of
from tidelog.model.pipeline import Progress

__all__ = ["read_account"]


def read_account(
    log: Log, pipeline: str, partition: str, head: Progress | None = None
) -> Account | None:
    """Returns the account of a source partition; None where nothing has begun.

    ``head`` is the partition's, where it was read already.
    """
    head = read_progress(log, pipeline, partition) if head is None else head
    if head is None:
        return None
    replays = read_progress(log, replay_pipeline(pipeline), partition) or Progress("", 0, 0)
    erased = read_erased(log, pipeline, partition)
    erased_again = read_erased(log, replay_pipeline(pipeline), partition)
    dead = head.totals.dead - replays.ordinal + replays.totals.dead
    if erased.dead or erased_again.dead:
        found = Replays(log, pipeline, partition).dead()
        dead = sum(file.events for file, counts in found if counts)
    archived = _written(head) + _written(replays) - erased.data - erased_again.data
    return account_of(partition, head, archived, dead)


def _written(head: Progress) -> int:
    """How many events a head's commits put into data files."""
    totals = head.totals
    return head.ordinal - totals.dead - totals.dropped - totals.left_out
