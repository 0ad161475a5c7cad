"""Where events were copied from: an erasure from a copy does not reach it, and says so."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.archive.archive import list_archives
from tidelog.archive.derived_archives import archives_of, copies_of, sources_of
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import is_detached
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic
from tidelog.pipeline.registry import list_pipelines

__all__ = ["original_archives", "other_sources", "outside_of_proof"]


def original_archives(context: Context, archive: Archive) -> list[Archive]:
    """Returns the archives of this home that an archive was made of, also indirectly."""
    named = {each.name: each for each in list_archives(context) if each.state == "ready"}
    known = {copy.archive.name for copy in copies_of(context, archive)}
    found: list[Archive] = []
    todo = [archive]
    while todo:
        for name in sorted(_archives_in(todo.pop())):
            if name in named and name not in known:
                known.add(name)
                found.append(named[name])
                todo.append(named[name])
    return found


def other_sources(context: Context, archive: Archive) -> list[str]:
    """Returns messages about sources outside the home, which were neither searched nor erased.

    Includes those of the archive, and of the archives that it was made of.
    """
    every = [archive, *original_archives(context, archive)]
    outside = dict.fromkeys(url for each in every for url in sorted(sources_of(each)))
    return [
        f"source `{url}`: was not searched: delete these events there too"
        for url in outside
        if parse_address(url).scheme not in ("archive", "topic")
    ]


def outside_of_proof(context: Context, topic: Topic) -> Iterator[str]:
    """Yields messages about what a proof of a topic does not search but may hold its events."""
    own = {archive.name: archive for archive, _ in archives_of(context, topic)}
    for archive in own.values():
        if is_detached(context, archive):
            yield (
                f"archive `{archive.name}` in `{archive.store}/{archive.root}`: belongs to home "
                f"`{archive.home}`: was not searched: delete these events in that home too"
            )
    into = [each for each in list_pipelines(context) if each.target == topic.incarnation]
    origins = {url: f"pipeline `{each.name}` copied" for each in into for url in [each.source]}
    for archive in own.values():
        for url in sorted(sources_of(archive)):
            origins.setdefault(url, f"archive `{archive.name}` was built")
    for url, how in origins.items():
        address = parse_address(url)
        if address.scheme == "archive" and address.path not in own:
            do = f"erase these events there too, with `tidelog archive erase {address.path}`"
            yield f"archive `{address.path}`: {how} events from it: was not searched: {do}"
        elif address.scheme == "topic" and address.path != topic.name:
            do = f"delete these events there too, with `tidelog delete {address.path}`"
            yield f"topic `{address.path}`: {how} events from it: was not searched: {do}"
        elif address.scheme not in ("archive", "topic"):
            do = "delete these events there too"
            yield f"source `{url}`: {how} events from it: was not searched: {do}"


def _archives_in(archive: Archive) -> set[str]:
    addresses = map(parse_address, sources_of(archive))
    return {each.path for each in addresses if each.scheme == "archive"}
