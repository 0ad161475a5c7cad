"""What the catalog knows about archives and pipelines: settings, source partitions, progress.

Each *generation* of an archive is a pipeline of its own. It lists its source partitions, even those
that the source no longer has. Creating it lists those that exist, with their ends; one without an
end appeared later. ``commits`` reads the ranges that it has committed.

**Dead letters.** The rows also say which files of dead letters still count after replays. A replay
is a pipeline of its own beside a generation. It goes through the dead letters of a source partition
in passes, and its positions are ``<pass>:<offset>``. Each of its commits covers a range of offsets.
The dead-letter files that begin in that range no longer count: the commit's manifest says what
became of their events. It lists data files, and a dead-letter file for those that failed again. A
later pass may cover that one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.commits import Manifests, read_commits, read_manifests
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
)
from tidelog.model import layout, limits
from tidelog.model.archive import Archive, check_archive_name
from tidelog.model.pipeline import (
    ErasedEvents,
    FileEntry,
    Intent,
    ListedPartition,
    Manifest,
    NamedPipeline,
    Progress,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.store.base import Store, check_owner

__all__ = [
    "ReplayPosition",
    "ReplayedRange",
    "Replays",
    "change_archive",
    "check_ours",
    "check_outside",
    "counting_files",
    "dead_files",
    "decode_archive",
    "encode_archive",
    "generation_pipeline",
    "is_detached",
    "is_outside",
    "list_archives",
    "list_partitions",
    "list_pipelines",
    "read_archive",
    "read_erased",
    "read_erased_row",
    "read_intent",
    "read_listed",
    "read_partitions",
    "read_progress",
    "replay_effect",
    "replay_pipeline",
    "was_staged_before_restore",
]

_OWN_STORE = "home:"  # in the row of an archive whose folder is in the home's own store


def list_archives(context: Context) -> Iterator[Archive]:
    """Yields all archives, by name; also those whose creation or delete is unfinished."""
    for row in context.catalog.scan(layout.REGISTRY, layout.archive_row(""), "archive0"):
        yield decode_archive(context, row)


def list_pipelines(context: Context) -> Iterator[NamedPipeline]:
    """Yields all named pipelines, by name; also those whose delete is unfinished."""
    for row in context.catalog.scan(layout.REGISTRY, *layout.pipeline_rows()):
        yield decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")


def read_archive(context: Context, name: str) -> Archive:
    """Returns the archive of a name. Raises ``NotFoundError`` unless its creation has finished."""
    return _read(context, name)[0]


def change_archive(context: Context, name: str, edit: Callable[[Archive], Archive]) -> Archive:
    """Changes an archive's row by a conditional write, with retries; returns the new archive."""
    row = layout.archive_row(name)
    check_archive_name(name)

    def decide(rows: Rows) -> Decision[Archive]:
        archive, _ = _ready(context, name, rows[row])
        wanted = edit(archive)
        same = wanted == archive
        return Decision(wanted, [] if same else [rows.put(row, encode_archive(context, wanted))])

    return update(context, layout.REGISTRY, [row], decide, f"archive `{name}`")


def encode_archive(context: Context, archive: Archive) -> bytes:
    """Returns the bytes of an archive's row. A folder in the home's store is relative to it."""
    inside = archive.store == context.store.url
    return encode_row(msgspec.structs.replace(archive, store=_OWN_STORE) if inside else archive)


def decode_archive(context: Context, row: Row) -> Archive:
    """Returns an archive from its row, with the address of its store in this home."""
    found = decode_row(row.value, Archive, f"registry row `{row.row}`")
    inside = found.store == _OWN_STORE
    return msgspec.structs.replace(found, store=context.store.url) if inside else found


def is_outside(context: Context, archive: Archive) -> bool:
    """Returns whether an archive's folder is outside the home's own store."""
    return archive.store != context.store.url


def is_detached(context: Context, archive: Archive) -> bool:
    """Returns whether an archive's folder belongs to the home that this one was copied from.

    That is the case after `home adopt`. Erasures, proofs and scribes skip it and report it; a
    request to write to it is refused (``check_outside``). A copy that is not adopted refuses these
    too.
    """
    identity = context.identity
    is_known = archive.home not in ("", identity.id)
    return is_outside(context, archive) and not identity.copy_of and is_known


def check_outside(context: Context, archive: Archive, store: Store) -> None:
    """Raises ``InvalidError`` unless this home may write and delete in an archive's folder.

    A folder outside belongs to the home that created it, as its ``_owner`` object records.
    """
    if is_outside(context, archive):
        what = check_ours(context, archive)
        check_owner(store, archive.owner, archive.owner_content, what, archive.name)


