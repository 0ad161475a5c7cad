"""All that a playback needs to be played elsewhere, from the store alone: runs and amendments."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace

from tidelog.errors import NotFoundError, UnavailableError
from tidelog.log.base import Log
from tidelog.model.playback import Pin
from tidelog.model.topic import Topic
from tidelog.playback.ahead import Ahead, Found
from tidelog.playback.load import Loader
from tidelog.playback.standing import Standing, SwappedError

__all__ = ["planned_runs"]

_ATTEMPTS = 20  # of a plan, against compiles that go on


def planned_runs(log: Log, topic: Topic, pin: Pin, pool: Executor | None = None) -> list[Found]:
    """The runs of what was pinned, by their first time, each with its amendments as of now.

    ``NotFoundError`` when events of it were trimmed, ``UnavailableError`` when it is compiled again
    and again meanwhile.
    """
    for _ in range(_ATTEMPTS):
        standing = Standing(log, topic)
        try:
            return _planned(standing, pin, pool)
        except SwappedError:
            continue
        except NotFoundError:
            if not _is_swapped(standing):
                raise
    raise UnavailableError(f"topic `{topic.name}`: is being compiled: play again")


def _planned(standing: Standing, pin: Pin, pool: Executor | None) -> list[Found]:
    loader = Loader(standing.log.store, standing.topic.name)
    ahead = Ahead(standing, pin, pin.range, loader.groups, pool)
    found: list[Found] = []
    while ahead.peek() is not None:
        found.append(ahead.take())
    amended: dict[int, Found] = {}
    for partition in {each.partition for each in found}:
        amended |= _amended(standing, partition, found)
    return [amended.get(number, each) for number, each in enumerate(found)]


def _amended(standing: Standing, partition: int, found: list[Found]) -> Iterator[tuple[int, Found]]:
    """The runs of a partition that have amendments, by their number."""
    numbers = [number for number, each in enumerate(found) if each.partition == partition]
    start = min(found[number].base for number in numbers)
    end = max(found[number].end for number in numbers)
    all_of_them = standing.amendments(partition, start, end, standing.check(partition))
    for number in numbers:
        each = found[number]
        amendments = all_of_them.of_run(each.run).between(each.base, each.end)
        if len(amendments):
            yield number, replace(each, amendments=amendments)


def _is_swapped(standing: Standing) -> bool:
    """Whether something that is gone may have been compiled."""
    try:
        for partition in range(standing.topic.partitions):
            standing.check(partition)
    except SwappedError:
        return True
    return False
