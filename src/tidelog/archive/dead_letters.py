"""Reads dead letters and replays them: what now parses becomes data files, exactly once.

A replay is a pipeline with its own rows (``<pipeline>.dead``) and the same source partitions. It
processes the dead letters in *passes*; positions are ``<pass>:<offset>``. A stretch is some whole
consecutive files of dead letters, and goes through these steps:

1. begin: the pass after that of the ``head``, up to the last
   dead letter there is; steps 0 to 3 of the cycle               → crash: see the cycle
2. do: read the stretch's files, call the parser, stage data
   files and one file of those that stay dead                    → crash: staged, without a name
3. record the manifest in the ``intent``                          → crash: decided; published next
4. publish: data files into the archive's folder, dead letters
   into a folder that no other attempt has                       → crash: the next copies the rest
5. commit: ``commit`` row, ``head``, no ``intent``. Now the
   stretch's old files of dead letters no longer count           → crash: old files stay
6. delete them                                                   → crash: the next replay does

So an event is in the archive's folder from step 4 on, once, because only step 5 gives access to
that stretch again. It is in the manifest from step 5 on, which also removes it from the dead
letters. A driver that lost its partition fails at step 3 or 5, as in the cycle. Names of data files
are unique: each has the offset of its first event, and no dead letter is in a data file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import crc32c
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.archive.archive import check_active, sink_settings
from tidelog.archive.derived_archives import output_of
from tidelog.archive.erased_events import ErasedBefore
from tidelog.archive.freeze import HeadGate
from tidelog.archive.read import ArchiveFiles
from tidelog.archive.verify_checks import read_offsets
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.codec.formats.base import MISFIT_SCHEMA
from tidelog.codec.formats.batches import decoding
from tidelog.codec.parsers import FolderSettings
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings, ArchiveWriter
from tidelog.connectors.by_url import files_at, store_at
from tidelog.connectors.sink import RangeWriter, Sink
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
)
from tidelog.context import Context
from tidelog.coordination.commits import read_commits
from tidelog.coordination.pipeline_rows import (
    ReplayedRange,
    ReplayPosition,
    Replays,
    dead_files,
    read_partitions,
    read_progress,
    replay_effect,
    replay_pipeline,
)
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.limits import BATCH_EVENTS_MAX
from tidelog.model.pipeline import FileCounts, FileEntry, Manifest
from tidelog.pipeline.driver import Driver, DriverOptions, new_stop
from tidelog.pipeline.pipeline import CycleReport, Pipeline
from tidelog.pipeline.tasks import Workers
from tidelog.store import open_store_here
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore

__all__ = [
    "DeadSource",
    "ReplayOptions",
    "ReplayPlan",
    "ReplayResult",
    "count_dead_again",
    "dead_letters",
    "open_replay",
    "plan_replay",
    "read_dead_files",
    "remove_replaced",
    "replay",
]

_EVENTS_MAX = 100_000  # of one stretch; what stays dead is in memory until it ends
_BYTES_MAX = 64 << 20  # of its files


@dataclass
class ReplayOptions:
    """How to replay dead letters, with settings that may differ from the archive's own."""

    generation: int | None = None
    parser: str = ""  # empty: the archive's
    layout: Mapping[str, str] = field(default_factory=dict)  # overrides the archive's
    stop: threading.Event = field(default_factory=new_stop)
    on_cycle: Callable[[CycleReport], None] = lambda _: None


@dataclass
class ReplayResult:
    """What a replay did."""

    tried: int = 0
    replayed: int = 0
    dead: int = 0  # still dead
    data_files: int = 0  # written

    def add(self, report: CycleReport) -> None:
        """Counts what one cycle has committed."""
        for manifest in report.committed.values():
            self.tried += manifest.read
            self.replayed += manifest.written
            self.dead += manifest.dead
            self.data_files += FileCounts.of(manifest.files).data


def replay(
    context: Context, archive: Archive, how: ReplayOptions, workers: Workers
) -> ReplayResult:
    """Tries all dead letters again. Safe to kill, to repeat, and to run twice at once."""
    store = files_at(context, archive)
    pipeline = open_replay(context, archive, how, workers)
    done = ReplayResult()

    def tell(report: CycleReport) -> None:
        done.add(report)
        how.on_cycle(report)

    Driver(context, pipeline, DriverOptions(wait=True, stop=how.stop, on_cycle=tell)).run()
    remove_replaced(context, store, archive, how.generation)
    return done


