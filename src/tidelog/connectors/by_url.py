# ruff: noqa: PLC0415 - one lazy import for each scheme
"""Opens sources and sinks by URL.

**Sources** are Kafka, Kinesis, Scylla's change logs, topics, archives and files. A source has one
method, ``read(range)``, which yields Arrow batches in event columns. It runs on a driver or in a
Spark task. A source holds plain settings, pickles, and opens its connections where it is used. Its
promise: order within a source partition, and it never skips events silently. It must not know
pipelines, sinks or the catalog of its reader.

``source`` defines the protocols; each system has a folder with its own source. ``merge`` puts the
events of several files into one order. Other packages add a source through the entry point group
``tidelog.sources``.

**Sinks** of pipelines are topics, Kafka and Kinesis. A sink stages the output of a range and
publishes it after the pipeline recorded a manifest. Its promise: publishing twice, or from two
drivers at once, publishes once, wherever the target can detect that. Staged files are never
visible. A sink must not know sources or pipelines.

``sink`` defines the protocols. ``connectors.archive.sink`` writes the files of archives.
``topic.sink``, ``kafka.sink`` and ``kinesis.sink`` write events to a log, staged by
``topic.segments``. Other packages add a sink through the entry point group ``tidelog.sinks``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DirectReader,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
)
from tidelog.context import OpenContext
from tidelog.errors import InvalidError
from tidelog.model.address import nearest, parse_address
from tidelog.plugins import find_plugins, needs_extra

__all__ = [
    "SOURCE_SCHEMES",
    "Bounds",
    "Chunk",
    "DirectReader",
    "RangeReader",
    "Source",
    "SourcePartition",
    "SourceRange",
    "open_sink",
    "open_source",
    "pipelines_behind",
]

SOURCE_SCHEMES = ("kafka", "kinesis", "scylla", "topic", "archive", "file")


def open_source(
    url: str, *, environ: Mapping[str, str], open_context: OpenContext | None = None
) -> Source:
    """Opens the source at a URL. Sends nothing before the first call.

    ``open_context`` opens the home of a ``topic:`` or ``archive:``, in the process that calls it.
    It must pickle if the source goes to other processes.
    """
    address = parse_address(url)
    if address.scheme == "kafka":
        with needs_extra("kafka source", "confluent_kafka", "kafka"):
            from tidelog.connectors.kafka.source import open_kafka
        return open_kafka(address, environ=environ)
    if address.scheme == "kinesis":
        with needs_extra("kinesis source", "boto", "aws"):
            from tidelog.connectors.kinesis.source import open_kinesis
        return open_kinesis(address, environ=environ)
    if address.scheme == "scylla":
        from tidelog.connectors.scylla.source import open_scylla

        return open_scylla(address, environ=environ, open_context=open_context)
    if address.scheme in ("topic", "archive"):
        from tidelog.connectors.archive.source import open_archive
        from tidelog.connectors.topic.source import open_topic

        if open_context is None:
            raise InvalidError(f"source `{url}`: is in a home, and none is open: name the home")
        opening = open_topic if address.scheme == "topic" else open_archive
        return opening(address, open_context)
    if address.scheme == "file":
        from tidelog.connectors.files.source import open_files

        return open_files(address)
    for entry in find_plugins("tidelog.sources", address.scheme):
        source: Source = entry.load()(address, environ=environ)
        return source
    raise InvalidError(
        f"source `{url}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, SOURCE_SCHEMES)}: give one of {', '.join(SOURCE_SCHEMES)}"
    )


def pipelines_behind(url: str) -> tuple[str, ...]:
    """Returns the pipelines that a source adds missed events to, without opening it."""
    address = parse_address(url)
    if address.scheme != "scylla":
        return ()
    return tuple(filter(None, address.options.get("of", "").split(",")))


SINK_SCHEMES = ("kafka", "kinesis", "topic")


def open_sink(url: str, *, environ: Mapping[str, str], open_context: OpenContext) -> TargetSink:
    """Opens the sink at a URL. Raises ``NotFoundError`` if its target does not exist.

    ``open_context`` opens the home that stages the events and that ``topic:`` refers to, in the
    process that calls it. It must pickle if the sink goes to other processes.
    """
    address = parse_address(url)
    if address.scheme == "topic":
        from tidelog.connectors.topic.sink import open_topic

        return open_topic(address, open_context)
    with open_context() as context:
        store = context.store.url
    if address.scheme == "kafka":
        with needs_extra("kafka sink", "confluent_kafka", "kafka"):
            from tidelog.connectors.kafka.sink import open_kafka
        return open_kafka(address, environ=environ, store=store)
    if address.scheme == "kinesis":
        with needs_extra("kinesis sink", "boto", "aws"):
            from tidelog.connectors.kinesis.sink import open_kinesis
        return open_kinesis(address, environ=environ, store=store)
    for entry in find_plugins("tidelog.sinks", address.scheme):
        sink: TargetSink = entry.load()(address, environ=environ, store=store)
        return sink
    raise InvalidError(
        f"sink `{url}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, SINK_SCHEMES)}: give one of {', '.join(SINK_SCHEMES)}"
    )
