"""Named pipelines: creates, finds and deletes them.

One write of the registry creates a name, with an incarnation that is part of all of the pipeline's
rows and objects. Deleting has five steps; a repeated delete resumes after a crash:

1. stop all drivers, unless a living one runs it → a pipeline that no process drives
2. registry row as ``deleting``                 → a name that is not usable
3. close every head                             → no driver can commit or begin
4. delete staged files, manifests and rows      → fewer of them; closed heads stay forever
5. delete the registry row                      → a free name

What the pipeline wrote stays. So do its producer rows in a topic, which stop a stalled driver from
writing anything twice. Closed heads stay forever: they stop a stalled driver from starting over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, attempts, update
from tidelog.clock import looks
from tidelog.connectors.sink import TargetSink
from tidelog.connectors.source import CompletingSource, Source
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_pipelines, read_archive, read_partitions
from tidelog.coordination.registry import add_name, check_shown, remove_name
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.log.maintenance.incarnations import is_deleted
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.pipeline import NamedPipeline, Progress, check_pipeline_name
from tidelog.model.topic import decode_row, encode_row
from tidelog.pipeline.failures import close_failures
from tidelog.pipeline.share import DriverMembers, stop_drivers
from tidelog.store.base import Store

__all__ = [
    "check_behind",
    "check_loop",
    "check_reach",
    "close_heads",
    "delete_below",
    "delete_pipeline",
    "ensure_pipeline",
    "find_pipeline",
    "is_inside",
    "is_target_deleted",
    "remove_work",
]

_LOOK_S = 0.2  # between looks at drivers that may be dead


def check_behind(context: Context, source: Source, sink: TargetSink) -> None:
    """Raises if a source completes other pipelines but writes to another target than theirs."""
    for name in source.behind if isinstance(source, CompletingSource) else ():
        other = find_pipeline(context, name)
        if other.target != sink.incarnation:
            raise InvalidError(
                f"source `{source.url}`: adds what pipeline `{name}` has missed, which goes to "
                f"`{other.sink}`, not to `{sink.url}`: give it the same target"
            )


def ensure_pipeline(
    context: Context, wanted: NamedPipeline, record: Callable[[], None] = lambda: None
) -> NamedPipeline:
    """Returns the pipeline of that name, and creates it if there is none.

    ``record`` is called before the name is added.
    """
    check_pipeline_name(wanted.name)
    row = layout.pipeline_row(wanted.name)
    found = context.catalog.get(layout.REGISTRY, row)
    if found is None:
        record()
        add_name(context, Put(row, encode_row(wanted), ABSENT))
    return find_pipeline(context, wanted.name)


def find_pipeline(context: Context, name: str) -> NamedPipeline:
    """Returns the pipeline with a name. Raises ``NotFoundError``."""
    check_pipeline_name(name)
    row = context.catalog.get(layout.REGISTRY, layout.pipeline_row(name))
    if row is None:
        raise NotFoundError(f"pipeline `{name}`: not found: see `tidelog pipeline list`")
    found = _decode(row)
    if found.state == "deleting":
        raise NotFoundError(f"pipeline `{name}`: is being deleted: delete it again to finish")
    return found


def check_loop(context: Context, source: str, sink: str) -> None:
    """Raises ``InvalidError`` for a pipeline that would never end: it reads what it writes.

    Follows other pipelines of the home too. Does not see two that are created at the same moment,
    or pipelines of another home.
    """
    reads, reached, by = _origin(context, source), [_place(sink)], ""
    edges = [
        (_origin(context, each.source), _place(each.sink), each.name)
        for each in list_pipelines(context)
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


def _origin(context: Context, source: str) -> _Place:
    """Returns where the events of a source come from: for an archive, what it archives."""
    place = _place(source)
    if place[0] == "archive":
        with contextlib.suppress(NotFoundError):
            return _place(read_archive(context, place[2]).source)
    return place


def is_inside(sink: str) -> bool:
    """Returns whether a sink's URL is in the home itself."""
    return parse_address(sink).scheme == "topic"


def is_target_deleted(context: Context, named: NamedPipeline) -> bool:
    """Returns whether a pipeline can write nothing any more, because its topic was deleted."""
    return is_inside(named.sink) and is_deleted(context, named.target)


def check_reach(context: Context, named: NamedPipeline) -> None:
    """Raises ``InvalidError`` for a pipeline to the outside that another home runs.

    A copy of a home has the same transactions, groups and numbers: both would send everything.
    """
    if not is_inside(named.sink):
        what = f"pipeline `{named.name}` into `{named.sink}`"
        remedy = f"run `tidelog pipeline delete {named.name}`, and make it again"
        context.identity.check_own(what, named.home, remedy)


