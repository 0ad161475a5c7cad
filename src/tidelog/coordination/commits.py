"""Reads what pipelines have committed: the rows of ranges, and the manifests that they name.

Old commits are merged (``maintenance.pipeline_sweep``): one row and one manifest then cover many
ranges. ``read_commits`` and ``Manifests`` still return range after range. A scan is consistent only
page by page, so rows may be merged while it runs, and its result may lack ranges. Each range begins
where the one before it ends, and the newest rows are never merged. So a reader notices the gap and
continues in the merged row. A head that was read before may be older than the rows:
``read_commits_to`` leaves out what was committed since.

A reply may be damaged on its way, and a cache would keep it. So a manifest that does not decode is
read once more, past the cache, and only what fails twice counts as damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, dropwhile, groupby
from typing import NamedTuple

from tidelog.catalog.base import Row
from tidelog.context import Context
from tidelog.errors import CorruptError, NotFoundError
from tidelog.model import layout
from tidelog.model.pipeline import Commit, Manifest, read_manifest
from tidelog.model.topic import decode_row
from tidelog.store.base import Store, object_exists
from tidelog.store.wrappers import reread

__all__ = [
    "CommitRow",
    "Manifests",
    "load_manifest",
    "lost_rewrites",
    "manifest_of_range",
    "manifests_by_range",
    "newest_commits",
    "read_commit_rows",
    "read_commits",
    "read_commits_to",
    "read_manifests",
]


class CommitRow(NamedTuple):
    """A row of one range, or of several that were merged."""

    name: str
    version: str
    ordinal: int  # of its first event
    committed: Commit

    def ranges(self) -> Iterator[tuple[int, Commit]]:
        """Yields its ranges, each with the ordinal of its first event."""
        ordinal = self.ordinal
        for each in self.committed.each_range:
            yield ordinal, each
            ordinal += each.events

    def holds(self, start: str) -> bool:
        """Returns whether one of its ranges begins at a position."""
        return any(each.start == start for each in self.committed.each_range)

    @classmethod
    def of(cls, row: Row) -> CommitRow:
        committed = decode_row(row.value, Commit, f"commit `{row.row}`")
        return cls(row.row, row.version, int(row.row.split("/")[1]), committed)


def read_commits(
    context: Context, pipeline: str, partition: str, ordinal: int = 0
) -> Iterator[Commit]:
    """Yields the committed ranges from an ordinal on, in the order of the source."""
    after = ""
    for row in read_commit_rows(context, pipeline, partition, ordinal):
        is_known = row.holds(after)  # otherwise it is the first, or rows are missing
        for first, committed in row.ranges():
            is_known = is_known and committed.start != after
            if not is_known and first >= ordinal:
                yield committed
        after = row.committed.end


def newest_commits(context: Context, pipeline: str, partition: str, most: int) -> list[Commit]:
    """Returns up to ``most`` committed ranges, the newest first; for display only.

    A row that is merged meanwhile may show a range twice, or not at all.
    """
    where = layout.pipeline_partition(pipeline, partition)
    found: dict[tuple[int, str], Commit] = {}
    for row in context.catalog.scan(where, "commit/", "commit0", limit=most, reverse=True):
        for ordinal, committed in CommitRow.of(row).ranges():
            found.setdefault((ordinal, committed.start), committed)
    newest = sorted(found, reverse=True)[:most]
    return [found[each] for each in newest]


def read_commits_to(
    context: Context, pipeline: str, partition: str, position: str
) -> Iterator[Commit]:
    """Yields the ranges up to a head's position; leaves out what was committed since."""
    end = ""
    for committed in read_commits(context, pipeline, partition):
        if position in (committed.start, end):
            return
        yield committed
        end = committed.end


def read_commit_rows(
    context: Context, pipeline: str, partition: str, ordinal: int = 0
) -> Iterator[CommitRow]:
    """Yields the rows of these ranges, in the order of the source.

    The first rows may be of ranges before the ordinal. A row that was merged during the read may
    begin before the end of the previous row.
    """
    where = layout.pipeline_partition(pipeline, partition)
    rows = _rows_from(context, where, ordinal)
    last: CommitRow | None = None
    while (row := next(rows, None)) is not None:
        if last is not None and row.committed.start != last.committed.end:
            merged = _rows_after(context, where, last)
            if merged:  # otherwise ranges are missing, and reading on shows where
                rows = iter(merged)
                row = next(rows)
        yield row
        last = row


def load_manifest(store: Store, key: str) -> Manifest:
    """Returns a manifest. Raises ``NotFoundError``, and ``CorruptError`` for a damaged one."""
    return reread(store, key, lambda _: read_manifest(store.get(key), key))


def lost_rewrites(context: Context, pipeline: str, partition: str, target: str) -> Iterator[str]:
    """Yields missing manifests by which an erasure was to replace that of a file, or has begun to.

    A copy of the store has such a manifest if the erasure had decided it when the copy was made.
    """
    for row in read_commit_rows(context, pipeline, partition):
        if row.committed.rewrite and not object_exists(context.store, row.committed.rewrite):
            with suppress(NotFoundError, CorruptError):
                ranges = load_manifest(context.store, row.committed.manifest).each_range
                if any(file.target == target for each in ranges for file in each.files):
                    yield row.committed.rewrite


