"""Sweeps pipelines: deletes what attempts staged and recorded and no process will finish.

1. list what is staged, and all manifests, each with its source partition and epoch
2. after that, read heads, intents and commits
3. delete what no intent and no commit names, if its epoch has no unfinished range and it is older
   than the grace period; for manifests, below the epoch under which a driver last looked for ranges
   that a restored catalog lost (``pipeline.forgotten_ranges``)

Only an attempt at an intent stages and records. Its output is named when it decides that intent, in
a write that expects the head and the intent unchanged. So an epoch of a source partition has an
unfinished range only if the partition's head has that epoch, an owner and an undecided intent, or
one with a range that is read next (``pipeline.ranges``). A frozen head has none. Nor
has one that its driver has released: the sweep reads the head before the intent, so what the driver
decided is named. So what is not named when the rows are read will never be. What is young, or
belongs to a driver that may be alive, stays for a later sweep. After a crash anywhere, the next
sweep has less to do. An epoch above that of its head comes from before a restore of the catalog:
what was staged under it stays until the head has reached it.

What a topic's sink stages again without erased events is next to its original, and is named with
it. If that topic was deleted, all that its pipeline staged is deleted: nothing can publish it.

An erasure (``erasure.rewrite``) is the exception: it needs no head. Its commit's row says so before
anything is staged. While one does, what is staged under the erasure's epoch stays, named or not. A
sweep of an archive finishes such an erasure: it may have crashed, and its topic may be deleted. It
also corrects entries of tables that a crashed register left stale next to an erasure.

Before that, a sweep merges a bounded number of old commits of archives (see Retention).

A playback by Spark has no rows. It deletes what it staged, unless it is killed; then the sweep
does, once nothing of it is younger than the grace period.

**Retention.** A driver writes a row and a manifest for each range: 8,760 a year per source
partition if it commits every hour. All of them list files, so none can be deleted. A sweep merges
old ones:

1. list the rows; choose neighbors that are not among the newest
   ``limits.COMMITS_UNMERGED``, and that no erasure changes       → crash: nothing
2. read their manifests, then the head; put a merged manifest
   with those of all its ranges, under the head's epoch           → crash: an object that no row
                                                                    names, for a later sweep
3. swap, in one write that expects the head and every row: the
   first row has all ranges, and the keys of the manifests that
   the merged one replaces; the other rows are deleted            → crash: manifests stay longer
4. a day later, delete the replaced manifests                     → crash: the next sweep resumes
5. remove their keys from the row                                 → done

A sweep deletes a manifest that no row names only after a driver with a later epoch has written the
head, so step 3 fails if the merged manifest may be deleted. Of two processes that merge the same
rows, one fails at step 3. So does one whose rows an erasure has begun to change; a later erasure
changes the merged manifest as a whole. A process with older rows can read their manifests for at
least a day, and looks up the range again when they are deleted. The same holds for a catalog
restored from before the swap.

At least sixteen rows are merged, of about equal size. So each range is merged only a few times, and
what remains is the newest rows, some of each size, and full ones, with ``limits.MERGED_RANGES_MAX``
ranges or ``limits.MERGED_FILES_MAX`` files.

A named pipeline resumes from its head alone. Its commits and manifests serve only the pipelines
that add what it missed (``CompletingSource``), and only after the position these have reached. So a
sweep deletes commits that all of them have passed, if they are older than a week or if a source
partition has more than ``limits.PIPELINE_COMMITS_MAX`` younger ones: first the rows, in source
order, then their manifests. A crash in between leaves manifests that nothing names, for a sweep
under a later epoch. A pipeline that is created later to add missed events begins at the oldest
remaining commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from tidelog.archive.archive import removed_archives
from tidelog.archive.delete import finish_ending, finish_removal, remove_late_copies
from tidelog.archive.generations import finish_removals, remove_strays
from tidelog.archive.tables import settle_tables
from tidelog.catalog.base import Change, Check, Delete, Put, Row
from tidelog.connectors.by_url import files_at, pipelines_behind, pipelines_of, source_at
from tidelog.context import Context
from tidelog.coordination.commits import CommitRow, Manifests, load_manifest, read_commit_rows
from tidelog.coordination.pipeline_rows import (
    is_outside,
    list_archives,
    list_pipelines,
    read_intent,
    read_partitions,
    read_progress,
)
from tidelog.coordination.trusted_time import is_old, trusted_now_ms
from tidelog.erasure.rewrite import finish_rewrites
from tidelog.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    TidelogError,
    UnknownOutcomeError,
    contained,
    raise_first,
)
from tidelog.log.maintenance.unfinished_writes import abort_uploads
from tidelog.model import layout, limits
from tidelog.model.archive import Archive
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import (
    Commit,
    Manifest,
    MergedRange,
    NamedPipeline,
    Progress,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.registry import is_target_deleted
from tidelog.store.base import ObjectInfo, Store, put_same

__all__ = [
    "REPLACED_KEPT_MS",
    "PipelineSweep",
    "compact_commits",
    "drop_replaced",
    "forget_history",
    "sweep_archives",
    "sweep_pipeline",
]

REPLACED_KEPT_MS = 24 * 3600 * 1000
_AT_ONCE = limits.CHANGES_MAX - 1  # rows of one swap, which also checks the head
_MIN = 16  # fewest rows to merge


def compact_commits(
    context: Context, pipeline: str, partition: str, now_ms: int, merges: int
) -> int:
    """Steps 1 to 3, up to ``merges`` times. Returns how many rows were deleted."""
    rows = list(read_commit_rows(context, pipeline, partition))
    gone = 0
    for group in _groups(rows[: -limits.COMMITS_UNMERGED]):
        if merges == 0:
            break
        merges -= 1
        with contextlib.suppress(CorruptError, NotFoundError):  # `archive verify` reports those
            gone += _merge(context, pipeline, partition, group, now_ms)
    return gone


def drop_replaced(context: Context, pipeline: str, partition: str, now_ms: int) -> int:
    """Steps 4 and 5. Returns how many manifests were deleted."""
    deleted = 0
    for row in list(read_commit_rows(context, pipeline, partition)):
        committed = row.committed
        if committed.replaced and is_old(now_ms, committed.merged_ms, REPLACED_KEPT_MS):
            context.store.delete(committed.replaced)
            deleted += len(committed.replaced)
            cleared = msgspec.structs.replace(committed, replaced=(), merged_ms=0)
            change = Put(row.name, encode_row(cleared), expect=row.version)
            where = layout.pipeline_partition(pipeline, partition)
            with contextlib.suppress(ConflictError, UnknownOutcomeError):
                context.catalog.write(where, change, write_id=context.ids.new())
    return deleted


def _groups(rows: Sequence[CommitRow]) -> Iterator[list[CommitRow]]:
    """Yields neighbors to merge, the oldest first."""
    group: list[CommitRow] = []
    for row in rows:
        if group and not _goes_with(group, row):
            if len(group) >= _MIN or (len(group) > 1 and not _fits([*group, row])):
                yield group
            group = []
        if not row.committed.rewrite and not row.committed.replaced and _fits([row]):
            group.append(row)
        if len(group) == _AT_ONCE:
            yield group
            group = []
    if len(group) >= _MIN:
        yield group


def _goes_with(group: Sequence[CommitRow], row: CommitRow) -> bool:
    """Returns whether a row may be merged with those before it.

    It must have about as many ranges, or more; a smaller one waits until it is merged itself. Names
    rise in a merged row, so a scan by name never sees a range twice.
    """
    last = group[-1]
    return (
        not row.committed.rewrite
        and not row.committed.replaced
        and last.committed.end == row.committed.start
        and last.name < row.name
        and _size(row) >= max(map(_size, group))
        and _fits([*group, row])
    )


def _size(row: CommitRow) -> int:
    """Returns about how many times rows were merged into this one."""
    ranges, size = len(row.committed.each_range), 0
    while ranges >= _MIN:
        ranges, size = ranges // _MIN, size + 1
    return size


def _fits(rows: Sequence[CommitRow]) -> bool:
    """Returns whether a merged row and its manifest are small enough, as far as rows show."""
    ranges = sum(len(row.committed.each_range) for row in rows)
    files = sum(row.committed.files for row in rows)
    return ranges <= limits.MERGED_RANGES_MAX and files <= limits.MERGED_FILES_MAX


def _merge(
    context: Context, pipeline: str, partition: str, rows: Sequence[CommitRow], now_ms: int
) -> int:
    """Steps 2 and 3 for some rows, or for half of them if they are too large."""
    manifests = Manifests(context, pipeline, partition)
    ranges = [manifests.of(each) for row in rows for each in row.committed.each_range]
    data = seal_json(_merged_manifest(ranges))
    where = layout.pipeline_partition(pipeline, partition)
    head = context.catalog.get(where, "head")
    if head is None or not _agree(rows, ranges):
        return 0
    progress = decode_row(head.value, Progress, f"head of `{partition}`")
    key = layout.manifest(pipeline, progress.epoch, partition, context.ids.new())
    row = encode_row(_merged_commit(rows, key, now_ms))
    if len(data) > limits.MERGED_BYTES_MAX or len(row) > limits.MERGED_ROW_BYTES_MAX:
        half = rows[: len(rows) // 2]
        return _merge(context, pipeline, partition, half, now_ms) if len(half) > 1 else 0
    if progress.closed:
        return 0
    put_same(context.store, key, data)
    changes: list[Change] = [Check("head", head.version), Put(rows[0].name, row, rows[0].version)]
    changes += [Delete(each.name, each.version) for each in rows[1:]]
    try:
        context.catalog.write(where, *changes, write_id=context.ids.new())
    except ConflictError:
        context.store.delete([key])  # nothing was written, so no row will ever name it
        return 0
    except UnknownOutcomeError:
        return 0  # the rows show the outcome to the next sweep
    return len(rows) - 1


def _agree(rows: Sequence[CommitRow], ranges: Sequence[Manifest]) -> bool:
    """Returns whether manifests match the ranges in rows; `archive verify` reports others."""
    said = [
        (first, each.start, each.end, each.events) for row in rows for first, each in row.ranges()
    ]
    return said == [(each.ordinal, each.start, each.end, each.read) for each in ranges]


def _merged_manifest(ranges: Sequence[Manifest]) -> Manifest:
    return Manifest(
        pipeline=ranges[0].pipeline,
        partition=ranges[0].partition,
        start=ranges[0].start,
        end=ranges[-1].end,
        ordinal=ranges[0].ordinal,
        read=sum(each.read for each in ranges),
        written=sum(each.written for each in ranges),
        dropped=sum(each.dropped for each in ranges),
        dead=sum(each.dead for each in ranges),
        left_out=sum(each.left_out for each in ranges),
        deleted=sum(each.deleted for each in ranges),
        absent=sum(each.absent for each in ranges),
        ranges=tuple(ranges),
    )


def _merged_commit(rows: Sequence[CommitRow], key: str, now_ms: int) -> Commit:
    each = [committed for row in rows for committed in row.committed.each_range]
    return Commit(
        manifest=key,
        start=each[0].start,
        end=each[-1].end,
        events=sum(one.events for one in each),
        files=sum(one.files for one in each),
        dead=sum(one.dead for one in each),
        committed_ms=each[-1].committed_ms,
        left_out=sum(one.left_out for one in each),
        ranges=tuple(
            MergedRange(
                start=one.start,
                end=one.end,
                events=one.events,
                files=one.files,
                dead=one.dead,
                committed_ms=one.committed_ms,
                left_out=one.left_out,
            )
            for one in each
        ),
        replaced=tuple(row.committed.manifest for row in rows),
        merged_ms=now_ms,
    )


_KEPT_MS = 7 * 24 * 3600 * 1000


def forget_history(context: Context, named: NamedPipeline) -> frozenset[str]:
    """Deletes the rows of old commits that no pipeline needs. Returns their manifests' keys."""
    followers = list(_followers(context, named.name))
    forgotten: set[str] = set()
    for partition in read_partitions(context, named.incarnation):
        heads = [read_progress(context, each, partition) for each in followers]
        reached = [head.position for head in heads if head is not None]
        if len(reached) < len(followers):
            continue  # one that has not begun needs all
        where = layout.pipeline_partition(named.incarnation, partition)
        old = list(_old(context, named, where, reached))
        for first in range(0, len(old), limits.CHANGES_MAX):
            some = old[first : first + limits.CHANGES_MAX]
            # By version: a late range may get the name of a row that is deleted here.
            changes = [Delete(row.row, row.version) for row, _ in some]
            with contextlib.suppress(ConflictError):  # another sweep deletes them too
                context.catalog.write(where, *changes, write_id=context.ids.new())
                forgotten.update(commit.manifest for _, commit in some)
    return frozenset(forgotten)


