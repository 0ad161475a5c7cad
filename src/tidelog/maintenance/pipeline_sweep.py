"""Sweeps pipelines: deletes what attempts staged and recorded and no process will finish.

1. list what is staged, and all manifests, each with its epoch
2. after that, read heads, intents and commits
3. delete what no intent and no commit names, if its epoch has no unfinished range and it is older
   than the grace period; for manifests, below the epoch of the last driver that has looked for
   ranges that a restored catalog lost (``pipeline.aside``)

Only an attempt at an intent stages and records. Its output is named when it decides that intent, in
a write that expects the head and the intent unchanged. So an epoch has an unfinished range only if
a head has that epoch and an undecided intent. Other heads do not matter: a deleted source partition
keeps the epoch of its last driver. A frozen head has no unfinished range. Nor has a driver that has
released its shard: the sweep reads shards before intents, so what it decided is named. So what is
not named when the rows are read will never be. What is young, or belongs to a driver that may be
alive, stays for a later sweep. After a crash anywhere, the next sweep has less to do. An epoch
above those of all heads comes from before a restore of the catalog: what was staged under it stays
until drivers have reached it.

What a topic's sink stages again without erased events is next to its original, and is named with
it.

An erasure (``erasure.rewrite``) is the exception: it needs no head. Its commit's row says so before
anything is staged. While one does, what is staged under the erasure's epoch stays, named or not. A
sweep of an archive finishes such an erasure: it may have crashed, and its topic may be deleted. It
also corrects entries of tables that a crashed register left stale next to an erasure.

Before that, a sweep merges a bounded number of old commits of archives (``commit_retention``).

A playback by Spark has no rows. It deletes what it staged, unless it is killed; then the sweep
does, once nothing of it is younger than the grace period.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from tidelog.archive.archive import list_archives
from tidelog.archive.commit_retention import compact_commits, drop_replaced, forget_history
from tidelog.archive.delete import finish_ending, finish_removal, remove_late_copies
from tidelog.archive.generations import finish_removals, remove_strays
from tidelog.archive.roots import removed_archives
from tidelog.archive.tables import settle_tables
from tidelog.context import Context
from tidelog.coordination.ages import trusted_now_ms
from tidelog.coordination.pipeline_rows import (
    is_outside,
    read_commit_rows,
    read_partitions,
    read_progress,
)
from tidelog.erasure.rewrite import finish_rewrites
from tidelog.errors import TidelogError, contained
from tidelog.log.maintenance.leftovers import abort_uploads
from tidelog.model import layout, limits
from tidelog.model.archive import Archive
from tidelog.model.partition_rows import HeldRow, decode_row
from tidelog.model.pipeline import Intent, read_manifest
from tidelog.pipeline.endpoints import files_at, pipelines_of
from tidelog.pipeline.registry import list_pipelines
from tidelog.store.base import ObjectInfo, Store

__all__ = ["PipelineSweep", "sweep_archives", "sweep_pipeline"]

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
            sweep_pipeline(context, named.incarnation, context.store, grace_ms, tally, old)
    with contained("playbacks", errors.append):
        _sweep_playbacks(context, grace_ms, tally)
    with contained("uploads", errors.append):
        _abort_uploads(context, grace_ms, tally)
    for error in errors:
        raise error
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
    unnamed = [info for info in staged if layout.staged_epoch(info.key) not in named.erasing]
    if forgotten is None:
        manifests = [info for info in manifests if _is_looked_at(info.key, named)]
        forgotten = frozenset()
    for where, found, epoch_of in (
        (store, unnamed, layout.staged_epoch),
        (context.store, manifests, layout.manifest_epoch),
    ):
        useless = [
            info
            for info in found
            if info.key in forgotten
            or not (named.has(info.key) or named.may_decide(epoch_of(info.key)))
        ]
        young = [info for info in useless if info.modified_ms > old_ms]
        tally.objects_young += len(young)
        _delete(where, [info for info in useless if info.modified_ms <= old_ms], tally)
    return bool(named.erasing)


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
    for error in settle_tables(context, archive) if context.standing.owns(archive.home) else ():
        raise error


def _compact(context: Context, pipeline: str, tally: PipelineSweep) -> None:
    """Merges old commits of an archive, and deletes the manifests that merged ones replaced."""
    now_ms = trusted_now_ms(context)
    for partition in read_partitions(context, pipeline):
        where = pipeline, partition, now_ms
        tally.objects_deleted += drop_replaced(context, *where)
        tally.commits_merged += compact_commits(context, *where, limits.MERGES_MAX)


def _is_ours(context: Context, archive: Archive) -> bool:
    """Returns whether to sweep it: what is outside a copied home belongs to the original."""
    return not is_outside(context, archive) or context.standing.owns(archive.home)


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
    erasing: set[int] = field(default_factory=set)  # epochs under which erasures stage
    under_way: set[int] = field(default_factory=set)  # epochs with an undecided range
    epoch: int = 0  # the highest of all heads
    looked: dict[str, int] = field(default_factory=dict)  # by ``manifest_folder``, see ``Progress``

    def has(self, key: str) -> bool:
        """Returns whether rows name an object, or its original with erased events."""
        folder, _, name = key.rpartition("/")
        return key in self.keys or f"{folder}/{name.partition('.')[0]}" in self.keys

    def may_decide(self, epoch: int) -> bool:
        """Returns whether something made under an epoch may still be named."""
        return epoch in self.under_way or epoch > self.epoch


def _read_named(context: Context, pipeline: str) -> _NamedObjects:
    named = _NamedObjects()
    ended = _ended_epochs(context, pipeline)  # before any intent is read, on purpose
    for partition in read_partitions(context, pipeline):
        head = read_progress(context, pipeline, partition)
        named.epoch = max(named.epoch, head.epoch if head else 0)
        named.looked[layout.manifest_folder(partition)] = head.looked if head else 0
        where = layout.pipeline_partition(pipeline, partition)
        row = context.catalog.get(where, "intent")
        if row is not None:
            key = decode_row(row.value, Intent, f"intent of `{partition}`").manifest
            if not key and head is not None and not head.frozen and head.epoch not in ended:
                named.under_way.add(head.epoch)
            if key:
                manifest = read_manifest(context.store.get(key), key)
                staged = [file.staged for file in manifest.files]
                named.keys.update([key, *staged, *map(layout.sending, staged)])
        for found in read_commit_rows(context, pipeline, partition):
            commit = found.committed
            named.keys.update([commit.manifest, *commit.replaced])
            if commit.rewrite:  # an erasure is running
                named.keys.add(commit.rewrite)
                named.erasing.add(layout.manifest_epoch(commit.rewrite))
    return named


def _ended_epochs(context: Context, pipeline: str) -> set[int]:
    """Returns the epochs of drivers that have released their shards: none of them writes.

    A driver that was killed, or lost its shard, released nothing, and may just be slow.
    """
    where = layout.pipeline_shards(pipeline)
    rows = context.catalog.scan(where, "shard/", "shard0")
    leases = [decode_row(row.value, HeldRow, f"shard `{row.row}`") for row in rows]
    return {each.epoch for each in leases} - {each.epoch for each in leases if each.owner}


def _lots(found: list[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    for first in range(0, len(found), _DELETES_AT_ONCE):
        yield found[first : first + _DELETES_AT_ONCE]
