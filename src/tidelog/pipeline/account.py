"""Reading the account of a source partition from its rows: what became of every offset.

From two heads and two rows, so that a million commits cost no more than one. Only where dead
letters were erased are the manifests read that have any: a replay may have replaced the files that
they were erased from. What does not add up is read once more, since a driver, a replay or an
erasure may have moved on between two rows.
"""

from __future__ import annotations

from tidelog.log.archives import read_erased, read_partitions, read_progress
from tidelog.log.base import Log
from tidelog.log.hold import put_held
from tidelog.log.replays import Replays, replay_pipeline
from tidelog.model import layout
from tidelog.model.account import Account, account_of
from tidelog.model.pipeline import Before, Progress
from tidelog.model.run import decode_row, encode_row

__all__ = ["note_before", "read_account", "read_before"]

_ATTEMPTS = 5  # to read rows that others keep changing


def read_account(log: Log, pipeline: str, partition: str) -> Account | None:
    """Returns the account of a source partition; None where nothing has begun."""
    account: Account | None = None
    for _ in range(_ATTEMPTS):
        head = read_progress(log, pipeline, partition)
        if head is None:
            return None
        account = _account(log, pipeline, partition, head)
        if account.adds_up or read_progress(log, pipeline, partition) == head:
            break
    return account


def note_before(log: Log, old: tuple[int, str], new: str, now_ms: int, reason: str = "") -> None:
    """Record beside the heads of a generation what the one before it accounted for.

    ``old`` is that one's number and pipeline. Called before the new one is promoted, and again
    after a crash: what is recorded then replaces what was. Where two promote at once, the record of
    the one that comes first stays: the old heads are frozen, so both have the same numbers.
    """
    generation, pipeline = old
    for partition in read_partitions(log, pipeline):
        account = read_account(log, pipeline, partition)
        if account is None or account.begin is None:
            continue
        before = Before(
            generation=generation,
            begin=account.begin.position,
            end=account.end,
            span=account.span,
            archived=account.archived,
            dead=account.dead,
            dropped=account.dropped,
            erased=account.erased,
            absent=account.absent,
            gaps=account.gaps,
            at_ms=now_ms,
            reason=reason,
        )
        where = layout.pipeline_partition(new, partition)
        row = log.catalog.get(where, layout.BEFORE)
        version = None if row is None else row.version
        what = f"account of `{partition}` before generation {generation + 1}"
        put_held(log, where, layout.BEFORE, encode_row(before), version, what)


def read_before(log: Log, pipeline: str, partition: str) -> Before | None:
    """Returns what the generation before this one accounted for, if it was promoted."""
    row = log.catalog.get(layout.pipeline_partition(pipeline, partition), layout.BEFORE)
    return None if row is None else decode_row(row.value, Before, f"row `{row.row}`")


def _account(log: Log, pipeline: str, partition: str, head: Progress) -> Account:
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
