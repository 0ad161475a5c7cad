"""A task's plan, brought up to date when the task starts.

Spark plans a table when it is first used, and keeps that plan as long as the table or a view of it
lives. An event that is deleted after that is still in the plan, and a compile and a sweep delete
the planned objects. So a task of a batch read looks at the heads of its partitions first, and
plans its own offsets again where something was amended, compiled or trimmed since.

A catalog that is a SQLite file on another machine cannot be reached from here: then the plan counts
as it is, and the table must be loaded again to see later deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.log.topics import read_head
from tidelog.model.address import parse_address
from tidelog.model.run import Head
from tidelog.settings import Settings, config_string
from tidelog.spark.plan import Planner, Range, Slice, Task, open_shared, stamp_of

__all__ = ["refreshed"]


def refreshed(task: Task) -> Task:
    """The task as the catalog has it now. ``NotFoundError`` if its topic or events were deleted."""
    if not task.stamps:
        return task
    home = _open_here(task.settings)
    if home is None:
        return task
    with home:
        try:
            return _planned_again(home, task)
        except NotFoundError as exc:
            raise NotFoundError(f"{exc}: load the table again") from exc


def _open_here(settings: Settings) -> Home | None:
    """The home, if this machine can reach its catalog."""
    address = parse_address(settings.catalog, plain_scheme="sqlite")
    is_file = address.scheme == "sqlite"
    if is_file and not Path(address.path).is_file():
        return None
    try:
        return open_shared(config_string(settings.store, settings.catalog))
    except InvalidError:
        if is_file:  # a file of that name, but not the home's own catalog
            return None
        raise


def _planned_again(home: Home, task: Task) -> Task:
    topic = home.topic(task.topic)
    if topic.incarnation != task.incarnation:
        raise NotFoundError(f"topic `{task.topic}`: was deleted and made again")
    planner = Planner(home, topic)
    slices: list[Slice] = []
    for partition, found in groupby(task.slices, lambda each: each.partition):
        planned = list(found)
        head: Head = read_head(home.log, topic, partition)[0]
        if stamp_of(head) == task.stamps[partition]:
            slices += planned
            continue
        for wanted in _ranges(planned):
            slices += planner.amended_slices(wanted, task.times)
    return replace(task, slices=tuple(slices))


def _ranges(slices: list[Slice]) -> Iterator[Range]:
    """The offsets of slices of one partition, neighbours as one."""
    at: Range | None = None
    for each in slices:
        if at is not None and at.end == each.start:
            at = replace(at, end=each.end)
            continue
        if at is not None:
            yield at
        at = Range(each.partition, each.start, each.end)
    if at is not None:
        yield at
