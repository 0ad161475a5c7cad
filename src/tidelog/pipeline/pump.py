"""Pumps: copy any source into a topic, each event once.

A pump is a named pipeline. By default its name follows from source and topic, so a pump that was
killed resumes. Processes that run one with the same name share its source partitions.

The status of a pump has the progress, lag and failures of each source partition.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tidelog.codec.fields import FieldPaths
from tidelog.connectors.archive.source import ArchiveSource
from tidelog.connectors.by_url import refuse_archive_folder, sink_at, source_at
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import Bounds, Source, SourcePartition
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import FieldedSink, TopicSink
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import read_intent, read_partitions, read_progress
from tidelog.errors import (
    InvalidError,
    TidelogError,
)
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline, Totals
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.registry import check_behind, check_loop, ensure_pipeline
from tidelog.pipeline.source_partitions import track
from tidelog.pipeline.tasks import Workers

__all__ = [
    "PumpOptions",
    "PumpPartition",
    "PumpStatus",
    "is_pump",
    "is_restore",
    "open_pump",
    "pump_options",
    "read_pump_status",
    "refuse_moving_start",
]


_RESTORE = "restore."  # how names of restores begin


@dataclass(frozen=True, slots=True)
class PumpOptions:
    """What to pump, and how."""

    source: str  # URL
    topic: str
    name: str | None = None
    fields: FieldPaths = field(default_factory=FieldPaths)
    transform: str = ""  # module:function, from DataFrame to DataFrame
    partition: str = "key"  # or same: the number of the source partition


def open_pump(
    context: Context,
    wanted: PumpOptions,
    workers: Workers,
    record: Callable[[str], None] = lambda name: None,
) -> Pipeline:
    """Opens the pipeline of a pump, and creates it if it is new.

    ``record`` is called with its name before a new one is created. Raises ``NotFoundError`` if
    source or topic does not exist. Raises ``InvalidError`` if a pump of that name has other
    settings, if its topic was created again, or if it would add to another topic than the pumps it
    follows.
    """
    refuse_moving_start(wanted.source, f"pump `{wanted.source}`")
    refuse_archive_folder(context, wanted.source, f"pump into `{wanted.topic}`")
    source = source_at(context, wanted.source)
    target = f"topic:{wanted.topic}?partition={wanted.partition}"
    sink: TargetSink = sink_at(context, target, source=source.url)
    if wanted.fields.given():
        most = context.log_settings.event_bytes_max
        limit = EventLimit(most)
        if isinstance(sink, TopicSink):
            limit, sink = sink.limit, sink.with_limit(replace(sink.limit, own=True))
        sink = FieldedSink(sink, wanted.fields, most, limit)
    sink.check([each.text for each in source.partitions()])
    check_behind(context, source, sink)
    check_loop(context, source.url, sink.url)
    made = _pump_record(context, wanted, source.url, sink)
    named = ensure_pipeline(context, made, lambda: record(made.name))
    for setting in ("source", "sink", "fields", "transform"):
        before, now = getattr(named, setting), getattr(made, setting)
        if before != now:
            raise InvalidError(
                f"pump `{named.name}`: was begun with {setting} {before or 'none'}, not "
                f"{now or 'none'}: continue so, or give it another --name"
            )
    if named.target != sink.incarnation:
        raise InvalidError(
            f"pump `{named.name}`: its topic `{wanted.topic}` was deleted and made again since it "
            "began: give it another --name to pump everything again"
        )
    return Pipeline(
        named.name,
        named.incarnation,
        source,
        sink,
        workers,
        wanted.transform,
        goes_back=isinstance(source, ArchiveSource),
    )


def is_restore(named: NamedPipeline) -> bool:
    """Returns whether a pipeline is a restore of an archive, which ends by itself."""
    return named.name.startswith(_RESTORE) and named.source.startswith("archive:")


def is_pump(named: NamedPipeline) -> bool:
    """Returns whether a pipeline is a pump that can run."""
    inside = parse_address(named.sink).scheme == "topic"
    return named.state == "ready" and inside and not is_restore(named)


def pump_options(named: NamedPipeline) -> PumpOptions:
    """Returns what a pump was created with."""
    sink = parse_address(named.sink)
    return PumpOptions(
        named.source,
        sink.path.strip("/"),
        named.name,
        FieldPaths(**named.fields),
        named.transform,
        sink.options.get("partition", "key"),
    )


def refuse_moving_start(source: str, what: str) -> None:
    """Raises for a relative start: a pump is found by its source, which must not change."""
    start = parse_address(source).options.get("start", "")
    if start in ("newest", "now") or start.startswith("-"):
        raise InvalidError(
            f"{what}: start `{start}` is another time at each run: give the time "
            "itself, or leave it out and give the start `latest`"
        )


def _pump_record(
    context: Context, wanted: PumpOptions, source: str, sink: TargetSink
) -> NamedPipeline:
    mark = hashlib.sha256(source.encode()).hexdigest()[:16]
    fields = {name: path for name, path in dataclasses.asdict(wanted.fields).items() if path}
    return NamedPipeline(
        name=wanted.name or f"pump.{wanted.topic}.{mark}",
        incarnation=context.ids.new(),
        source=source,
        sink=sink.url,
        target=sink.incarnation,
        created_ms=context.clock.now_ms(),
        fields=fields,
        transform=wanted.transform,
    )


@dataclass(frozen=True, slots=True)
class PumpPartition:
    """The progress of a pump in one source partition."""

    partition: str
    position: str
    end: str | None  # None: the source does not say, or was not read
    lag: int | None  # waiting events, if the source can count them
    events: int  # read so far
    totals: Totals
    intent_ms: int | None  # since when a range is in progress
    has_begun: bool = True
    error: str = ""  # why its driver cannot read it; empty: no known failure
    has_ended: bool = False  # by a person's decision, since its source was made again


@dataclass(frozen=True, slots=True)
class PumpStatus:
    """The status of a pump, or of another named pipeline."""

    named: NamedPipeline
    partitions: tuple[PumpPartition, ...]
    error: str  # why its source or its driver fails; empty: no known failure
    read_ms: int

    @property
    def lag(self) -> int | None:
        """Returns how many events wait in total, if the source can count them."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if known else None

    @property
    def events(self) -> int:
        """Returns how many events were read."""
        return sum(each.events for each in self.partitions)

    @property
    def left_out(self) -> int:
        """Returns how many events were skipped because they were erased from the target."""
        return sum(each.totals.left_out for each in self.partitions)

    @property
    def last_commit_ms(self) -> int | None:
        """When something was last committed; None: never."""
        return max((each.totals.committed_ms for each in self.partitions), default=0) or None