def _old(
    context: Context, named: NamedPipeline, where: str, reached: list[str]
) -> Iterator[tuple[Row, Commit]]:
    """Yields the first commits that are old and before all positions that others reached."""
    old_ms = trusted_now_ms(context) - _KEPT_MS
    source = source_at(context, named.source) if reached else None
    count = sum(1 for _ in context.catalog.scan(where, "commit/", "commit0"))
    too_many = count - limits.PIPELINE_COMMITS_MAX
    rows = context.catalog.scan(where, "commit/", "commit0")
    for _, same in groupby(rows, key=lambda row: row.row.split("/")[1]):
        young = False
        for row in same:
            too_many -= 1
            commit = decode_row(row.value, Commit, f"commit `{row.row}`")
            needed = source is not None and any(source.before(at, commit.end) for at in reached)
            if needed or (commit.committed_ms > old_ms and too_many < 0):
                young = True
            else:
                yield row, commit
        if young:
            return


def _followers(context: Context, name: str) -> Iterator[str]:
    """Yields the pipelines that read the commits of one."""
    for each in list_pipelines(context):
        if name in pipelines_behind(each.source):
            yield each.incarnation
    for archive in list_archives(context):
        if name in pipelines_behind(archive.source):
            reading = archive.in_state("live", "building")
            yield from (archive.pipeline(generation) for generation in reading)