def open_replay(
    context: Context, archive: Archive, how: ReplayOptions, workers: Workers
) -> Pipeline:
    """Opens the pipeline that writes replayed dead letters to the archive.

    Raises ``InvalidError`` as ``_replay_settings`` does.
    """
    number = archive.generation if how.generation is None else how.generation
    name, pipeline = f"{archive.name}, dead letters", archive.pipeline(number)
    source = DeadSource(context, archive, pipeline)
    return Pipeline(
        name,
        replay_pipeline(pipeline),
        source,
        ReplaySink(_replay_settings(archive, how)),
        workers,
        gate=HeadGate(context, archive, number),
        erased=ErasedBefore(context, archive, number),
    )


def _replay_settings(archive: Archive, how: ReplayOptions) -> ArchiveSinkSettings:
    """Returns how a replay writes files.

    Raises ``InvalidError`` for a parser that changes values, if the archive's own does not: the
    archive's files hold events, and nothing would tell its output from them. Raises it too for a
    generation that is kept, which nothing adds to, and for an archive that was ended.
    """
    check_active(archive)
    written_as = archive.format_of(how.generation)
    number = archive.generation if how.generation is None else how.generation
    if (state := archive.state_of(number)) in ("kept", "removing"):
        raise InvalidError(
            f"archive `{archive.name}`: generation {number} is {state}, and nothing is added to "
            f"it: replay dead letters of generation {archive.generation}, which is live"
        )
    changed = msgspec.structs.replace(
        written_as,
        parser=how.parser or written_as.parser,
        layout={**written_as.layout, **how.layout},
    )
    if output_of(changed) and not output_of(written_as):
        raise InvalidError(
            f"archive `{archive.name}`: parser `{changed.parser}` changes values, and the "
            "archive's files hold events as they were: replay with another parser, or write all "
            f"files with this one: `tidelog archive backfill {archive.name} --parser ...`"
        )
    wanted = msgspec.structs.replace(archive, formats={**archive.formats, number: changed})
    return replace(sink_settings(wanted, number), dead_share_max=1.0)


