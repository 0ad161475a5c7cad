"""Opens sources by URL: Kafka, Kinesis, Scylla's change logs, topics, archives, files.

A source has one method, ``read(range)``, which yields Arrow batches in event columns. It runs on a
driver or in a Spark task. A source holds plain settings, pickles, and opens its connections where
it is used. Its promise: order within a source partition, and it never skips events silently. It
must not know pipelines, sinks or the catalog of its reader.

``source`` defines the protocols; each system has a folder with its own source. ``merge`` puts the
events of several files into one order. Other packages add a source through the entry point group
``tidelog.sources``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DirectReader,
    RangeReader,
    Source,
    SourcePartition,
    SourceRange,
)
from tidelog.errors import InvalidError
from tidelog.model.address import nearest, parse_address

if TYPE_CHECKING:
    from tidelog.connectors.topic.source import OpenContext

__all__ = [
    "SOURCE_SCHEMES",
    "Bounds",
    "Chunk",
    "DirectReader",
    "RangeReader",
    "Source",
    "SourcePartition",
    "SourceRange",
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
        try:
            from tidelog.connectors.kafka.source import open_kafka
        except ModuleNotFoundError as exc:
            if exc.name and exc.name.startswith("confluent_kafka"):
                text = "kafka source is not installed: pip install 'tidelog[kafka]'"
                raise InvalidError(text) from exc
            raise
        return open_kafka(address, environ=environ)
    if address.scheme == "kinesis":
        try:
            from tidelog.connectors.kinesis.source import open_kinesis
        except ModuleNotFoundError as exc:
            if exc.name and exc.name.startswith("boto"):
                text = "kinesis source is not installed: pip install 'tidelog[aws]'"
                raise InvalidError(text) from exc
            raise
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
    for entry in entry_points(group="tidelog.sources", name=address.scheme):
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
