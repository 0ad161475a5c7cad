"""The account of a source partition: what became of every offset, by rows or by files.

**By rows.** Two heads and two rows are enough, so a million commits cost no more than one. Only if
dead letters were erased are their manifests read, because a replay may have replaced the files. An
account that does not add up is read again, because a driver, a replay or an erasure may have moved
on between two rows.

**By files.** A recount takes from rows and manifests how many events were read, dropped, deleted or
never there. The files show how many are archived or dead letters now. The manifests' own counts of
events in files, and the totals of the head, are compared with what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidelog.archive.coverage import without
from tidelog.archive.verify_checks import Problem
from tidelog.catalog.update import read_if_stable
from tidelog.context import Context
from tidelog.coordination.ownership import put_held
from tidelog.coordination.pipeline_rows import (
    ReplayedRange,
    Replays,
    read_erased,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.model import layout
from tidelog.model.archive import Account, account_of
from tidelog.model.pipeline import (
    FileEntry,
    Gap,
    Manifest,
    PreviousAccount,
    Progress,
    joined_gaps,
    offsets_between,
)
from tidelog.model.topic import decode_row, encode_row

__all__ = [
    "Recount",
    "check_before",
    "check_head",
    "note_before",
    "read_account",
    "read_before",
]


def read_account(context: Context, pipeline: str, partition: str) -> Account | None:
    """Returns the account of a source partition; None if it has not begun."""
    account: Account | None = None

    def is_read() -> bool | None:
        nonlocal account
        head = read_progress(context, pipeline, partition)
        account = None if head is None else _account(context, pipeline, partition, head)
        if account is None or account.adds_up:
            return True
        return read_progress(context, pipeline, partition) == head or None

    read_if_stable(context, is_read)  # the last one counts, also if the head keeps changing
    return account


def note_before(
    context: Context, old: tuple[int, str], new: str, now_ms: int, reason: str = ""
) -> None:
    """Records what the previous generation accounted for, next to the heads of a new one.

    ``old`` is the number and pipeline of the previous one. Called before the new one is promoted,
    and again after a crash: the later record replaces the earlier. If two processes promote at
    once, the first record stays: the old heads are frozen, so both have the same numbers.
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
    """Returns what the previous generation accounted for, if this one was promoted."""
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
    archived = _archived_events(head) + _archived_events(replays) - erased.data - erased_again.data
    return account_of(partition, head, archived, dead)


def _archived_events(head: Progress) -> int:
    """Returns how many events a head's commits put into data files."""
    totals = head.totals
    return head.ordinal - totals.dead - totals.dropped - totals.left_out


Offsets = npt.NDArray[np.int64]


_KEEP = "keep everything as it is, and report it: no crash leaves this"


@dataclass
class Recount:
    """One source partition while it is counted."""

    partition: str
    problems: int = 0  # problems found before it began
    start: str = ""
    end: str = ""
    numbers: int = 0  # of the ranges, if positions are not offsets
    archived: int = 0  # events found in data files
    dead: int = 0  # events found in files of dead letters that count
    dropped: int = 0
    deleted: int = 0  # before they were read, or before they were written
    absent: int = 0
    erased: int = 0  # from files
    gaps: tuple[Gap, ...] = ()
    commits: int = 0
    # First and last of each run of offsets that was found.
    runs: list[Offsets] = field(default_factory=list)

    def add(self, manifest: Manifest) -> None:
        """Counts a range; ``found`` counts its data files."""
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
        """Counts a replay of dead letters; ``dead`` lists those before it.

        Events erased from the replaced files before the replay read them are in no file that
        counts. Nor are those that it left out, since they were being erased.
        """
        stretch = ReplayedRange.between(manifest.start, manifest.end)
        replaced = sum(file.events + file.erased for file in dead if stretch.holds(file))
        self.erased += replaced - manifest.read + manifest.left_out
        self.dropped += manifest.dropped
        self.erased += sum(file.erased for file in manifest.files if file.kind == "data")

    def add_dead(self, files: Iterable[FileEntry]) -> None:
        """Counts what was erased from the dead-letter files that count in the end."""
        self.erased += sum(file.erased for file in files)

    def found(self, kind: str, events: int) -> None:
        """Counts events that a file holds."""
        if kind == "dead":
            self.dead += events
        else:
            self.archived += events

    def held(self, runs: Offsets) -> None:
        """Adds the runs of offsets in the files of a range, or in files of dead letters."""
        if len(runs):
            self.runs.append(runs)

    def check_offsets(self) -> Iterator[Problem]:
        """Yields a problem for an offset that is in two files, and for a gap that holds offsets.

        Includes the files of all ranges, replays and dead letters.
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
        """Returns the account, from the recorded begin to the end of the last range."""
        begin = head.begin if head is not None else None
        decided = () if head is None else _decided_gaps(head)
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


def _decided_gaps(head: Progress) -> tuple[Gap, ...]:
    """Returns gaps that no range has, because nothing is read after them."""
    return tuple(gap for gap in head.gaps if gap.reason in ("remade", "parent", "vanished"))


def check_head(head: Progress | None, recount: Recount) -> Iterator[Problem]:
    """Yields a problem if a head has another begin, other gaps or counts than its ranges.

    Only if the head is at the end of the last range: otherwise there were commits since it was
    read.
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
    decided = _decided_gaps(head)
    gaps = tuple(gap for gap in head.gaps if gap not in decided)
    if said_counts != counts or gaps != recount.gaps:
        what = (
            f"its head counts (erased before, never there, in gaps) {said_counts} with "
            f"{len(head.gaps)} gaps, its ranges {counts} with {len(recount.gaps)}"
        )
        yield Problem("account", recount.partition, what, _KEEP)


def check_before(before: PreviousAccount, now: Account) -> Iterator[Problem]:
    """Yields a problem if a promoted generation lacks what the previous one accounted for."""
    do = (
        f"nothing: a forced promote lost it ({before.reason})"
        if before.reason
        else "restore it from a copy of the home, or backfill from a source that has it"
    )
    kind = "let-go" if before.reason else "account"
    for start, end, why in _missing_ranges(before, now):
        what = f"generation {before.generation} accounted for {start} to {end}, {why}"
        yield Problem(kind, now.partition, what, do)


def _missing_ranges(before: PreviousAccount, now: Account) -> Iterator[tuple[str, str, str]]:
    """Yields what a generation lacks of the previous one: start, end, and what is there instead."""
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
        if not gap.is_partial and gap.is_loss:  # a promote compares what files lack
            why = f"this one has a gap there: {gap.reason}"
            found.append((max(first, int(gap.start)), min(last, int(gap.end)), why))
    known = [(int(gap.start), int(gap.end)) for gap in before.gaps if not gap.is_partial]
    for start, end, why in found:
        for first_left, end_left in without([(start, end)], known):
            yield str(first_left), str(end_left), why