_DELETES_AT_ONCE = 1_000  # objects, in one request


@dataclass(slots=True)
class PipelineSweep:
    """What a sweep of pipelines found and did."""

    pipelines: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    objects_young: int = 0  # kept only because of the grace period
    uploads_aborted: int = 0
    unlisted: list[TidelogError] = field(default_factory=list)  # of stores, as in ``SweepReport``
    commits_merged: int = 0  # rows of archives' commits that became part of others


def sweep_archives(context: Context, grace_ms: int) -> PipelineSweep:
    """Sweeps all generations of all archives, and all named pipelines; deletes retired ones.

    An archive or a pipeline with an error does not stop the others: it is raised at the end.
    """
    tally = PipelineSweep()
    errors: list[TidelogError] = []
    for archive in list_archives(context):
        if archive.state == "ready" and _is_ours(context, archive):
            with contained(f"archive `{archive.name}`", errors.append):
                _sweep_archive(context, archive, grace_ms, tally)
    for archive in removed_archives(context):
        if _is_ours(context, archive):
            with contained(f"removed archive `{archive.name}`", errors.append):
                remove_late_copies(context, archive)
    for named in list_pipelines(context):
        with contained(f"pipeline `{named.name}`", errors.append):
            old = forget_history(context, named) if named.state == "ready" else frozenset()
            if is_target_deleted(context, named):
                _sweep_staged(context, named.incarnation, grace_ms, tally)
            sweep_pipeline(context, named.incarnation, context.store, grace_ms, tally, old)
    with contained("playbacks", errors.append):
        _sweep_playbacks(context, grace_ms, tally)
    with contained("uploads", errors.append):
        _abort_uploads(context, grace_ms, tally)
    raise_first(errors)
    return tally


