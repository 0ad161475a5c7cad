"""Dead letters tried again: what now parses becomes data files of the archive, exactly once.

A replay is a pipeline on the engine, with rows of its own (``<pipeline>.dead``) and the same source
partitions. It goes through the dead letters in *passes*; positions are ``<pass>:<offset>``. A
stretch is some whole files of dead letters, one after another, and goes through these steps:

1. begin: the pass after that of the ``head``, up to the last dead
   letter that is there; steps 0 to 3 of the cycle                 → dead: as in the cycle
2. do: read the stretch's files, ask the parser, stage data files
   and one file of those that stay dead                            → dead: staged, named by nothing
3. record the manifest in the ``intent``                           → dead: decided; published next
4. publish: data files into the archive's folder, dead letters
   into a folder that no other attempt has                         → dead: the next one copies more
5. commit: ``commit`` row, ``head``, no ``intent``. From here on
   the stretch's old files of dead letters do not count            → dead: old files that lie there
6. remove them                                                     → dead: the next replay does

So an event is in the archive's folder from step 4 on, once, since only step 5 lets anybody get at
that stretch again; and in the manifest from step 5 on, which at once takes it off the dead letters.
A driver that lost its partition fails at step 3 or 5, as in the cycle. Names of data files cannot
meet others: each tells the offset of its own first event, and no dead letter is in a data file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pyarrow as pa

from tidelog.codec.events import EVENT_SCHEMA
from tidelog.codec.parsers import LayoutSettings
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.home import Home
from tidelog.log.archives import read_commits, read_partitions, read_progress
from tidelog.log.base import Log
from tidelog.log.replays import Place, Stretch, dead_files, replay_pipeline
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.pipeline.archive import files_settings
from tidelog.pipeline.base import Pipeline, Workers
from tidelog.pipeline.cycle import CycleReport
from tidelog.pipeline.dead import read_dead_files, remove_replaced
from tidelog.pipeline.driver import Driver, Driving, new_stop
from tidelog.pipeline.erased_before import ErasedBefore
from tidelog.pipeline.gate import Gate
from tidelog.pipeline.places import files_at
from tidelog.sinks.base import RangeWriter, Sink
from tidelog.sinks.files import FilesSettings, FilesSink
from tidelog.sources.base import Bounds, Chunk, Range, RangeReader, Source, SourcePartition
from tidelog.store.here import open_store_here

__all__ = ["DeadSource", "Replayed", "Replaying", "open_replay", "replay"]

_EVENTS_MAX = 100_000  # of one stretch; what stays dead is held until it ends
_BYTES_MAX = 64 << 20  # of its files


@dataclass
class Replaying:
    """How dead letters are tried again: with settings that may differ from the archive's own."""

    generation: int | None = None
    parser: str = ""  # empty: the archive's
    layout: Mapping[str, str] = field(default_factory=dict)  # over the archive's
    stop: threading.Event = field(default_factory=new_stop)
    on_cycle: Callable[[CycleReport], None] = lambda _: None


@dataclass
class Replayed:
    """What a replay did."""

    tried: int = 0
    replayed: int = 0
    dead: int = 0  # still
    files: int = 0  # of data

    def add(self, report: CycleReport) -> None:
        for manifest in report.committed.values():
            self.tried += manifest.read
            self.replayed += manifest.written
            self.dead += manifest.dead
            self.files += sum(file.kind == "data" for file in manifest.files)


def replay(home: Home, archive: Archive, how: Replaying, workers: Workers) -> Replayed:
    """Try all dead letters again. Safe to kill, to repeat, and to run twice at once."""
    store = files_at(home, archive)
    pipeline = open_replay(home.log, archive, how, workers)
    done = Replayed()

    def tell(report: CycleReport) -> None:
        done.add(report)
        how.on_cycle(report)

    Driver(home.log, pipeline, Driving(stop=how.stop, on_cycle=tell)).run()
    remove_replaced(home.log, store, archive, how.generation)
    return done


def open_replay(log: Log, archive: Archive, how: Replaying, workers: Workers) -> Pipeline:
    """The pipeline that takes dead letters into the archive."""
    making = archive.making(how.generation)
    number = archive.generation if how.generation is None else how.generation
    changed = msgspec.structs.replace(
        making, parser=how.parser or making.parser, layout={**making.layout, **how.layout}
    )
    wanted = msgspec.structs.replace(archive, makings={**archive.makings, number: changed})
    settings = replace(files_settings(wanted, number), dead_share_max=1.0)
    name, pipeline = f"{archive.name}, dead letters", archive.pipeline(number)
    source = DeadSource(log, archive, pipeline)
    return Pipeline(
        name,
        replay_pipeline(pipeline),
        source,
        ReplaySink(settings),
        workers,
        gate=Gate(log, archive, number),
        erased=ErasedBefore(log, archive, number),
    )