def check_ours(context: Context, archive: Archive) -> str:
    """Raises ``InvalidError`` unless an outside archive is this home's; returns what it is."""
    what = f"archive `{archive.name}` in `{archive.place}`"
    context.identity.check_own(
        what,
        archive.home,
        f"its files are changed and deleted there; here, end it with `tidelog archive delete "
        f"{archive.name}`, and create another archive, in a folder of its own, to continue",
    )
    return what


def read_partitions(context: Context, pipeline: str) -> list[str]:
    """Returns the source partitions that a pipeline knows, in order; some have no head yet."""
    return sorted(read_listed(context, pipeline))


def read_listed(context: Context, pipeline: str) -> dict[str, ListedPartition]:
    """Returns the source partitions that a pipeline knows, with the ends at its creation."""
    where = layout.pipeline_members(pipeline)
    rows = context.catalog.scan(where, "partition/", "partition0")
    listed = [decode_row(row.value, ListedPartition, f"row `{row.row}`") for row in rows]
    return {each.partition: each for each in listed}


def list_partitions(context: Context, pipeline: str, listed: Iterable[ListedPartition]) -> None:
    """Adds source partitions to a pipeline's list; existing entries do not change."""
    puts = [Put(layout.partition_row(each.partition), encode_row(each), ABSENT) for each in listed]
    for first in range(0, len(puts), limits.CHANGES_MAX):
        _put_absent(
            context, layout.pipeline_members(pipeline), puts[first : first + limits.CHANGES_MAX]
        )


def read_progress(context: Context, pipeline: str, partition: str) -> Progress | None:
    """Returns how far a pipeline has read a source partition; None if it has not started."""
    row = context.catalog.get(layout.pipeline_partition(pipeline, partition), "head")
    head = decode_row(row.value, Progress, f"head of `{partition}`") if row else None
    # A head without a position only fences.
    return head if head is not None and head.position else None


def was_staged_before_restore(context: Context, staged: str) -> bool:
    """Returns whether only a catalog from before a restore knew what a file was staged for.

    That is a higher epoch than its head's, or a pipeline or generation that no row knows. Sweeps
    keep the file, unless the catalog gets as far again.
    """
    if staged.startswith(layout.playback_stagings()):  # they have no rows
        return False
    try:
        pipeline, folder = layout.staging_pipeline(staged), layout.folder_of_staged(staged)
        epoch = layout.staged_epoch(staged)
    except (IndexError, ValueError):  # not of a pipeline
        return False
    for partition in read_partitions(context, pipeline):
        if layout.manifest_folder(partition) == folder:
            head = read_progress(context, pipeline, partition)
            return epoch > (0 if head is None else head.epoch)
    return not _is_swept(context, generation_pipeline(pipeline))


def _is_swept(context: Context, pipeline: str) -> bool:
    """Returns whether sweeps look at what a pipeline without rows has staged."""
    if any(each.incarnation == pipeline for each in list_pipelines(context)):
        return True
    incarnation, _, generation = pipeline.rpartition(".")
    for archive in list_archives(context):
        if archive.incarnation == incarnation:
            return int(generation) <= archive.newest
    return context.catalog.get(layout.REGISTRY, layout.removed_row(incarnation)) is not None


def read_intent(context: Context, pipeline: str, partition: str) -> Intent | None:
    """Returns the range of a source partition that is in progress, if any."""
    row = context.catalog.get(layout.pipeline_partition(pipeline, partition), "intent")
    return decode_row(row.value, Intent, f"intent of `{partition}`") if row else None


def read_erased(context: Context, pipeline: str, partition: str) -> ErasedEvents:
    """Returns how many events erasures removed from the files of a source partition."""
    where = layout.pipeline_partition(pipeline, partition)
    return read_erased_row(context.catalog.get(where, layout.ERASED))


def read_erased_row(row: Row | None) -> ErasedEvents:
    """Decodes the row of erased events; zero events if there is no row."""
    if row is None:
        return ErasedEvents()
    return decode_row(row.value, ErasedEvents, f"row `{row.row}`")


def _put_absent(context: Context, where: str, puts: Sequence[Put]) -> None:
    """Puts rows that do not exist; in one write, or one by one if some do."""
    try:
        context.catalog.write(where, *puts, write_id=context.ids.new())
    except ConflictError:
        for each in puts if len(puts) > 1 else ():
            _put_absent(context, where, [each])


def _read(context: Context, name: str) -> tuple[Archive, str]:
    check_archive_name(name)
    return _ready(context, name, context.catalog.get(layout.REGISTRY, layout.archive_row(name)))


def _ready(context: Context, name: str, row: Row | None) -> tuple[Archive, str]:
    archive = decode_archive(context, row) if row else None
    if row is None or archive is None or archive.state != "ready":
        raise NotFoundError(
            f"archive `{name}`: not found: create it with `tidelog archive create {name}`"
        )
    return archive, row.version


_REPLAYS = ".dead"


