"""Which archives hold events of a topic, and in which of their source partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tidelog.home import Home
from tidelog.log.archives import read_partitions, read_progress
from tidelog.log.base import Log
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic
from tidelog.pipeline.archive import list_archives

__all__ = ["archives_of", "partitions_of", "with_later_ones"]


def archives_of(home: Home, topic: Topic) -> list[tuple[Archive, int]]:
    """The generations of archives whose events come from a topic, also by way of another one.

    An archive comes before those that are made of it, and its live generation before one that is
    filled from it: what was taken out of the one is not in what the other reads after that.
    """
    archives = [archive for archive in list_archives(home) if archive.state == "ready"]
    named = {archive.name: archive for archive in archives}

    def steps(url: str, above: frozenset[str]) -> int | None:
        """How many archives there are between a source and the topic, if it comes from there."""
        address = parse_address(url)
        if address.scheme == "topic":
            return 0 if address.path == topic.name else None
        found = named.get(address.path)
        if address.scheme != "archive" or address.path in above or found is None:
            return None
        before = [steps(each, above | {address.path}) for each in _sources(found)]
        return max((each + 1 for each in before if each is not None), default=None)

    found = [
        (max(ways), generation != archive.generation, archive, generation)
        for archive in archives
        for generation, making in sorted(archive.makings.items())
        if (
            ways := [
                way
                for url in (making.source or archive.source, archive.source)
                if (way := steps(url, frozenset())) is not None
            ]
        )
    ]
    ordered = sorted(found, key=lambda each: each[:2])
    return [(archive, generation) for _, _, archive, generation in ordered]


def with_later_ones(
    look: Callable[[], Iterable[tuple[Archive, int]]],
) -> Iterator[tuple[Archive, int]]:
    """Generations, and those that began while the first ones were handled.

    One that begins in between may have been filled from a file before an erasure rewrote it.
    """
    known: set[tuple[str, int]] = set()
    while True:
        new = [each for each in look() if (each[0].incarnation, each[1]) not in known]
        if not new:
            return
        for archive, generation in new:
            known.add((archive.incarnation, generation))
            yield archive, generation


def partitions_of(log: Log, pipeline: str, topic: Topic) -> dict[str, int]:
    """The source partitions of a generation that hold events of a topic, with their numbers.

    A topic that had its name before is another one, and its events stand at the same offsets.
    """
    found: dict[str, int] = {}
    for partition in read_partitions(log, pipeline):
        name, _, number = partition.rpartition("/")
        if name == topic.name and number.isascii() and number.isdecimal():
            head = read_progress(log, pipeline, partition)
            if head is None or head.incarnation in ("", topic.incarnation):
                found[partition] = int(number)
    return found


def _sources(archive: Archive) -> set[str]:
    """What an archive reads, or one of its generations."""
    return {archive.source, *(each.source or archive.source for each in archive.makings.values())}
