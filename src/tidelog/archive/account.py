"""Reading the account of a source partition from its rows: what became of every offset.

From two heads and two rows, so that a million commits cost no more than one. Only where dead
letters were erased are the manifests read that have any: a replay may have replaced the files that
they were erased from. What does not add up is read once more, since a driver, a replay or an
erasure may have moved on between two rows.

Recounting a source partition from its files: what became of every offset.

Rows and manifests say how many events were read, dropped, deleted or never there; the files say how
many are archived or dead letters now. What manifests say of the events in files does not count, nor
do the totals of the head: both are compared with what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidelog.archive.coverage import without
from tidelog.archive.verify_rows import Problem
from tidelog.context import Context
from tidelog.coordination.dead_letter_rows import ReplayedRange, Replays, replay_pipeline
from tidelog.coordination.ownership import put_held
from tidelog.coordination.pipeline_rows import read_erased, read_partitions, read_progress
from tidelog.model import layout
from tidelog.model.account import Account, account_of
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.pipeline import (
    FileEntry,
    Gap,
    Manifest,
    PreviousAccount,
    Progress,
    joined_gaps,
    offsets_between,
)

__all__ = [
    "Recount",
    "check_before",
    "check_head",
    "note_before",
    "read_account",
    "read_before",
]

_ATTEMPTS = 5  # to read rows that others keep changing


def read_account(context: Context, pipeline: str, partition: str) -> Account | None:
    """Returns the account of a source partition; None where nothing has begun."""
    account: Account | None = None
    for _ in range(_ATTEMPTS):
        head = read_progress(context, pipeline, partition)
        if head is None:
            return None
        account = _account(context, pipeline, partition, head)
        if account.adds_up or read_progress(context, pipeline, partition) == head:
            break
    return account


def note_before(
    context: Context, old: tuple[int, str], new: str, now_ms: int, reason: str = ""
) -> None:
    """Record beside the heads of a generation what the one before it accounted for.

    ``old`` is that one's number and pipeline. Called before the new one is promoted, and again
    after a crash: what is recorded then replaces what was. Where two promote at once, the record of
    the one that comes first stays: the old heads are frozen, so both have the same numbers.
    """
    generation, pipeline = old
    for partition in read_partitions(context, pipeline):
        account = read_account(context, pipeline, partition)
        if account is None or account.begin is None:
            continue
        before = PreviousAccount(
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
        row = context.catalog.get(where, layout.BEFORE)
        version = None if row is None else row.version
        what = f"account of `{partition}` before generation {generation + 1}"
        put_held(context, where, layout.BEFORE, encode_row(before), version, what)


def read_before(context: Context, pipeline: str, partition: str) -> PreviousAccount | None:
    """Returns what the generation before this one accounted for, if it was promoted."""
    row = context.catalog.get(layout.pipeline_partition(pipeline, partition), layout.BEFORE)
    return None if row is None else decode_row(row.value, PreviousAccount, f"row `{row.row}`")


def _account(context: Context, pipeline: str, partition: str, head: Progress) -> Account:
    replays = read_progress(context, replay_pipeline(pipeline), partition) or Progress("", 0, 0)
    erased = read_erased(context, pipeline, partition)
    erased_again = read_erased(context, replay_pipeline(pipeline), partition)
    dead = head.totals.dead - replays.ordinal + replays.totals.dead
    if erased.dead or erased_again.dead:
        found = Replays(context, pipeline, partition).dead()
        dead = sum(file.events for file, counts in found if counts)
    archived = _written(head) + _written(replays) - erased.data - erased_again.data
    return account_of(partition, head, archived, dead)


def _written(head: Progress) -> int:
    """How many events a head's commits put into data files."""
    totals = head.totals
    return head.ordinal - totals.dead - totals.dropped - totals.left_out


Offsets = npt.NDArray[np.int64]


_KEEP = "keep everything as it is, and report it: no crash leaves this"