def manifests_by_range(
    store: Store, pipeline: str, partition: str
) -> dict[tuple[str, str], list[Manifest]]:
    """Returns what all manifests say of the ranges of a source partition, by start and end.

    Also those that no row names. A range is there as often as manifests have it.
    """
    found: dict[tuple[str, str], list[Manifest]] = {}
    folder = f"{layout.manifests(pipeline)}{layout.manifest_folder(partition)}/"
    for info in store.list(folder):
        with suppress(NotFoundError, CorruptError):  # swept meanwhile, or damaged
            for each in load_manifest(store, info.key).each_range:
                found.setdefault((each.start, each.end), []).append(each)
    return found


def read_manifests(
    context: Context, pipeline: str, partition: str, ordinal: int = 0
) -> Iterator[Manifest]:
    """Yields the manifests of those ranges. Raises ``NotFoundError`` or ``CorruptError``."""
    manifests = Manifests(context, pipeline, partition)
    for committed in read_commits(context, pipeline, partition, ordinal):
        yield manifests.of(committed)


class Manifests:
    """The manifests of ranges of one source partition; reads a merged one once for neighbors."""

    def __init__(self, context: Context, pipeline: str, partition: str) -> None:
        self._context = context
        self._pipeline = pipeline
        self._partition = partition
        self._held: tuple[str, Manifest] | None = None

    def of(self, committed: Commit) -> Manifest:
        """Returns what a range produced. Raises ``NotFoundError`` or ``CorruptError`` for damage.

        An erasure or a merge may have given the range another manifest since its row was read, and
        a sweep may have deleted the old one.
        """
        while True:
            try:
                return self._read(committed)
            except NotFoundError:
                every = read_commits(self._context, self._pipeline, self._partition)
                now = next((each for each in every if each.start == committed.start), committed)
                if now.manifest == committed.manifest:
                    raise
                committed = now

    def _read(self, committed: Commit) -> Manifest:
        key, held = committed.manifest, self._held
        if held is None or held[0] != key:
            held = self._held = (key, load_manifest(self._context.store, key))
        return manifest_of_range(held[1], committed)


def manifest_of_range(found: Manifest, committed: Commit) -> Manifest:
    """Returns the manifest of a range, from what its row names. Raises ``CorruptError``."""
    if not found.ranges:
        return found
    for each in found.ranges:
        if each.start == committed.start:
            return each
    raise CorruptError(
        f"manifest `{committed.manifest}`: has no range that begins at {committed.start}: keep it, "
        "and restore it from a copy",
        manifest=committed.manifest,
    )


def _rows_after(context: Context, where: str, last: CommitRow) -> list[CommitRow]:
    """Returns the current rows from where one has ended; empty if no range begins there.

    Rows may be merged at the same time: only reading the same rows twice proves that none has it.
    """
    after, ordinal = last.committed.end, last.ordinal + last.committed.events
    seen: list[tuple[str, str]] | None = None
    while True:
        rows = list(_rows_from(context, where, ordinal))
        found = list(dropwhile(lambda row: not row.holds(after), rows))
        names = [(row.name, row.version) for row in rows if row.ordinal <= ordinal]
        if found or names == seen:
            return found
        seen = names


def _rows_from(context: Context, where: str, ordinal: int) -> Iterator[CommitRow]:
    """Yields rows of ranges from an ordinal on, after those of the last ordinal before it.

    A merged row of the earlier ordinal may contain ranges from this one on. And a reader that knows
    where the earlier ones end notices what is merged before it reaches the others.
    """
    while True:
        before = _ordinal_before(context, where, ordinal)
        found = map(CommitRow.of, context.catalog.scan(where, _border(before), "commit0"))
        first = next(found, None)
        if first is None:
            return
        if before in (ordinal, first.ordinal):
            break  # otherwise it was merged since, into an earlier one
    for number, same in groupby(chain([first], found), key=lambda row: row.ordinal):
        yield from _in_chain_order(_untorn(context, where, number, list(same)))


def _ordinal_before(context: Context, where: str, ordinal: int) -> int:
    """Returns the last ordinal with a row before an ordinal.

    The ordinal itself if there is none.
    """
    rows = context.catalog.scan(where, "commit/", _border(ordinal), reverse=True) if ordinal else ()
    row = next(iter(rows), None)
    return ordinal if row is None else CommitRow.of(row).ordinal


def _untorn(context: Context, where: str, ordinal: int, rows: list[CommitRow]) -> list[CommitRow]:
    """Returns the rows of one ordinal, read again while some are merged between two pages.

    Two rows that no other row leads to show that; if they stay the same, it is damage.
    """
    while len(_starts(rows)) > 1:
        scan = context.catalog.scan(where, _border(ordinal), _border(ordinal + 1))
        again = list(map(CommitRow.of, scan))
        if again == rows or not again:
            break
        rows = again
    return rows


def _in_chain_order(rows: list[CommitRow]) -> Iterator[CommitRow]:
    """Yields ranges that begin at one ordinal, in order; all except the last are empty.

    Their rows are sorted by the text of a position, where 10 comes before 9.
    """
    left = {row.committed.start: row for row in rows}
    for start in sorted(_starts(rows)):
        at = start
        while at in left:
            yield left[at]
            at = left.pop(at).committed.end


def _starts(rows: Sequence[CommitRow]) -> set[str]:
    """Returns where rows begin that do not continue another one of them."""
    return {row.committed.start for row in rows} - {row.committed.end for row in rows}


def _border(ordinal: int) -> str:
    """Returns the name before all rows of an ordinal."""
    return layout.commit_row(ordinal, "")
