"""Pumps: copy any source into a topic, each event once.

A pump is a named pipeline. By default its name follows from source and topic, so a pump that was
killed resumes, and a second one with the same name waits as a standby.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field, replace

from tidelog.codec.fields import FieldPaths
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import FieldedSink, TopicSink
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.base import Pipeline, Workers
from tidelog.pipeline.endpoints import refuse_archive_folder, sink_at, source_at
from tidelog.pipeline.registry import check_behind, check_loop, ensure_pipeline

__all__ = ["PumpOptions", "is_pump", "is_restore", "open_pump", "pump_options"]

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
    context: Context, wanted: PumpOptions, workers: Workers, rate: float | None = None
) -> Pipeline:
    """Opens the pipeline of a pump, and creates it if it is new.

    Raises ``NotFoundError`` if source or topic does not exist. Raises ``InvalidError`` if a pump of
    that name has other settings, if its topic was created again, or if it would add to another
    topic than the pumps it follows.
    """
    _refuse_moving_start(wanted)
    refuse_archive_folder(context, wanted.source, f"pump into `{wanted.topic}`")
    source = source_at(context, wanted.source)
    target = f"topic:{wanted.topic}?partition={wanted.partition}"
    sink: TargetSink = sink_at(context, target, source=source.url)
    if wanted.fields.given():
        most = context.settings.event_bytes_max
        limit = EventLimit(most)
        if isinstance(sink, TopicSink):
            limit, sink = sink.limit, sink.with_limit(replace(sink.limit, own=True))
        sink = FieldedSink(sink, wanted.fields, most, limit)
    sink.check([each.text for each in source.partitions()])
    check_behind(context, source, sink)
    check_loop(context, source.url, sink.url)
    made = _pump_record(context, wanted, source.url, sink)
    named = ensure_pipeline(context, made)
    for setting in ("source", "sink", "fields", "transform"):
        before, now = getattr(named, setting), getattr(made, setting)
        if before != now:
            raise InvalidError(
                f"pump `{named.name}`: was begun with {setting} {before or 'none'}, not "
                f"{now or 'none'}: go on so, or give it another --name"
            )
    if named.target != sink.incarnation:
        raise InvalidError(
            f"pump `{named.name}`: its topic `{wanted.topic}` was deleted and made again since it "
            "began: give it another --name to pump everything anew"
        )
    return Pipeline(named.name, named.incarnation, source, sink, workers, wanted.transform, rate)


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


def _refuse_moving_start(wanted: PumpOptions) -> None:
    """Raises for a relative start: a pump is found by its source, which must not change."""
    start = parse_address(wanted.source).options.get("start", "")
    if start in ("newest", "now") or start.startswith("-"):
        raise InvalidError(
            f"pump `{wanted.source}`: start `{start}` is another time at each run: give the time "
            "itself, or leave it out and say --start latest"
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
