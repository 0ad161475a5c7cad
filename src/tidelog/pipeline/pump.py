"""Pumps: any source into a topic, each event once.

A pump is a named pipeline. Its name follows from source and topic unless one is given, so a pump
that was killed goes on where it was, and a second one of the same name stands by.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field, replace

from tidelog.codec.fields import FieldPaths
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.archive import refuse_archive_folder
from tidelog.pipeline.base import Pipeline, Workers
from tidelog.pipeline.places import sink_at, source_at
from tidelog.pipeline.registry import check_behind, check_loop, ensure_pipeline
from tidelog.sinks.base import TargetSink
from tidelog.sinks.fielded import FieldedSink
from tidelog.sinks.segments import Limit
from tidelog.sinks.topic import TopicSink

__all__ = ["Pumping", "open_pump"]


@dataclass(frozen=True, slots=True)
class Pumping:
    """What is to be pumped, and how."""

    source: str  # URL
    topic: str
    name: str | None = None
    fields: FieldPaths = field(default_factory=FieldPaths)
    transform: str = ""  # module:function, from DataFrame to DataFrame
    partition: str = "key"  # or same: the number of the source partition


def open_pump(home: Home, wanted: Pumping, workers: Workers, rate: float | None = None) -> Pipeline:
    """The pipeline of a pump, made if it is new.

    ``NotFoundError`` when source or topic is not there; ``InvalidError`` when a pump of that name
    was begun with other settings, when its topic was made anew meanwhile, or when it would add to
    another topic than the pumps do that it goes behind.
    """
    _refuse_moving_start(wanted)
    refuse_archive_folder(home, wanted.source, f"pump into `{wanted.topic}`")
    source = source_at(home, wanted.source)
    target = f"topic:{wanted.topic}?partition={wanted.partition}"
    sink: TargetSink = sink_at(home, target, source=source.url)
    if wanted.fields.given():
        most = home.log.settings.event_bytes_max
        limit = Limit(most)
        if isinstance(sink, TopicSink):
            limit, sink = sink.limit, sink.with_limit(replace(sink.limit, own=True))
        sink = FieldedSink(sink, wanted.fields, most, limit)
    sink.check([each.text for each in source.partitions()])
    check_behind(home, source, sink)
    check_loop(home, source.url, sink.url)
    made = _named(home, wanted, source.url, sink)
    named = ensure_pipeline(home, made)
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


def _refuse_moving_start(wanted: Pumping) -> None:
    """A pump is found again by its source, so that may not be another one at each run."""
    start = parse_address(wanted.source).options.get("start", "")
    if start in ("newest", "now") or start.startswith("-"):
        raise InvalidError(
            f"pump `{wanted.source}`: start `{start}` is another time at each run: give the time "
            "itself, or leave it out and say --start latest"
        )


def _named(home: Home, wanted: Pumping, source: str, sink: TargetSink) -> NamedPipeline:
    mark = hashlib.sha256(source.encode()).hexdigest()[:16]
    fields = {name: path for name, path in dataclasses.asdict(wanted.fields).items() if path}
    return NamedPipeline(
        name=wanted.name or f"pump.{wanted.topic}.{mark}",
        incarnation=home.log.ids.new(),
        source=source,
        sink=sink.url,
        target=sink.incarnation,
        created_ms=home.log.clock.now_ms(),
        fields=fields,
        transform=wanted.transform,
    )
