"""Pipelines that have names of their own: made, found, opened, and removed for good.

One write of the registry makes a name, with an incarnation that names all the pipeline's rows and
objects. Removing, in five steps; removing again goes on where a crash left it:

1. take every shard, unless a driver runs it   → a pipeline that nobody drives
2. registry row as ``deleting``                → a name that is not usable
3. close every head                            → no driver can commit, nor begin anew
4. staged files, manifests and rows go         → fewer of them; closed heads stay for good
5. remove the registry row                     → a free name

What the pipeline has written stays where it is. So do its producer rows in a topic, which keep a
driver that slept from writing anything a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.home import Home
from tidelog.log.archives import read_archive
from tidelog.log.base import Log
from tidelog.log.heads import RACE
from tidelog.log.registry import add_name, check_shown, remove_name
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline, check_pipeline_name
from tidelog.model.run import decode_row, encode_row
from tidelog.pipeline.base import Pipeline, Workers
from tidelog.pipeline.places import sink_at, source_at
from tidelog.pipeline.removal import close_heads, remove_work
from tidelog.pipeline.shard import Shard
from tidelog.sinks.base import TargetSink
from tidelog.sources.base import Completing, Source

__all__ = [
    "check_behind",
    "check_loop",
    "check_reach",
    "create_pipeline",
    "delete_pipeline",
    "ensure_pipeline",
    "find_pipeline",
    "is_inside",
    "list_pipelines",
    "open_named",
]

_SHARD = "shard/"


def create_pipeline(home: Home, name: str, source: str, sink: str) -> NamedPipeline:
    """Make a pipeline. ``AlreadyExistsError``; ``NotFoundError`` when source or sink is not there.

    Source and sink are looked at, so that nothing is made that could never run.
    """
    check_pipeline_name(name)
    if not is_inside(sink):
        home.log.standing.check(f"pipeline `{name}` into `{sink}`")
    opened = sink_at(home, sink, source=source)
    reads = source_at(home, source)
    opened.check([each.text for each in reads.partitions()])
    check_behind(home, reads, opened)
    check_loop(home, reads.url, opened.url)
    made = _new(home, name, reads.url, opened)
    found = ensure_pipeline(home, made)
    if found.incarnation != made.incarnation:
        raise AlreadyExistsError(f"pipeline `{name}`: exists already: choose another name")
    return found


def check_behind(home: Home, source: Source, sink: TargetSink) -> None:
    """Refuse a source that completes other pipelines, but for another target than theirs."""
    for name in source.behind if isinstance(source, Completing) else ():
        other = find_pipeline(home, name)
        if other.target != sink.incarnation:
            raise InvalidError(
                f"source `{source.url}`: adds what pipeline `{name}` has missed, which goes to "
                f"`{other.sink}`, not to `{sink.url}`: give it the same target"
            )


def ensure_pipeline(home: Home, wanted: NamedPipeline) -> NamedPipeline:
    """The pipeline of that name: the one that is there, or else the wanted one, made now."""
    check_pipeline_name(wanted.name)
    log, row = home.log, layout.pipeline_row(wanted.name)
    found = log.catalog.get(layout.REGISTRY, row)
    if found is None:
        add_name(log, Put(row, encode_row(wanted), ABSENT))
    return find_pipeline(home, wanted.name)


def find_pipeline(home: Home, name: str) -> NamedPipeline:
    """The pipeline of a name. ``NotFoundError``."""
    check_pipeline_name(name)
    row = home.log.catalog.get(layout.REGISTRY, layout.pipeline_row(name))
    if row is None:
        raise NotFoundError(f"pipeline `{name}`: not found: fix the name, or make it")
    found = _decode(row)
    if found.state == "deleting":
        raise NotFoundError(f"pipeline `{name}`: is being deleted: delete it again to finish")
    return found


def check_loop(home: Home, source: str, sink: str) -> None:
    """Raise ``InvalidError`` for a pipeline that would never end: it reads what it writes.

    Also by way of other pipelines of the home. Two that are made at the same moment, and pipelines
    of another home, are not seen.
    """
    reads, reached, by = _origin(home, source), [_place(sink)], ""
    edges = [
        (_origin(home, each.source), _place(each.sink), each.name)
        for each in list_pipelines(home)
        if each.state == "ready" and not each.name.startswith("restore.")
    ]
    for place in reached:  # grows in the loop
        if place == reads:
            raise InvalidError(
                f"source `{source}`: gets what is written to `{sink}`{by}, so this never ends: "
                "write to another topic, or use playback or restore, which end"
            )
        for start, end, name in edges:
            if start == place and end not in reached:
                reached.append(end)
                by = f" (by pipeline `{name}`)" if end == reads else by


_Place = tuple[str, str, str]
"""Scheme, host and path of an address."""


def _place(url: str) -> _Place:
    address = parse_address(url)
    return address.scheme, address.host, address.path


def _origin(home: Home, source: str) -> _Place:
    """Where the events of a source come from: those of an archive from what it archives."""
    place = _place(source)
    if place[0] == "archive":
        with contextlib.suppress(NotFoundError):
            return _place(read_archive(home.log, place[2]).source)
    return place


def is_inside(sink: str) -> bool:
    """Whether a sink's URL names something of the home itself."""
    return parse_address(sink).scheme == "topic"


