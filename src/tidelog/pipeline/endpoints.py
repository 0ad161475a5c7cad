"""Opens the sources, sinks and stores of pipelines by URL, for a home."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tidelog.connectors.by_url import open_sink, open_source
from tidelog.connectors.files.names import place_of
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import Source
from tidelog.connectors.topic.segments import COPIES
from tidelog.connectors.topic.sink import TopicSink
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import check_outside, replay_pipeline, scan_archives
from tidelog.errors import InvalidError
from tidelog.model import layout
from tidelog.model.address import address_below, parse_address
from tidelog.model.archive import Archive
from tidelog.opening import open_context
from tidelog.store import open_store
from tidelog.store.base import Store
from tidelog.store.wrappers import RetryingStore

__all__ = [
    "StoreFolder",
    "files_at",
    "folders_of",
    "no_source",
    "pipelines_of",
    "refuse_archive_folder",
    "sink_at",
    "source_at",
    "store_at",
]


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
    place = place_of(address)
    within = address_below(place.store, place.folder)
    for each in scan_archives(context):
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
