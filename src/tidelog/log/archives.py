"""What the catalog knows of archives: their settings, source partitions, commits and manifests.

An archive's *generation* is a pipeline of its own. Its source partitions are those that it has a
head for, also when their source no longer has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import groupby

import msgspec

from tidelog.catalog.base import Put, Row
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.log.base import Log
from tidelog.model import layout
from tidelog.model.archive import Archive, check_archive_name
from tidelog.model.pipeline import Committed, Manifest, Progress, read_manifest
from tidelog.model.run import decode_row, encode_row
from tidelog.store.base import Store
from tidelog.store.mark import check_mark

__all__ = [
    "change_archive",
    "check_outside",
    "decode_archive",
    "encode_archive",
    "is_outside",
    "read_archive",
    "read_commits",
    "read_manifests",
    "read_partitions",
    "read_progress",
]

_ATTEMPTS = 50  # of a write that others keep changing
_OWN_STORE = "home:"  # in the row of an archive whose folder is in the home's own store


def read_archive(log: Log, name: str) -> Archive:
    """The archive of a name. ``NotFoundError`` unless its creation has finished."""
    return _read(log, name)[0]


def change_archive(log: Log, name: str, edit: Callable[[Archive], Archive]) -> Archive:
    """One conditional write of an archive's row, repeated until it holds; the row as it is then."""
    for _ in range(_ATTEMPTS):
        archive, version = _read(log, name)
        wanted = edit(archive)
        if wanted == archive:
            return archive
        change = Put(layout.archive_row(name), encode_archive(log, wanted), version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(layout.REGISTRY, change, write_id=log.ids.new())
            return wanted
    raise UnavailableError(f"archive `{name}`: others keep changing it: try again")


def encode_archive(log: Log, archive: Archive) -> bytes:
    """The bytes of an archive's row. A folder in the home's store is relative to the home."""
    inside = archive.store == log.store.url
    return encode_row(msgspec.structs.replace(archive, store=_OWN_STORE) if inside else archive)


def decode_archive(log: Log, row: Row) -> Archive:
    """An archive from its row, with the address that its store has in this home."""
    found = decode_row(row.value, Archive, f"registry row `{row.row}`")
    inside = found.store == _OWN_STORE
    return msgspec.structs.replace(found, store=log.store.url) if inside else found


def is_outside(log: Log, archive: Archive) -> bool:
    """Whether an archive's folder is not in the home's own store."""
    return archive.store != log.store.url


def check_outside(log: Log, archive: Archive, store: Store) -> None:
    """Raise ``InvalidError`` unless this home may write and delete in an archive's folder.

    One that is not in the home belongs to the home that made it, and says so in ``_owner``.
    """
    if not is_outside(log, archive):
        return
    what = f"archive `{archive.name}` in `{archive.store}/{archive.root}`"
    log.standing.check_own(
        what, archive.home, "create another archive, in a folder of its own, to go on"
    )
    check_mark(store, archive.owner, archive.mark, what)


def read_partitions(log: Log, pipeline: str) -> list[str]:
    """The source partitions that a pipeline has heads for, in order."""
    where = layout.pipeline_shards(pipeline)
    return sorted(row.value.decode() for row in log.catalog.scan(where, "partition/", "partition0"))


def read_progress(log: Log, pipeline: str, partition: str) -> Progress | None:
    """How far a pipeline has come in a source partition."""
    row = log.catalog.get(layout.pipeline_partition(pipeline, partition), "head")
    return decode_row(row.value, Progress, f"head of `{partition}`") if row else None


def read_commits(log: Log, pipeline: str, partition: str, ordinal: int = 0) -> Iterator[Committed]:
    """The ranges that are done, in the order of the source; those from an ordinal on."""
    where = layout.pipeline_partition(pipeline, partition)
    rows = log.catalog.scan(where, layout.commit_row(ordinal, ""), "commit0")
    for _, same in groupby(rows, key=lambda row: row.row.split("/")[1]):
        yield from _chained(
            [decode_row(row.value, Committed, f"commit `{row.row}`") for row in same]
        )


def read_manifests(log: Log, pipeline: str, partition: str, ordinal: int = 0) -> Iterator[Manifest]:
    """What those ranges produced. ``NotFoundError`` or ``CorruptError`` for a damaged manifest."""
    for committed in read_commits(log, pipeline, partition, ordinal):
        yield read_manifest(log.store.get(committed.manifest), committed.manifest)


def _read(log: Log, name: str) -> tuple[Archive, str]:
    check_archive_name(name)
    row = log.catalog.get(layout.REGISTRY, layout.archive_row(name))
    archive = decode_archive(log, row) if row else None
    if row is None or archive is None or archive.state != "ready":
        raise NotFoundError(
            f"archive `{name}`: not found: create it with `tidelog archive create {name}`"
        )
    return archive, row.version


def _chained(commits: list[Committed]) -> Iterator[Committed]:
    """Ranges that begin at one ordinal, since all but the last hold no event: in their order.

    Their rows are sorted by the text of a position, where 10 stands before 9.
    """
    left = {commit.start: commit for commit in commits}
    for start in left.keys() - {commit.end for commit in commits}:
        at = start
        while at in left:
            yield left[at]
            at = left.pop(at).end