class DeadSource:
    """The dead letters of a generation, as one pass finds them."""

    def __init__(self, log: Log, archive: Archive, pipeline: str) -> None:
        self._log = log
        self._archive = archive
        self._pipeline = pipeline
        self._ends: dict[SourcePartition, Place] = {}  # of our pass

    @property
    def url(self) -> str:
        return f"dead:{self._archive.name}"

    def partitions(self) -> list[SourcePartition]:
        """Those with dead letters, and those of an earlier replay, which may have died there.

        A driver that takes these over fences it, so that sweeps delete what it has staged.
        """
        known = read_partitions(self._log, self._pipeline)
        wanted = [each for each in known if self._files(each) or self._has_begun(each)]
        return [SourcePartition.named(each) for each in wanted]

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        return {each: Bounds(Place().text, self._end(each).text) for each in partitions}

    def read(self, range: Range) -> Iterator[Chunk]:
        return self.reader(range).read()

    def reader(self, range: Range) -> DeadRange:
        """Whole files from the start on, as many as one stretch may have."""
        stretch = Stretch.between(range.start, range.limit)
        taken: list[tuple[FileEntry, ...]] = []
        events = size = 0
        for files in self._files(range.partition.text):
            if not stretch.holds(files[0]):
                continue
            events += sum(file.events for file in files)
            size += sum(file.size for file in files)
            if taken and (events > _EVENTS_MAX or size > _BYTES_MAX):
                end = Place(Place.parse(range.limit).number, files[0].first_offset)
                return self._planned(range, taken, end.text)
            taken.append(tuple(files))
        return self._planned(range, taken, range.limit)

    def _planned(self, range: Range, files: list[tuple[FileEntry, ...]], end: str) -> DeadRange:
        pipelines = (self._pipeline, replay_pipeline(self._pipeline))
        rewrites = {
            commit.rewrite
            for each in pipelines
            for commit in read_commits(self._log, each, range.partition.text)
        }
        store = self._archive.store
        return DeadRange(range, tuple(files), end, store, tuple(sorted(rewrites - {""})))

    def cut(self, start: str, end: str, events: int) -> str:
        """The end: a reader stops earlier by itself, as only it knows where files begin."""
        return end

    def before(self, one: str, other: str) -> bool:
        return Place.parse(one) < Place.parse(other)

    def count(self, start: str, end: str) -> int | None:
        return None

    def _has_begun(self, partition: str) -> bool:
        """Whether a replay has a head there; that of a dropped generation is closed."""
        head = read_progress(self._log, replay_pipeline(self._pipeline), partition)
        return head is not None and not head.closed

    def _files(self, partition: str) -> list[list[FileEntry]]:
        return dead_files(self._log, self._pipeline, partition)

    def _end(self, partition: SourcePartition) -> Place:
        """Where our pass ends: fixed when it begins, so that it tries each dead letter once."""
        progress = read_progress(self._log, replay_pipeline(self._pipeline), partition.text)
        place = Place.parse(progress.position) if progress else Place()
        if partition not in self._ends:
            found = [file.last_offset for files in self._files(partition.text) for file in files]
            self._ends[partition] = Place(place.number + 1, max(found) + 1) if found else place
        return max(self._ends[partition], place)


@dataclass(frozen=True, slots=True)
class DeadRange:
    """Some files of dead letters, to be read anywhere; pickles."""

    range: Range
    files: tuple[tuple[FileEntry, ...], ...]  # those that overlap are together
    end: str
    store: str  # URL
    rewrites: tuple[str, ...] = ()  # manifests that erasures under way make for such files

    @property
    def is_changing(self) -> bool:
        """Whether an erasure is replacing files of dead letters."""
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

    def __init__(self, settings: FilesSettings) -> None:
        self._settings = settings
        self._files = FilesSink(settings)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        folder = layout.still_dead(self._settings.dead, staging.rpartition("/")[2])
        return FilesSink(replace(self._settings, dead=folder)).writer(partition, staging)

    def publish(self, manifest: Manifest) -> None:
        self._files.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self._files.discard(manifest)

    def published(self, manifest: Manifest) -> list[FileEntry]:
        return self._files.published(manifest)

    def named(self, names: str) -> ReplaySink:
        return ReplaySink(replace(self._settings, names=names))

    def aside(self, file: FileEntry, name: str) -> str:
        return self._files.aside(file, name)

    def set_aside(self, files: Sequence[FileEntry], name: str) -> None:
        self._files.set_aside(files, name)

    def layout(self) -> LayoutSettings:
        return self._files.layout()

    def folder(self, file: FileEntry) -> str:
        return self._files.folder(file)

    def is_marked(self, folder: str) -> bool:
        return self._files.is_marked(folder)


_source: type[Source] = DeadSource
_reader: type[RangeReader] = DeadRange
_sink: type[Sink] = ReplaySink
