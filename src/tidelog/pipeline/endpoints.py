"""Where pipelines read and write: sources, sinks and stores by their URLs, as a home sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tidelog.connectors.files.names import place_of
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.sinks import open_sink
from tidelog.connectors.source import Source
from tidelog.connectors.sources import open_source
from tidelog.connectors.topic.segments import COPIES
from tidelog.connectors.topic.sink import TopicSink
from tidelog.context import Context
from tidelog.coordination.dead_letter_rows import replay_pipeline
from tidelog.coordination.pipeline_rows import check_outside, scan_archives
from tidelog.errors import InvalidError
from tidelog.model import layout
from tidelog.model.address import parse_address
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
    """What keys begin with, and the store that they are in."""

    store: str  # URL
    prefix: str


_ADDING = ("kinesis", "scylla")  # sources that put what they know of a record into headers


def source_at(context: Context, url: str) -> Source:
    """What a URL names, to be read by position; ``topic:NAME`` is a topic of this home."""
    return open_source(
        url, environ=context.environ, open_context=_ContextOf(context.config, context)
    )


def no_source(context: Context) -> Source:
    """A source for pipelines that only finish what is decided: the real one may not exist."""
    return source_at(context, "topic:none")


def sink_at(context: Context, url: str, *, source: str = "") -> TargetSink:
    """What a URL names, to be written to; events are staged in this home's store.

    A topic's notifications are this process's to send, as it commits there. ``source`` is the URL
    that events come from: those of the home itself may be larger than ``event_bytes_max`` is now.
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
    """A store by its URL, with repeats, and without the home's cache."""
    store = open_store(
        url,
        clock=context.clock,
        ids=context.ids,
        random=context.random,
        environ=context.environ,
    )
    return RetryingStore(store, clock=context.clock, random=context.random, backoff=context.backoff)


def files_at(context: Context, archive: Archive) -> Store:
    """The store of an archive's files, to be written to and deleted from.

    ``InvalidError`` when its folder is outside of the home, and is not this home's.
    """
    store = store_at(context, archive.store)
    check_outside(context, archive, store)
    return store


def pipelines_of(archive: Archive, *generations: int) -> list[str]:
    """The pipelines of some generations, each with its replays of dead letters.

    By default of all that the archive ever had: a driver of a dropped one may have slept, and stage
    or record something still.
    """
    numbers = generations or range(1, archive.newest + 1)
    own = [archive.any_pipeline(number) for number in numbers]
    return [each for pipeline in own for each in (pipeline, replay_pipeline(pipeline))]


def folders_of(context: Context, archive: Archive) -> dict[str, list[StoreFolder]]:
    """Every folder that an archive's objects may be in: files, what is staged, manifests.

    Sweeps and proofs go by this list. Nothing else of a store that is not the home's own is listed,
    since others may have objects there.
    """
    own, pipelines = store_at(context, archive.store).url, pipelines_of(archive)
    return {
        "files": [StoreFolder(own, f"{archive.root}/"), StoreFolder(own, f"{archive.dead}/")],
        "staged": [StoreFolder(own, layout.staging_of(each)) for each in pipelines],
        "manifests": [StoreFolder(context.store.url, layout.manifests(each)) for each in pipelines],
    }


def refuse_archive_folder(context: Context, source: str, what: str) -> None:
    """Refuse a source of files in the folder of an archive that this home knows.

    A range publishes its files one by one, in no order of offsets, so a reader of the folder may
    pass some of them. The archive itself, as a source, goes by its commits.
    """
    address = parse_address(source)
    if address.scheme != "file":
        return
    place = place_of(address)
    within = f"{place.store.rstrip('/')}/{place.folder}"
    for each in scan_archives(context):
        if within.startswith(f"{each.store.rstrip('/')}/{each.root}/"):
            raise InvalidError(
                f"{what}: source `{source}` is in the folder of archive `{each.name}`, where files "
                f"may appear behind a reader: give archive:{each.name}"
            )


class _ContextOf:
    """Opens a home's context: the one that is open here, or a new one where this was sent to."""

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