@dataclass
class Recount:
    """One source partition, as it is counted."""

    partition: str
    problems: int = 0  # that were found before it began
    start: str = ""
    end: str = ""
    numbers: int = 0  # that the ranges have, where positions are not offsets
    archived: int = 0  # events found in data files
    dead: int = 0  # events found in files of dead letters that count
    dropped: int = 0
    deleted: int = 0  # before they were read, or before they were written
    absent: int = 0
    erased: int = 0  # from files
    gaps: tuple[Gap, ...] = ()
    commits: int = 0
    runs: list[Offsets] = field(default_factory=list)  # found offsets, as first and last of runs

    def add(self, manifest: Manifest) -> None:
        """Count a range; its data files are counted by ``found``."""
        self.start = self.start if self.commits else manifest.start
        self.commits += 1
        self.end = manifest.end
        self.gaps = joined_gaps(self.gaps, manifest.lost)
        skipped = sum(gap.offsets for gap in manifest.lost)
        self.numbers += manifest.read + manifest.deleted + manifest.absent + skipped
        self.dropped += manifest.dropped
        self.deleted += manifest.deleted + manifest.left_out
        self.absent += manifest.absent
        self.erased += sum(file.erased for file in manifest.files if file.kind == "data")

    def add_replay(self, manifest: Manifest, dead: Iterable[FileEntry]) -> None:
        """Count a replay of dead letters, which ``dead`` are before it.

        What was erased from the files that it replaces, before it read them, is in none that count.
        """
        stretch = ReplayedRange.between(manifest.start, manifest.end)
        replaced = sum(file.events + file.erased for file in dead if stretch.holds(file))
        self.erased += replaced - manifest.read
        self.dropped += manifest.dropped
        self.erased += sum(file.erased for file in manifest.files if file.kind == "data")

    def add_dead(self, files: Iterable[FileEntry]) -> None:
        """Count what was erased from the files of dead letters that count in the end."""
        self.erased += sum(file.erased for file in files)

    def found(self, kind: str, events: int) -> None:
        """Count events that a file holds."""
        if kind == "dead":
            self.dead += events
        else:
            self.archived += events

    def held(self, offsets: Offsets) -> None:
        """Keep the offsets that a range's files hold, or files of dead letters."""
        if len(offsets):
            ordered = np.sort(offsets)
            breaks = np.flatnonzero(np.diff(ordered) != 1)
            firsts = ordered[np.concatenate([[0], breaks + 1])]
            lasts = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
            self.runs.append(np.stack([firsts, lasts], axis=1))

    def check_offsets(self) -> Iterator[Problem]:
        """Yields a problem for an offset that is in two files, and for a gap that holds offsets.

        Files of all ranges, replays and dead letters count.
        """
        if not self.runs:
            return
        runs = np.concatenate(self.runs)
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
        over = np.flatnonzero(runs[1:, 0] <= np.maximum.accumulate(runs[:, 1])[:-1])
        if len(over):
            what = f"offset {int(runs[1:, 0][over[0]])} is in two of its files"
            yield Problem("double", self.partition, what, _KEEP)
        for gap in self.gaps:
            start, end = gap.start, gap.end
            if gap.is_partial or offsets_between(start, end) is None:
                continue
            inside = (runs[:, 0] < int(end)) & (runs[:, 1] >= int(start))
            if inside.any():
                what = f"files hold offsets of its gap from {start} to {end}"
                yield Problem("account", self.partition, what, _KEEP)

    def account(self, head: Progress | None) -> Account:
        """Returns the account, from the begin that is recorded to the end of the last range."""
        begin = head.begin if head is not None else None
        decided = () if head is None else _decided(head)
        start = begin.position if begin is not None else self.start
        end = self.end if self.commits else start
        offsets = offsets_between(start, end)
        return Account(
            partition=self.partition,
            begin=begin,
            end=end,
            span=self.numbers if offsets is None else offsets,
            is_numbered=offsets is None,
            archived=self.archived,
            dead=self.dead,
            dropped=self.dropped,
            erased=self.erased + self.deleted,
            absent=self.absent,
            gaps=(*self.gaps, *decided),
        )


def _decided(head: Progress) -> tuple[Gap, ...]:
    """Gaps that no range has, since nothing is read behind them."""
    return tuple(gap for gap in head.gaps if gap.reason in ("remade", "parent", "vanished"))


def check_head(head: Progress | None, recount: Recount) -> Iterator[Problem]:
    """Yields a problem where a head has another begin, other gaps or counts than its ranges.

    Only where it is at the end of the last one: else more were committed since it was read.
    """
    if head is None or not recount.commits:
        return
    if head.begin is None or head.begin.position != recount.start:
        said = "nothing" if head.begin is None else head.begin.position
        what = f"its head says that it begins at {said}, its first range begins at {recount.start}"
        yield Problem("account", recount.partition, what, _KEEP)
    if head.position != recount.end:
        return
    totals = head.totals
    said_counts = (totals.deleted + totals.left_out, totals.absent, totals.skipped)
    counts = (recount.deleted, recount.absent, sum(gap.offsets for gap in recount.gaps))
    decided = _decided(head)
    gaps = tuple(gap for gap in head.gaps if gap not in decided)
    if said_counts != counts or gaps != recount.gaps:
        what = (
            f"its head counts (erased before, never there, in gaps) {said_counts} with "
            f"{len(head.gaps)} gaps, its ranges {counts} with {len(recount.gaps)}"
        )
        yield Problem("account", recount.partition, what, _KEEP)


def check_before(before: PreviousAccount, now: Account) -> Iterator[Problem]:
    """Yields a problem where a promoted generation lacks what the one before accounted for."""
    do = (
        f"nothing: a forced promote lost it ({before.reason})"
        if before.reason
        else "restore it from a copy of the home, or backfill from a source that has it"
    )
    kind = "let-go" if before.reason else "account"
    for start, end, why in _lacking(before, now):
        what = f"generation {before.generation} accounted for {start} to {end}, {why}"
        yield Problem(kind, now.partition, what, do)


def _lacking(before: PreviousAccount, now: Account) -> Iterator[tuple[str, str, str]]:
    """What a generation lacks of the one before it: start, end, and what is there instead."""
    span = offsets_between(before.begin, before.end)
    begin = now.begin.position if now.begin is not None else now.end
    if span is None or offsets_between(begin, now.end) is None:
        if now.span < before.span:
            why = f"{before.span} events; this one has {now.span}"
            yield before.begin, before.end, why
        return
    first, last = int(before.begin), int(before.end)
    found = [
        (first, min(last, int(begin)), f"this one begins at {begin}"),
        (max(first, int(now.end)), last, f"this one ends at {now.end}"),
    ]
    for gap in now.gaps:
        if not gap.is_partial:
            why = f"this one has a gap there: {gap.reason}"
            found.append((max(first, int(gap.start)), min(last, int(gap.end)), why))
    known = [(int(gap.start), int(gap.end)) for gap in before.gaps]
    for start, end, why in found:
        for first_left, end_left in without([(start, end)], known):
            yield str(first_left), str(end_left), why