def sweep_pipeline(
    context: Context,
    pipeline: str,
    store: Store,
    grace_ms: int,
    tally: PipelineSweep,
    forgotten: frozenset[str] | None = None,
) -> bool:
    """Sweeps one pipeline, with its files staged in ``store``, and ``forgotten`` manifests.

    Returns whether an erasure is running in it, or has crashed there. ``forgotten`` is None for the
    pipeline of an archive. Its manifests stay until a driver has looked at them, because they may
    be all that is known about a range that a restored catalog lost.
    """
    staged = list(store.list(layout.staging_of(pipeline)))
    manifests = list(context.store.list(layout.manifests(pipeline)))
    named = _read_named(context, pipeline)
    tally.pipelines += 1
    old_ms = trusted_now_ms(context) - grace_ms
    unnamed = [info for info in staged if _staged_under(info.key) not in named.erasing]
    if forgotten is None:
        manifests = [info for info in manifests if _is_looked_at(info.key, named)]
        forgotten = frozenset()
    for where, found, made_under in (
        (store, unnamed, _staged_under),
        (context.store, manifests, _recorded_under),
    ):
        useless = [
            info
            for info in found
            if info.key in forgotten
            or not (named.has(info.key) or named.may_decide(*made_under(info.key)))
        ]
        young = [info for info in useless if info.modified_ms > old_ms]
        tally.objects_young += len(young)
        _delete(where, [info for info in useless if info.modified_ms <= old_ms], tally)
    return bool(named.erasing)