def delete_pipeline(context: Context, name: str, shown: str = "", *, dry_run: bool = False) -> None:
    """Deletes a pipeline, but not what it wrote. Raises ``NotFoundError``.

    Raises ``InvalidError`` while a driver runs it. ``shown``: see ``check_shown``. With ``dry_run``
    it only checks.
    """
    check_pipeline_name(name)
    key = layout.pipeline_row(name)
    busy = UnavailableError(f"pipeline `{name}`: others keep changing it: try again")
    for _ in attempts(context, busy):
        row = context.catalog.get(layout.REGISTRY, key)
        if row is None:
            raise NotFoundError(f"pipeline `{name}`: not found: nothing to delete")
        found = _decode(row)
        check_shown(f"pipeline `{name}`", shown, found.incarnation)
        if found.state == "deleting":
            if dry_run:
                return
            close_heads(context, found.incarnation)
            remove_work(context, found.incarnation, context.store)
            _remove_name(context, found)
            return
        _check_idle(context, found)
        if dry_run:
            return
        stop_drivers(context, found.incarnation)  # step 1
        going = Put(key, encode_row(msgspec.structs.replace(found, state="deleting")), row.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            context.catalog.write(layout.REGISTRY, going, write_id=context.ids.new())


def _remove_name(context: Context, pipeline: NamedPipeline) -> None:
    key = layout.pipeline_row(pipeline.name)
    remove_name(context, key, lambda row: _decode(row).incarnation == pipeline.incarnation)


def _check_idle(context: Context, pipeline: NamedPipeline) -> None:
    """Raises ``InvalidError`` if a driver is alive. Waits for a dead one's lease to expire."""
    watch = DriverMembers(context, pipeline.incarnation)  # which does not join
    for is_last in looks(context.clock, context.log_settings.dead_after_s, _LOOK_S):
        if not watch.alive():
            return
        if is_last:
            raise InvalidError(
                f"pipeline `{pipeline.name}`: a driver runs it: stop that one, and delete again"
            )


def _decode(row: Row) -> NamedPipeline:
    return decode_row(row.value, NamedPipeline, f"registry row `{row.row}`")


_DELETES_AT_ONCE = 1_000  # objects, in one request
_ROWS_AT_ONCE = 25


def close_heads(context: Context, pipeline: str) -> None:
    """Closes all heads: every driver fails at its next write, and none claims them again."""
    for partition in read_partitions(context, pipeline):
        _close(context, pipeline, partition)


def remove_work(context: Context, pipeline: str, staged_in: Store) -> None:
    """Deletes staged files, manifests and all rows of a pipeline.

    What stays closes it: its heads, and the row ``failures``.
    """
    delete_below(staged_in, layout.staging_of(pipeline))
    delete_below(context.store, layout.manifests(pipeline))
    for partition in read_partitions(context, pipeline):
        for kind in ("aside", "before", "commit", "erased", "intent"):
            _remove_rows(context, layout.pipeline_partition(pipeline, partition), kind)
    for kind in ("counted", "folder", "member", "seen", "unsettled", "waiting"):
        _remove_rows(context, layout.pipeline_members(pipeline), kind)
    close_failures(context, pipeline)


def delete_below(store: Store, prefix: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Deletes the wanted objects below a prefix."""
    keys: list[str] = []
    for info in store.list(prefix):
        if wanted(info.key):
            keys.append(info.key)
        if len(keys) >= _DELETES_AT_ONCE:
            store.delete(keys)
            keys = []
    if keys:
        store.delete(keys)


def _close(context: Context, pipeline: str, partition: str) -> None:
    where = layout.pipeline_partition(pipeline, partition)

    def decide(rows: Rows) -> Decision[None]:
        row = rows["head"]
        head = Progress("", 0, 0)  # of a partition that a driver may be about to begin
        if row is not None:
            head = decode_row(row.value, Progress, f"head of `{partition}`")
        closed = encode_row(msgspec.structs.replace(head, closed=True))
        return Decision(None, [] if head.closed else [rows.put("head", closed)])

    update(context, where, ["head"], decide, f"head of `{partition}`")


def _remove_rows(context: Context, where: str, kind: str) -> None:
    rows = [row.row for row in context.catalog.scan(where, kind, f"{kind}0")]
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        deletes = [Delete(row) for row in rows[first : first + _ROWS_AT_ONCE]]
        with contextlib.suppress(UnknownOutcomeError):  # a repeated delete finds them
            context.catalog.write(where, *deletes, write_id=context.ids.new())