_TRIED_MAX = 10_000  # dead letters in the trial of a plan


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do, by a trial in memory with the first dead letters."""

    dead: int = 0  # dead letters in all
    tried: int = 0  # of them, in the trial
    accepted: int = 0  # would be in data files
    reasons: Mapping[str, int] = field(default_factory=dict)  # of those tried, as they are now
    refused: Mapping[str, int] = field(default_factory=dict)  # of those that would stay dead


def plan_replay(
    context: Context, archive: Archive, how: ReplayOptions, most: int = _TRIED_MAX
) -> ReplayPlan:
    """Returns what a replay would do with up to ``most`` dead letters. Changes nothing.

    Files are written to memory, so the trial refuses what a replay would refuse. Raises
    ``InvalidError`` as a replay does, and ``UnavailableError`` while another one replaces files.
    """
    settings, pipeline = _replay_settings(archive, how), archive.pipeline(how.generation)
    dead = tried = accepted = 0
    reasons: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for partition in read_partitions(context, pipeline):
        found = dead_files(context, pipeline, partition)
        dead += sum(file.events for files in found for file in files)
        letters = _first_letters(store_at(context, archive.store), found, most - tried)
        if not letters:
            continue
        tried += sum(batch.num_rows for batch in letters)
        reasons.update(_reasons(letters))
        written, misfits = _try_letters(context, settings, partition, letters)
        accepted += written
        refused.update(_reasons(misfits))
    return ReplayPlan(
        dead, tried, accepted, dict(reasons.most_common()), dict(refused.most_common())
    )


def _first_letters(
    store: Store, found: Sequence[Sequence[FileEntry]], most: int
) -> list[pa.RecordBatch]:
    """Returns the first dead letters of a source partition, within the limits of a stretch."""
    letters: list[pa.RecordBatch] = []
    size = 0
    for files in found:
        size += sum(file.size for file in files)
        if most <= 0 or (letters and size > _BYTES_MAX):
            break
        try:
            batches = read_dead_files(store, files)
        except NotFoundError as exc:
            raise UnavailableError(f"{exc}; or a replay has just replaced it: try again") from exc
        for batch in batches:
            if most > 0:
                letters.append(batch.slice(0, most))
                most -= letters[-1].num_rows
    return letters


def _try_letters(
    context: Context,
    settings: ArchiveSinkSettings,
    partition: str,
    letters: Sequence[pa.RecordBatch],
) -> tuple[int, list[pa.RecordBatch]]:
    """Returns how many dead letters would be in data files, and those that would not."""
    memory = MemoryStore(context.clock)
    writer = ArchiveWriter(settings, memory, partition, "trial")
    for batch in letters:
        writer.write(batch.select(EVENT_SCHEMA.names))
    written = writer.close()
    dead = [
        msgspec.structs.replace(file, target=file.staged)
        for file in written.files
        if file.kind == "dead"
    ]
    return written.events, [batch for file in dead for batch in read_dead_files(memory, [file])]


def _reasons(letters: Iterable[pa.RecordBatch]) -> Iterator[str]:
    """Yields the reason of each dead letter, without what it says of the single event."""
    for batch in letters:
        for error in batch.column("error").to_pylist():
            yield error.partition(": ")[0]


class DeadSource:
    """The dead letters of a generation, as one pass finds them."""

    def __init__(self, context: Context, archive: Archive, pipeline: str) -> None:
        self._context = context
        self._archive = archive
        self._pipeline = pipeline
        self._ends: dict[SourcePartition, ReplayPosition] = {}  # of our pass

    @property
    def url(self) -> str:
        return f"dead:{self._archive.name}"

    def partitions(self) -> list[SourcePartition]:
        """Lists those with dead letters, and those of an earlier replay that may have died there.

        A driver that takes over the latter fences that replay, so sweeps delete what it staged.
        """
        known = read_partitions(self._context, self._pipeline)
        wanted = [each for each in known if self._files(each) or self._has_begun(each)]
        return [SourcePartition.named(each) for each in wanted]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        return {each: Bounds(ReplayPosition().text, self._end(each).text) for each in partitions}

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: SourceRange) -> DeadRange:
        """Returns a reader of whole files from the start, as many as one stretch may have."""
        stretch = ReplayedRange.between(range.start, range.limit)
        taken: list[tuple[FileEntry, ...]] = []
        events = size = 0
        for files in self._files(range.partition.text):
            if not stretch.holds(files[0]):
                continue
            events += sum(file.events for file in files)
            size += sum(file.size for file in files)
            if taken and (events > _EVENTS_MAX or size > _BYTES_MAX):
                end = ReplayPosition(
                    ReplayPosition.parse(range.limit).number, files[0].first_offset
                )
                return self._plan_range(range, taken, end.text)
            taken.append(tuple(files))
        return self._plan_range(range, taken, range.limit)

    def _plan_range(
        self, range: SourceRange, files: list[tuple[FileEntry, ...]], end: str
    ) -> DeadRange:
        pipelines = (self._pipeline, replay_pipeline(self._pipeline))
        rewrites = {
            commit.rewrite
            for each in pipelines
            for commit in read_commits(self._context, each, range.partition.text)
        }
        store = self._archive.store
        return DeadRange(range, tuple(files), end, store, tuple(sorted(rewrites - {""})))

    def cut(self, start: str, end: str, events: int) -> str:
        """Returns the end: only the reader knows where files begin, and it stops earlier itself."""
        return end

    def before(self, one: str, other: str) -> bool:
        return ReplayPosition.parse(one) < ReplayPosition.parse(other)

    def count(self, start: str, end: str) -> int | None:
        return None

    def _has_begun(self, partition: str) -> bool:
        """Returns whether a replay has a head there; that of a dropped generation is closed."""
        head = read_progress(self._context, replay_pipeline(self._pipeline), partition)
        return head is not None and not head.closed

    def _files(self, partition: str) -> list[list[FileEntry]]:
        return dead_files(self._context, self._pipeline, partition)

    def _end(self, partition: SourcePartition) -> ReplayPosition:
        """Returns where our pass ends.

        It is fixed at the start, so each dead letter is tried once.
        """
        progress = read_progress(self._context, replay_pipeline(self._pipeline), partition.text)
        place = ReplayPosition.parse(progress.position) if progress else ReplayPosition()
        if partition not in self._ends:
            found = [file.last_offset for files in self._files(partition.text) for file in files]
            self._ends[partition] = (
                ReplayPosition(place.number + 1, max(found) + 1) if found else place
            )
        return max(self._ends[partition], place)


@dataclass(frozen=True, slots=True)
class DeadRange:
    """Some files of dead letters, to read anywhere; pickles."""

    range: SourceRange
    files: tuple[tuple[FileEntry, ...], ...]  # overlapping files are together
    end: str
    store: str  # URL
    rewrites: tuple[str, ...] = ()  # manifests that running erasures write for such files

    @property
    def is_changing(self) -> bool:
        """Returns whether an erasure is replacing files of dead letters."""
        return bool(self.rewrites)

    def read(self) -> Iterator[Chunk]:
        store = open_store_here(self.store)
        for files in self.files:
            try:
                batches = read_dead_files(store, files)
            except NotFoundError as exc:
                raise UnavailableError(
                    f"{exc}; or another replay has replaced it: then this one stops"
                ) from exc
            for batch in batches:
                yield Chunk(batch.select(EVENT_SCHEMA.names), self.end)
        yield Chunk(pa.RecordBatch.from_pylist([], EVENT_SCHEMA), self.end)


class ReplaySink:
    """The archive's own files; each attempt has its own folder for what stays dead."""

    def __init__(self, settings: ArchiveSinkSettings) -> None:
        self._settings = settings
        self._files = ArchiveSink(settings)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        folder = layout.still_dead(self._settings.dead, staging.rpartition("/")[2])
        return ArchiveSink(replace(self._settings, dead=folder)).writer(partition, staging)

    def publish(self, manifest: Manifest) -> int:
        return self._files.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self._files.discard(manifest)

    def published(self, manifest: Manifest) -> list[FileEntry]:
        return self._files.published(manifest)

    def with_suffix(self, suffix: str) -> ReplaySink:
        return ReplaySink(replace(self._settings, suffix=suffix))

    def aside(self, file: FileEntry, name: str) -> str:
        return self._files.aside(file, name)

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        self._files.set_aside(files, name)

    def folders(self) -> FolderSettings:
        return self._files.folders()

    def folder(self, file: FileEntry) -> str:
        return self._files.folder(file)

    def has_success(self, folder: str) -> bool:
        return self._files.has_success(folder)