def _sweep_staged(context: Context, pipeline: str, grace_ms: int, tally: PipelineSweep) -> None:
    """Deletes everything that a pipeline staged, whether or not its rows name it."""
    old_ms = trusted_now_ms(context) - grace_ms
    staged = list(context.store.list(layout.staging_of(pipeline)))
    _delete(context.store, [info for info in staged if info.modified_ms <= old_ms], tally)


def _staged_under(key: str) -> tuple[str, int]:
    """Returns the ``manifest_folder`` and the epoch of something staged."""
    return layout.folder_of_staged(key), layout.staged_epoch(key)


def _recorded_under(key: str) -> tuple[str, int]:
    """Returns the ``manifest_folder`` and the epoch of a manifest."""
    return layout.folder_of_manifest(key), layout.manifest_epoch(key)


def _is_looked_at(key: str, named: _NamedObjects) -> bool:
    """Returns whether a driver has checked that a manifest is not of a lost range."""
    looked = named.looked.get(layout.folder_of_manifest(key), 0)
    return layout.manifest_epoch(key) < looked


def _sweep_archive(context: Context, archive: Archive, grace_ms: int, tally: PipelineSweep) -> None:
    if archive.ended is not None and archive.ended.removing:
        finish_removal(context, archive)
        return
    store = files_at(context, archive)
    archive = finish_ending(context, archive)
    for generation in archive.in_state("building", "live", "kept"):
        rewrites = False
        for each in pipelines_of(archive, generation):
            _compact(context, each, tally)
            rewrites |= sweep_pipeline(context, each, store, grace_ms, tally)
        if rewrites:
            finish_rewrites(context, archive, generation)
    remove_strays(context, finish_removals(context, archive))
    if context.identity.owns(archive.home):
        raise_first(settle_tables(context, archive))


def _compact(context: Context, pipeline: str, tally: PipelineSweep) -> None:
    """Merges old commits of an archive, and deletes the manifests that merged ones replaced."""
    now_ms = trusted_now_ms(context)
    for partition in read_partitions(context, pipeline):
        where = pipeline, partition, now_ms
        tally.objects_deleted += drop_replaced(context, *where)
        tally.commits_merged += compact_commits(context, *where, limits.MERGES_MAX)


