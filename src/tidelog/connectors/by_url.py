# ruff: noqa: PLC0415 - one lazy import for each scheme
"""Opens sources, sinks and stores by URL: for any process, and for the pipelines of a home.

**Sources** are Kafka, Kinesis, Scylla's change logs, topics, archives and files. A source lists
its partitions, says what each holds, and reads a range as Arrow batches in event columns, on a
driver or in a Spark task. It holds plain settings, pickles, and opens its connections where it is
used. Its promise: order within a source partition, and it never skips events silently. It must not
know pipelines, sinks or the catalog of its reader.

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

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from tidelog.backends import open_context
from tidelog.connectors.files.listing import parse_file_address
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import Source
from tidelog.connectors.topic.segments import COPIES
from tidelog.connectors.topic.sink import TopicSink
from tidelog.context import Context, OpenContext
from tidelog.coordination.pipeline_rows import check_outside, list_archives, replay_pipeline
from tidelog.errors import InvalidError
from tidelog.model import layout
from tidelog.model.address import address_below, nearest, parse_address
from tidelog.model.archive import Archive
from tidelog.plugins import find_plugins, needs_extra
from tidelog.store import open_store
from tidelog.store.base import Store
from tidelog.store.wrappers import RetryingStore

__all__ = [
    "SOURCE_SCHEMES",
    "StoreFolder",
    "files_at",
    "folders_of",
    "no_source",
    "open_sink",
    "open_source",
    "pipelines_behind",
    "pipelines_of",
    "refuse_archive_folder",
    "sink_at",
    "source_at",
    "store_at",
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


class StoreFolder(NamedTuple):
    """A prefix of keys, and the store they are in."""

    store: str  # URL
    prefix: str


_ADDING = ("kinesis", "scylla")  # sources that add headers to a record


def source_at(context: Context, url: str) -> Source:
    """Opens the source at a URL; ``topic:NAME`` is a topic of this home."""
    return open_source(
        url, environ=context.environ, open_context=_ContextOf(context.config, context)
    )


def no_source(context: Context) -> Source:
    """Returns a source for pipelines that only finish decided ranges: the real one may be gone."""
    return source_at(context, "topic:none")


def sink_at(context: Context, url: str, *, source: str = "") -> TargetSink:
    """Opens the sink at a URL; events are staged in this home's store.

    This process sends the notifications of a topic, because it commits there. ``source`` is the URL
    of the events: those of the home itself may exceed the current ``event_bytes_max``.
    """
    sink = open_sink(url, environ=context.environ, open_context=_ContextOf(context.config, context))
    address = parse_address(url)
    if address.scheme == "topic":
        context.watch(address.path)
    if source and isinstance(sink, TopicSink):
        scheme = parse_address(source).scheme
        if scheme in ("topic", "archive"):
            return sink.with_limit(COPIES)
        if scheme in _ADDING:
            return sink.with_limit(replace(sink.limit, own=True))
    return sink


def store_at(context: Context, url: str) -> Store:
    """Opens a store by URL, with retries, and without the home's cache."""
    store = open_store(
        url,
        clock=context.clock,
        ids=context.ids,
        random=context.random,
        environ=context.environ,
    )
    return RetryingStore(store, clock=context.clock, random=context.random, backoff=context.backoff)


def files_at(context: Context, archive: Archive) -> Store:
    """Opens the store of an archive's files, to write and delete.

    Raises ``InvalidError`` if its folder is outside the home and belongs to another home.
    """
    store = store_at(context, archive.store)
    check_outside(context, archive, store)
    return store


def pipelines_of(archive: Archive, *generations: int) -> list[str]:
    """Returns the pipelines of some generations, each with its replays of dead letters.

    By default all generations that ever existed: a stalled driver of a dropped one may still stage
    or record something.
    """
    numbers = generations or range(1, archive.newest + 1)
    own = [archive.any_pipeline(number) for number in numbers]
    return [each for pipeline in own for each in (pipeline, replay_pipeline(pipeline))]


def folders_of(context: Context, archive: Archive) -> dict[str, list[StoreFolder]]:
    """Returns every folder that may have objects of an archive: files, staging, manifests.

    Sweeps and proofs use this list. Nothing else in another store is listed, because others may
    have objects there.
    """
    own, pipelines = store_at(context, archive.store).url, pipelines_of(archive)
    return {
        "files": [StoreFolder(own, f"{archive.root}/"), StoreFolder(own, f"{archive.dead}/")],
        "staged": [StoreFolder(own, layout.staging_of(each)) for each in pipelines],
        "manifests": [StoreFolder(context.store.url, layout.manifests(each)) for each in pipelines],
    }


def refuse_archive_folder(context: Context, source: str, what: str) -> None:
    """Raises for a source of files in the folder of an archive that this home knows.

    A range publishes its files one by one, in any order of offsets, so a reader of the folder may
    miss some. The archive itself, as a source, reads by commit.
    """
    address = parse_address(source)
    if address.scheme != "file":
        return
    place = parse_file_address(address)
    within = address_below(place.store, place.folder)
    for each in list_archives(context):
        if within.startswith(address_below(each.store, f"{each.root}/")):
            raise InvalidError(
                f"{what}: source `{source}` is in the folder of archive `{each.name}`, where files "
                f"may appear behind a reader: give archive:{each.name}"
            )


class _ContextOf:
    """Opens a home's context: the one open here, or a new one in another process."""

    def __init__(self, config: str, context: Context | None = None) -> None:
        self._config = config
        self._context = context

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Context]:
        if self._context is not None:
            yield self._context
            return
        with open_context(self._config) as context:
            yield context

    def __reduce__(self) -> tuple[type[_ContextOf], tuple[str]]:
        return _ContextOf, (self._config,)
