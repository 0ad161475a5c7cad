"""Where pipelines read and write: sources, sinks and stores by their URLs, as a home sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tidelog.home import Home, open_home
from tidelog.log.archives import check_outside
from tidelog.log.base import Log
from tidelog.log.replays import replay_pipeline
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.sinks import open_sink
from tidelog.sinks.base import TargetSink
from tidelog.sinks.segments import COPIES
from tidelog.sinks.topic import TopicSink
from tidelog.sources import open_source
from tidelog.sources.base import Source
from tidelog.store import open_store
from tidelog.store.base import Store
from tidelog.store.retry import RetryingStore

__all__ = [
    "Folder",
    "files_at",
    "folders_of",
    "no_source",
    "pipelines_of",
    "sink_at",
    "source_at",
    "store_at",
]


class Folder(NamedTuple):
    """What keys begin with, and the store that they are in."""

    store: str  # URL
    prefix: str


_ADDING = ("kinesis", "scylla")  # sources that put what they know of a record into headers


def source_at(home: Home, url: str) -> Source:
    """What a URL names, to be read by position; ``topic:NAME`` is a topic of this home."""
    return open_source(url, environ=home.world.environ, open_log=_LogOf(home.config, home.log))


def no_source(home: Home) -> Source:
    """A source for pipelines that only finish what is decided: the real one may not exist."""
    return source_at(home, "topic:none")


def sink_at(home: Home, url: str, *, source: str = "") -> TargetSink:
    """What a URL names, to be written to; events are staged in this home's store.

    A topic's notifications are this process's to send, as it commits there. ``source`` is the URL
    that events come from: those of the home itself may be larger than ``event_bytes_max`` is now.
    """
    sink = open_sink(url, environ=home.world.environ, open_log=_LogOf(home.config, home.log))
    address = parse_address(url)
    if address.scheme == "topic":
        home.watch(address.path)
    if source and isinstance(sink, TopicSink):
        scheme = parse_address(source).scheme
        if scheme in ("topic", "archive"):
            return sink.with_limit(COPIES)
        if scheme in _ADDING:
            return sink.with_limit(replace(sink.limit, own=True))
    return sink


def store_at(home: Home, url: str) -> Store:
    """A store by its URL, with repeats, and without the home's cache."""
    world = home.world
    store = open_store(
        url, clock=world.clock, ids=world.ids, random=world.random, environ=world.environ
    )
    backoff = home.settings.backoff()
    return RetryingStore(store, clock=world.clock, random=world.random, backoff=backoff)


def files_at(home: Home, archive: Archive) -> Store:
    """The store of an archive's files, to be written to and deleted from.

    ``InvalidError`` when its folder is outside of the home, and is not this home's.
    """
    store = store_at(home, archive.store)
    check_outside(home.log, archive, store)
    return store


def pipelines_of(archive: Archive, *generations: int) -> list[str]:
    """The pipelines of some generations, each with its replays of dead letters.

    By default of all that the archive ever had: a driver of a dropped one may have slept, and stage
    or record something still.
    """
    numbers = generations or range(1, archive.newest + 1)
    own = [archive.any_pipeline(number) for number in numbers]
    return [each for pipeline in own for each in (pipeline, replay_pipeline(pipeline))]


def folders_of(home: Home, archive: Archive) -> dict[str, list[Folder]]:
    """Every folder that an archive's objects may be in: files, what is staged, manifests.

    Sweeps and proofs go by this list. Nothing else of a store that is not the home's own is listed,
    since others may have objects there.
    """
    own, pipelines = store_at(home, archive.store).url, pipelines_of(archive)
    return {
        "files": [Folder(own, f"{archive.root}/"), Folder(own, f"{archive.dead}/")],
        "staged": [Folder(own, layout.staging_of(each)) for each in pipelines],
        "manifests": [Folder(home.store.url, layout.manifests(each)) for each in pipelines],
    }


class _LogOf:
    """The log of a home: the one that is open here, or one opened anew where this was sent to."""

    def __init__(self, config: str, log: Log | None = None) -> None:
        self._config = config
        self._log = log

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Log]:
        if self._log is not None:
            yield self._log
            return
        with open_home(self._config) as home:
            yield home.log

    def __reduce__(self) -> tuple[type[_LogOf], tuple[str]]:
        return _LogOf, (self._config,)