class ReplayPosition(NamedTuple):
    """How far a replay has come: the pass and the offset."""

    number: int = 0
    offset: int = 0

    @property
    def text(self) -> str:
        """Returns it as a position in the replay's rows."""
        return f"{self.number}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> ReplayPosition:
        number, colon, offset = text.partition(":")
        if not (colon and number.isascii() and number.isdecimal() and offset.isdecimal()):
            raise InvalidError(f"position `{text}`: is none of a replay: give <pass>:<offset>")
        return cls(int(number), int(offset))


class ReplayedRange(NamedTuple):
    """Offsets ``[start, end)`` that one commit tried again."""

    start: int
    end: int

    @classmethod
    def between(cls, start: str, end: str) -> ReplayedRange:
        """Returns the offsets between two positions. A pass that was abandoned is not resumed."""
        one, other = ReplayPosition.parse(start), ReplayPosition.parse(end)
        return cls(one.offset if one.number == other.number else 0, other.offset)

    def holds(self, file: FileEntry) -> bool:
        """Returns whether a file of dead letters begins in it."""
        return self.start <= file.first_offset < self.end


class Effect(NamedTuple):
    """What replays have done in a source partition."""

    replayed: int = 0  # events that are no longer dead letters
    files: int = 0  # that they wrote, including replaced ones
    bytes: int = 0


def replay_pipeline(pipeline: str) -> str:
    """Returns the name of the rows and manifests of a generation's replays."""
    return f"{pipeline}{_REPLAYS}"


def generation_pipeline(pipeline: str) -> str:
    """Returns the generation's pipeline for a replay's; any other name unchanged."""
    return pipeline.removesuffix(_REPLAYS)


class Replays:
    """The replays of one source partition, as its rows were when they were read."""

    def __init__(self, context: Context, pipeline: str, partition: str) -> None:
        self._context = context
        self._pipeline = pipeline
        self._partition = partition
        self._manifests = Manifests(context, replay_pipeline(pipeline), partition)
        self.commits = list(read_commits(context, replay_pipeline(pipeline), partition))
        self._ranges = [ReplayedRange.between(each.start, each.end) for each in self.commits]

    def replaces(self, file: FileEntry, after: int = -1) -> bool:
        """Returns whether a replay after number ``after`` has replaced a file of dead letters."""
        if file.kind != "dead":
            return False
        return any(each.holds(file) for each in self._ranges[after + 1 :])

    def counting(self, offset: int | None = None) -> Iterator[tuple[Manifest, FileEntry]]:
        """Yields the files that replays wrote and that count; optionally for one offset."""
        for number, committed in enumerate(self.commits):
            tried = self._ranges[number]
            if offset is None or tried.start <= offset < tried.end:
                manifest = self._manifests.of(committed)
                for file in manifest.files:
                    if not self.replaces(file, number):
                        yield manifest, file

    def dead(self) -> Iterator[tuple[FileEntry, bool]]:
        """Yields every file of dead letters that ever existed, and whether it counts; unordered."""
        manifests = Manifests(self._context, self._pipeline, self._partition)
        for committed in read_commits(self._context, self._pipeline, self._partition):
            if committed.dead:
                for file in manifests.of(committed).files:
                    if file.kind == "dead":
                        yield file, not self.replaces(file)
        for number, committed in enumerate(self.commits):
            if committed.dead:
                for file in self._manifests.of(committed).files:
                    if file.kind == "dead":
                        yield file, not self.replaces(file, number)


def counting_files(
    context: Context, pipeline: str, partition: str
) -> Iterator[tuple[Manifest, FileEntry]]:
    """Yields the files that count in a source partition: each archived event is in one of them.

    Range by range, without dead letters that were replaced; then what replays have written.
    """
    replays = Replays(context, pipeline, partition)
    for manifest in read_manifests(context, pipeline, partition):
        for file in manifest.files:
            if not replays.replaces(file):
                yield manifest, file
    yield from replays.counting()


def dead_files(context: Context, pipeline: str, partition: str) -> list[list[FileEntry]]:
    """Returns the files of dead letters that count, by offset; overlapping ones are together."""
    found = [file for file, counts in Replays(context, pipeline, partition).dead() if counts]
    groups: list[list[FileEntry]] = []
    end = 0
    for file in sorted(found, key=lambda file: file.first_offset):
        if groups and file.first_offset < end:
            groups[-1].append(file)
        else:
            groups.append([file])
        end = max(end, file.last_offset + 1)
    return groups


def replay_effect(context: Context, pipeline: str, partition: str) -> Effect:
    """Returns what to add to the totals of a generation's head, from one row."""
    head = read_progress(context, replay_pipeline(pipeline), partition)
    if head is None:
        return Effect()
    return Effect(head.ordinal - head.totals.dead, head.totals.files, head.totals.bytes)
