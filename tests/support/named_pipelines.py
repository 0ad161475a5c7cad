"""Named pipelines between any source and any sink, as no command makes them: for tests of sinks."""

from __future__ import annotations

from tidelog.connectors.by_url import sink_at, source_at
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, InvalidError
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.registry import (
    check_behind,
    check_loop,
    check_reach,
    ensure_pipeline,
    is_inside,
)
from tidelog.pipeline.tasks import Workers


def create_pipeline(context: Context, name: str, source: str, sink: str) -> NamedPipeline:
    """Creates a pipeline, after the checks of a pump. Raises ``AlreadyExistsError``."""
    opened = sink_at(context, sink, source=source)
    reads = source_at(context, source)
    opened.check([each.text for each in reads.partitions()])
    check_behind(context, reads, opened)
    check_loop(context, reads.url, opened.url)
    made = NamedPipeline(
        name=name,
        incarnation=context.ids.new(),
        source=reads.url,
        sink=opened.url,
        target=opened.incarnation,
        created_ms=context.clock.now_ms(),
        home="" if is_inside(opened.url) else context.home_id,
    )
    found = ensure_pipeline(context, made)
    if found.incarnation != made.incarnation:
        raise AlreadyExistsError(f"pipeline `{name}`: exists already: choose another name")
    return found


def open_named(context: Context, named: NamedPipeline, workers: Workers) -> Pipeline:
    """Opens a pipeline to run. Raises ``InvalidError`` if its target was created again."""
    check_reach(context, named)
    source = source_at(context, named.source)
    sink = sink_at(context, named.sink, source=named.source)
    if sink.incarnation != named.target:
        raise InvalidError(f"pipeline `{named.name}`: `{named.sink}` was deleted and made again")
    return Pipeline(named.name, named.incarnation, source, sink, workers)
