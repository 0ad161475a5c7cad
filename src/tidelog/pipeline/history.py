"""What a named pipeline has committed long ago: a sweep forgets it, lest it grows without end.

Where a pipeline goes on tells its head alone. Commits and their manifests are looked at by those
pipelines that add what it has missed (``sources.base.Completing``), and never before the place that
they have come to. So what all of them have passed can go when it is older than a week, or when more
than ``limits.PIPELINE_COMMITS_MAX`` commits of a source partition are younger: first the rows, in
the order of the source, then the manifests that they name. Dying between the two leaves
manifests that nothing names, for a sweep under a later epoch.

One that is made later, behind a pipeline that has run for long, begins where the commits do that
are left. A change log has usually forgotten what was before that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from tidelog.catalog.base import Delete, Row
from tidelog.home import Home
from tidelog.log.ages import trusted_now_ms
from tidelog.log.archives import read_partitions, read_progress
from tidelog.model import layout, limits
from tidelog.model.pipeline import Committed, NamedPipeline
from tidelog.model.run import decode_row
from tidelog.pipeline.archive import list_archives
from tidelog.pipeline.places import source_at
from tidelog.pipeline.registry import list_pipelines
from tidelog.sources import pipelines_behind

__all__ = ["forget_history"]

_KEPT_MS = 7 * 24 * 3600 * 1000


def forget_history(home: Home, named: NamedPipeline) -> frozenset[str]:
    """Remove the rows of old commits that nobody needs; the keys of their manifests."""
    followers = list(_followers(home, named.name))
    forgotten: set[str] = set()
    for partition in read_partitions(home.log, named.incarnation):
        heads = [read_progress(home.log, each, partition) for each in followers]
        reached = [head.position for head in heads if head is not None]
        if len(reached) < len(followers):
            continue  # one that has not begun needs all
        where = layout.pipeline_partition(named.incarnation, partition)
        old = list(_old(home, named, where, reached))
        for first in range(0, len(old), limits.CHANGES_MAX):
            changes = [Delete(row.row) for row, _ in old[first : first + limits.CHANGES_MAX]]
            home.log.catalog.write(where, *changes, write_id=home.log.ids.new())
        forgotten.update(commit.manifest for _, commit in old)
    return frozenset(forgotten)


def _old(
    home: Home, named: NamedPipeline, where: str, reached: list[str]
) -> Iterator[tuple[Row, Committed]]:
    """The first commits, as long as they are old and behind all that others have reached."""
    old_ms = trusted_now_ms(home.log) - _KEPT_MS
    source = source_at(home, named.source) if reached else None
    count = sum(1 for _ in home.log.catalog.scan(where, "commit/", "commit0"))
    too_many = count - limits.PIPELINE_COMMITS_MAX
    rows = home.log.catalog.scan(where, "commit/", "commit0")
    for _, same in groupby(rows, key=lambda row: row.row.split("/")[1]):
        young = False
        for row in same:
            too_many -= 1
            commit = decode_row(row.value, Committed, f"commit `{row.row}`")
            needed = source is not None and any(source.before(at, commit.end) for at in reached)
            if needed or (commit.committed_ms > old_ms and too_many < 0):
                young = True
            else:
                yield row, commit
        if young:
            return


def _followers(home: Home, name: str) -> Iterator[str]:
    """The pipelines that look at the commits of one."""
    for each in list_pipelines(home):
        if name in pipelines_behind(each.source):
            yield each.incarnation
    for archive in list_archives(home):
        if name in pipelines_behind(archive.source):
            reading = archive.in_state("live", "building")
            yield from (archive.pipeline(generation) for generation in reading)
