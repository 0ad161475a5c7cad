"""Restores an archive: writes its events to a topic or Kafka, each of them once.

A restore is a pipeline whose source is the archive. Its name follows only from the archive and the
target. So a restore that was killed resumes, and a repeated one writes only what the archive has
received since. A target that was deleted and created again is another target, and gets everything.
Any generation of the archive can be the source: positions are those of the archive's source,
whichever files hold the events. One that is behind what was restored has nothing to add.

A run ends at what the archive held when it began, so that an archive whose source is the target
does not feed itself forever.

Dead letters are restored too, except those that no topic accepts: they stay in the archive, and the
run counts them as dead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tidelog.archive.archive import find_archive
from tidelog.archive.coverage import MissingRange, is_same_sequence, read_covered, without
from tidelog.archive.derived_archives import output_of
from tidelog.codec.formats import settings_of
from tidelog.connectors.archive.dead_letters import split_refused
from tidelog.connectors.by_url import sink_at, source_at
from tidelog.connectors.sink import RangeWriter, TargetSink, WriterResult
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DividingSource,
    MissingOffsets,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
    check_wrapping,
    missing_in,
)
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import Manifest, NamedPipeline
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.registry import check_reach, ensure_pipeline, is_inside
from tidelog.pipeline.tasks import Workers

__all__ = ["RestorableSink", "RestoreOptions", "open_restore", "restore", "restore_limit"]

_SHOWN = 3  # ranges in an error


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """What to restore, and where to."""

    archive: str
    to: str  # URL of a topic or of Kafka
    generation: int | None = None  # whose files to read; by default the live one
    partition: str | None = None  # same or key; default: same, unless the URL says otherwise

    def sink(self) -> str:
        """Returns the URL with the choice of partitions."""
        said = parse_address(self.to).options.get("partition")
        if said is not None and self.partition not in (None, said):
            raise InvalidError(
                f"restore to `{self.to}`: partition {self.partition} and the address contradict: "
                "give one of them"
            )
        if said is not None:
            return self.to
        return f"{self.to}{'&' if '?' in self.to else '?'}partition={self.partition or 'same'}"


def restore_limit(written_as: ArchiveFormat) -> str:
    """Returns what a restore of such files cannot bring back; empty if nothing is lost."""
    settings = settings_of(written_as.format_settings)
    if settings.schema is not None and settings.keep_value is False:
        return (
            "its files have typed columns without the raw value: no restore is possible, and "
            "fields that the schema does not name are lost"
        )
    if output := output_of(written_as):
        return f"its files hold what the {output} returns: a restore brings back only that"
    return ""


def restore(
    context: Context, wanted: RestoreOptions, workers: Workers, how: DriverOptions | None = None
) -> int:
    """Brings a target up to what the archive holds now. Returns how many events it wrote.

    Safe to kill, to repeat, and to run twice at once.
    """
    how = how or DriverOptions(wait=True)
    return Driver(context, open_restore(context, wanted, workers), how).run()


def open_restore(
    context: Context, wanted: RestoreOptions, workers: Workers, rate: float | None = None
) -> Pipeline:
    """Opens the pipeline of a restore, and creates it if it is new.

    Raises ``NotFoundError`` if archive or target does not exist. Raises ``InvalidError`` if the
    target has too few partitions, if the restore began with another choice of partitions, or if it
    has passed events that the archive got since.
    """
    archive = find_archive(context, wanted.archive)
    archive.format_of(wanted.generation)
    chosen = "" if wanted.generation is None else f"?generation={wanted.generation}"
    source = _ArchiveSnapshot(source_at(context, f"archive:{archive.name}{chosen}"))
    if not is_inside(wanted.sink()):
        context.identity.check(f"restore of `{archive.name}` into `{wanted.to}`")
    sink = RestorableSink(sink_at(context, wanted.sink(), source=source.url))
    sink.check([each.text for each in source.partitions()])
    named = ensure_pipeline(context, _restore_record(context, archive, sink))
    check_reach(context, named)
    if _partition_choice(named.sink) != _partition_choice(sink.url):
        raise InvalidError(
            f"restore of `{archive.name}` to `{wanted.to}`: was begun with partition "
            f"{_partition_choice(named.sink)}: continue so, or restore into another target"
        )
    found = _passed(context, archive.pipeline(wanted.generation), named.incarnation)
    passed = [each.text for each in found if _count_events(source, each)]
    more = _undropped(context, archive.pipeline(wanted.generation), named.incarnation)
    passed += [
        f"events in {each.text}" for each, events in more if _count_events(source, each) > events
    ]
    if passed:
        raise InvalidError(
            f"restore of `{archive.name}` to `{wanted.to}`: is past {', '.join(passed[:_SHOWN])}, "
            "which the archive got since: restore into another target"
        )
    return Pipeline(named.name, named.incarnation, source, sink, workers, rate=rate)


def _passed(context: Context, archived: str, restored: str) -> Iterator[MissingRange]:
    """Yields what a promoted generation covers, and the one that was restored before did not."""
    for partition in read_partitions(context, restored):
        held = read_covered(context, archived, partition)
        done = read_covered(context, restored, partition)
        if held is None or done is None or not (held.by_offset and done.by_offset):
            continue
        if not is_same_sequence(held, done):
            continue
        for start, end in without(held.intervals(), done.intervals()):
            if start < int(done.end):
                last = str(min(end, int(done.end)))
                yield MissingRange(partition, str(start), last)


def _undropped(
    context: Context, archived: str, restored: str
) -> Iterator[tuple[MissingRange, int]]:
    """Yields where the archive may have events that were only counted as missing when restored.

    What a transform dropped, what a folder lacked here and there, and what was never there is
    counted, and not listed. A promoted generation may have some of it. Also yields how many events
    were restored there.
    """
    for partition in read_partitions(context, restored):
        held, done = (read_covered(context, each, partition) for each in (archived, restored))
        head = read_progress(context, restored, partition)
        if held is None or done is None or head is None or not done.by_offset:
            continue
        missing = head.totals.absent + sum(gap.offsets for gap in head.gaps if gap.is_partial)
        if not missing or not held.by_offset or not is_same_sequence(held, done):
            continue
        start, end = max(int(held.begin), int(done.begin)), min(int(held.end), int(done.end))
        if start < end and _counted_missing(context, archived, partition, end) < missing:
            yield MissingRange(partition, str(start), str(end)), head.ordinal


def _counted_missing(context: Context, pipeline: str, partition: str, end: int) -> int:
    """Returns how many offsets before an end had no event, without whole gaps and erased events."""
    manifests = read_manifests(context, pipeline, partition)
    inside = [each for each in manifests if int(each.start) < end]
    gaps = sum(gap.offsets for each in inside for gap in each.lost if gap.is_partial)
    return gaps + sum(each.dropped + each.absent for each in inside)


def _count_events(source: Source, passed: MissingRange) -> int:
    partition = SourcePartition.named(passed.partition)
    chunks = source.read(SourceRange(partition, passed.start, passed.end))
    return sum(chunk.batch.num_rows for chunk in chunks)


@dataclass
class _ArchiveSnapshot:
    """An archive as it was at the first look."""

    source: Source
    ends: dict[SourcePartition, Bounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_wrapping(self, self.source)

    @property
    def url(self) -> str:
        return self.source.url

    def partitions(self) -> list[SourcePartition]:
        if not self.ends:
            found = self.source.bounds(self.source.partitions())
            # A restore belongs to one archive, so another generation of it may only be behind.
            self.ends = {each: replace(b, may_be_behind=True) for each, b in found.items()}
        return sorted(self.ends)

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        return {each: self.ends[each] for each in partitions}

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        return self.source.read(range)

    def reader(self, range: SourceRange) -> RangeReader:
        return self.source.reader(range)

    def cut(self, start: str, end: str, events: int) -> str:
        return self.source.cut(start, end, events)

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        if not isinstance(self.source, DividingSource):
            return ()
        return self.source.divide(range, parts)

    def before(self, one: str, other: str) -> bool:
        return self.source.before(one, other)

    def count(self, start: str, end: str) -> int | None:
        return self.source.count(start, end)

    def missing(self, range: SourceRange, read: int) -> MissingOffsets:
        return missing_in(self.source, range, read)


def _restore_record(context: Context, archive: Archive, sink: TargetSink) -> NamedPipeline:
    """Returns the registry's record, with a name unique to the archive and target."""
    scheme = parse_address(sink.url).scheme
    pair = f"{archive.incarnation} {scheme} {sink.incarnation}"
    mark = hashlib.sha256(pair.encode()).hexdigest()[:16]
    return NamedPipeline(
        name=f"restore.{archive.name}.{mark}",
        incarnation=context.ids.new(),
        source=f"archive:{archive.name}",
        sink=sink.url,
        target=sink.incarnation,
        created_ms=context.clock.now_ms(),
        home="" if is_inside(sink.url) else context.home_id,
    )


def _partition_choice(url: str) -> str:
    return parse_address(url).options.get("partition", "key")


_: type[Source] = _ArchiveSnapshot


@dataclass(frozen=True)
class RestorableSink:
    """Another sink whose writers get only what can be restored. Pickles if that sink does."""

    sink: TargetSink

    @property
    def url(self) -> str:
        return self.sink.url

    @property
    def incarnation(self) -> str:
        return self.sink.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        self.sink.check(partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        return _RestorableWriter(self.sink.writer(partition, staging))

    def publish(self, manifest: Manifest) -> int:
        return self.sink.publish(manifest)

    def discard(self, manifest: Manifest) -> None:
        self.sink.discard(manifest)


@dataclass
class _RestorableWriter:
    writer: RangeWriter
    dead: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        batch, refused = split_refused(batch)
        self.dead += 0 if refused is None else refused.num_rows
        if batch.num_rows:
            self.writer.write(batch)

    def close(self) -> WriterResult:
        return replace(self.writer.close(), dead=self.dead)


_sink: type[TargetSink] = RestorableSink