_source: type[Source] = DeadSource
_reader: type[RangeReader] = DeadRange
_sink: type[Sink] = ReplaySink


_LOOKS = 5  # at the rows, if files of dead letters vanish in between


def dead_letters(
    context: Context, archive: Archive, generation: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields all dead letters in event columns and ``error``, by source partition and offset.

    During a replay, each appears at most once, and those that stay dead do appear.
    """
    store, pipeline = store_at(context, archive.store), archive.pipeline(generation)
    for partition in read_partitions(context, pipeline):
        after, looks = -1, 0
        while looks < _LOOKS:
            looks += 1
            for files in dead_files(context, pipeline, partition):
                last = max(file.last_offset for file in files)
                if last <= after:
                    continue
                try:
                    batches = read_dead_files(store, files)
                except NotFoundError:
                    if looks == _LOOKS:
                        raise
                    break  # replaced in between
                for batch in batches:
                    yield batch.filter(pc.greater(batch.column("offset"), after))
                after = last
            else:
                break


def count_dead_again(context: Context, archive: Archive, generation: int) -> int:
    """Returns how many events replays put into files of the live generation, and are dead here.

    Reads the files that the replays wrote and the dead letters of these source partitions. A file
    that is damaged, or that was just replaced, is not counted: the number only advises a person.
    """
    store, live = store_at(context, archive.store), archive.pipeline()
    contents, dead = ArchiveFiles(store, archive.format_of()), archive.pipeline(generation)
    count = 0
    for partition in read_partitions(context, dead):
        if not replay_effect(context, live, partition).replayed:
            continue
        replayed: set[int] = set()
        with suppress(CorruptError, NotFoundError):
            for manifest, file in Replays(context, live, partition).counting():
                if file.kind == "data":
                    replayed.update(read_offsets(contents, manifest, file).tolist())
        with suppress(CorruptError, NotFoundError):
            for files in dead_files(context, dead, partition):
                for batch in read_dead_files(store, files):
                    count += len(replayed.intersection(batch.column("offset").to_pylist()))
    return count


def remove_replaced(
    context: Context, store: Store, archive: Archive, generation: int | None = None
) -> int:
    """Deletes files of dead letters that no longer count. Returns how many. Idempotent."""
    pipeline = archive.pipeline(generation)
    replaced: set[str] = set()
    for partition in read_partitions(context, pipeline):
        replays = Replays(context, pipeline, partition)
        if replays.commits:
            replaced |= {file.target for file, counts in replays.dead() if not counts}
    if not replaced:
        return 0
    there = [info.key for info in store.list(f"{archive.dead}/") if info.key in replaced]
    store.delete(there)
    return len(there)


def read_dead_files(store: Store, files: Sequence[FileEntry]) -> list[pa.RecordBatch]:
    """Returns the dead letters of files, by offset. Raises ``NotFoundError``, ``CorruptError``."""
    table = pa.concat_tables([_read_file(store, file) for file in files])
    if len(files) > 1:
        table = table.sort_by("offset")
    return list(table.combine_chunks().to_batches(max_chunksize=BATCH_EVENTS_MAX))


def _read_file(store: Store, file: FileEntry) -> pa.Table:
    try:
        data = store.get(file.target)
    except NotFoundError as exc:
        raise NotFoundError(
            f"dead letters `{file.target}`: the file is gone: restore it from a copy"
        ) from exc
    what = f"dead letters `{file.target}`"
    if len(data) != file.size or crc32c.crc32c(data) != file.crc:
        raise CorruptError(
            f"{what}: expected {file.size} bytes with crc32c {file.crc:08x}, found {len(data)} "
            f"with {crc32c.crc32c(data):08x}: keep it, and restore it from a copy"
        )
    with decoding(what):
        return _read_table(data)


def _read_table(data: bytes) -> pa.Table:
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False).cast(MISFIT_SCHEMA)