def _is_ours(context: Context, archive: Archive) -> bool:
    """Returns whether to sweep it: what is outside a copied home belongs to the original."""
    return not is_outside(context, archive) or context.identity.owns(archive.home)


def _sweep_playbacks(context: Context, grace_ms: int, tally: PipelineSweep) -> None:
    """Sweeps what playbacks by Spark staged, each as a whole."""
    old_ms = trusted_now_ms(context) - grace_ms
    staged = context.store.list(layout.playback_stagings())
    for _, found in groupby(staged, lambda info: info.key.split("/")[1]):
        infos = list(found)
        if all(info.modified_ms <= old_ms for info in infos):
            _delete(context.store, infos, tally)
        else:
            tally.objects_young += len(infos)


def _abort_uploads(context: Context, grace_ms: int, tally: PipelineSweep) -> None:
    """Aborts uploads in the stores of archives; the home's own is swept with its topics."""
    ours = [each for each in list_archives(context) if _is_ours(context, each)]
    ours = [each for each in ours if each.state_name in ("ready", "ended")]
    stores = [files_at(context, each) for each in ours]
    for url, store in {store.url: store for store in stores}.items():
        if url != context.store.url:
            before_ms = trusted_now_ms(context) - grace_ms
            tally.uploads_aborted += abort_uploads(store, before_ms, tally.unlisted)


def _delete(store: Store, useless: list[ObjectInfo], tally: PipelineSweep) -> None:
    for lot in _lots(useless):
        store.delete([info.key for info in lot])
        tally.objects_deleted += len(lot)
        tally.bytes_deleted += sum(info.size for info in lot)


@dataclass(slots=True)
class _NamedObjects:
    """What the rows of a pipeline say must stay."""

    keys: set[str] = field(default_factory=set)
    # Where erasures stage: by ``manifest_folder`` and epoch, like all below.
    erasing: set[tuple[str, int]] = field(default_factory=set)
    under_way: set[tuple[str, int]] = field(default_factory=set)  # with an undecided range
    epochs: dict[str, int] = field(default_factory=dict)  # of heads
    looked: dict[str, int] = field(default_factory=dict)  # see ``Progress``

    def has(self, key: str) -> bool:
        """Returns whether rows name an object, or its original with erased events."""
        folder, _, name = key.rpartition("/")
        return key in self.keys or f"{folder}/{name.partition('.')[0]}" in self.keys

    def may_decide(self, folder: str, epoch: int) -> bool:
        """Returns whether something made under an epoch of a partition may still be named.

        Rows of a partition that is not listed were lost with a catalog.
        """
        return (folder, epoch) in self.under_way or epoch > self.epochs.get(folder, -1)


def _read_named(context: Context, pipeline: str) -> _NamedObjects:
    named = _NamedObjects()
    for partition in read_partitions(context, pipeline):
        folder = layout.manifest_folder(partition)
        head = read_progress(context, pipeline, partition)  # before its intent, on purpose
        named.epochs[folder] = head.epoch if head else 0
        named.looked[folder] = head.looked if head else 0
        intent = read_intent(context, pipeline, partition)
        if intent is not None:
            key, is_read = intent.manifest, not intent.manifest or intent.ahead is not None
            if is_read and head is not None and not head.frozen and head.owner:
                named.under_way.add((folder, head.epoch))
            if key:
                manifest = load_manifest(context.store, key)
                staged = [file.staged for file in manifest.files]
                named.keys.update([key, *staged, *map(layout.sending, staged)])
        for found in read_commit_rows(context, pipeline, partition):
            commit = found.committed
            named.keys.update([commit.manifest, *commit.replaced])
            if commit.rewrite:  # an erasure is running
                named.keys.add(commit.rewrite)
                named.erasing.add(_recorded_under(commit.rewrite))
    return named


def _lots(found: list[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    for first in range(0, len(found), _DELETES_AT_ONCE):
        yield found[first : first + _DELETES_AT_ONCE]