def check_reach(home: Home, named: NamedPipeline) -> None:
    """Raise ``InvalidError`` for a pipeline to the outside that another home runs.

    Its transactions, groups and numbers are the same in a copy: both would send everything.
    """
    if not is_inside(named.sink):
        what = f"pipeline `{named.name}` into `{named.sink}`"
        remedy = f"run `tidelog pipeline delete {named.name}`, and make it again"
        home.log.standing.check_own(what, named.home, remedy)


def list_pipelines(home: Home) -> Iterator[NamedPipeline]:
    """All pipelines with names of their own, also those whose removal did not finish."""
    for row in home.log.catalog.scan(layout.REGISTRY, layout.pipeline_row(""), "pipeline0"):
        yield _decode(row)


def open_named(home: Home, named: NamedPipeline, workers: Workers) -> Pipeline:
    """The pipeline, ready to run. ``InvalidError`` when its target was made anew meanwhile."""
    check_reach(home, named)
    source: Source = source_at(home, named.source)
    sink = sink_at(home, named.sink, source=named.source)
    if sink.incarnation != named.target:
        raise InvalidError(
            f"pipeline `{named.name}`: its target `{named.sink}` was deleted and made again since "
            "it began: delete the pipeline, and make it anew"
        )
    return Pipeline(named.name, named.incarnation, source, sink, workers)


def delete_pipeline(home: Home, name: str, shown: str = "") -> None:
    """Remove a pipeline, not what it has written. ``NotFoundError``.

    ``InvalidError`` while a driver runs it. ``shown``: as in ``check_shown``.
    """
    check_pipeline_name(name)
    log, key = home.log, layout.pipeline_row(name)
    for delay_s in RACE.delays_s(log.random):
        row = log.catalog.get(layout.REGISTRY, key)
        if row is None:
            raise NotFoundError(f"pipeline `{name}`: not found: nothing to delete")
        found = _decode(row)
        check_shown(f"pipeline `{name}`", shown, found.incarnation)
        if found.state == "deleting":
            close_heads(log, found.incarnation)
            remove_work(log, found.incarnation, home.store)
            _remove_name(log, found)
            return
        _take_shards(log, found)
        going = Put(key, encode_row(msgspec.structs.replace(found, state="deleting")), row.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            log.catalog.write(layout.REGISTRY, going, write_id=log.ids.new())
            continue
        log.clock.sleep(delay_s)
    raise UnavailableError(f"pipeline `{name}`: others keep changing it: try again")


def _remove_name(log: Log, pipeline: NamedPipeline) -> None:
    key = layout.pipeline_row(pipeline.name)
    remove_name(log, key, lambda row: _decode(row).incarnation == pipeline.incarnation)


def _new(home: Home, name: str, source: str, sink: TargetSink) -> NamedPipeline:
    return NamedPipeline(
        name=name,
        incarnation=home.log.ids.new(),
        source=source,
        sink=sink.url,
        target=sink.incarnation,
        created_ms=home.log.clock.now_ms(),
        home="" if is_inside(sink.url) else home.id,
    )


def _take_shards(log: Log, pipeline: NamedPipeline) -> None:
    """Step 1: nobody drives it from here on; a driver that has died is waited for."""
    where = layout.pipeline_shards(pipeline.incarnation)
    rows = [row.row for row in log.catalog.scan(where, _SHARD, "shard0")]
    for row in rows:
        shards, number = map(int, row.removeprefix(_SHARD).split("/"))
        shard = Shard(log, pipeline.incarnation, number, shards, beside=True)
        if not shard.take():
            raise InvalidError(
                f"pipeline `{pipeline.name}`: a driver runs it: stop that one, and delete again"
            )


def _decode(row: Row) -> NamedPipeline:
    return decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")