def read_pump_status(context: Context, named: NamedPipeline, *, source: bool = True) -> PumpStatus:
    """Returns how a pump does now; without ``source`` what its rows say, and no source is asked.

    A source that cannot be reached leaves what the rows say too, and is the ``error``.
    """
    error = ""
    opened: Source | None = None
    bounds: Mapping[SourcePartition, Bounds] = {}
    if source:
        try:
            opened = source_at(context, named.source)
            track(context, named.incarnation, opened)
            bounds = opened.bounds(opened.partitions())
        except TidelogError as exc:
            error = f"its source cannot be reached: {exc}"
    failures = read_failures(context, named.incarnation)
    if not error and failures:
        name, failure = next(iter(failures.items()))
        error = f"{name or 'its source'}: {failure.message}"
    known = {each.text for each in bounds} | set(read_partitions(context, named.incarnation))
    known |= failures.keys() - {""}
    found = tuple(
        replace(
            _partition(context, named, each, opened, bounds),
            error=failures[each].message if each in failures else "",
        )
        for each in sorted(known)
    )
    return PumpStatus(named, found, error, context.clock.now_ms())


def _partition(
    context: Context,
    named: NamedPipeline,
    name: str,
    source: Source | None,
    bounds: Mapping[SourcePartition, Bounds],
) -> PumpPartition:
    progress = read_progress(context, named.incarnation, name)
    held = bounds.get(SourcePartition.named(name))
    position = progress.position if progress else (held.first if held else "")
    intent = read_intent(context, named.incarnation, name)
    return PumpPartition(
        name,
        position,
        held.end if held else None,
        source.count(position, held.end) if source and held else None,
        progress.ordinal if progress else 0,
        progress.totals if progress else Totals(),
        intent.began_ms if intent else None,
        progress is not None,
        has_ended=bool(progress and progress.ended),
    )
