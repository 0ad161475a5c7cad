"""What a driver does about a range that could not be done: end it earlier, or plan it again."""

from __future__ import annotations

from tidelog.errors import TidelogError, UnavailableError
from tidelog.model.pipeline import offsets_between
from tidelog.pipeline.base import Task
from tidelog.sinks.base import RefusedError
from tidelog.sources.base import Changing, Range, Source, Timed

__all__ = ["check_plan", "end_before"]


def end_before(source: Source, range: Range, error: TidelogError) -> str | None:
    """Return where to end a range, so that the record which a sink refused is not in it.

    None for other errors, and where nothing is before the record. Where positions are not offsets,
    the range ends before the record's time, if they are times; else after as many events as are
    before it, or after those of the batches before, if the source cannot stop inside of a record.
    """
    if not isinstance(error, RefusedError):
        return None
    offset = int(error.context["offset"])
    if offsets_between(range.start, range.limit) is not None:
        position = str(offset)
        is_between = source.before(range.start, position) and source.before(position, range.limit)
        return position if is_between else None
    if isinstance(source, Timed):
        limit = source.limit_before(range.limit, int(error.context["time_ms"]))
        is_between = source.before(range.start, limit) and source.before(limit, range.limit)
        return limit if is_between else None
    for events in (offset - range.ordinal, int(error.context.get("read", 0))):
        limit = source.cut(range.start, range.limit, events) if events > 0 else range.limit
        if limit != range.limit:  # a cut never exceeds the one before, so this ends
            return limit
    return None


def check_plan(source: Source, task: Task) -> None:
    """Raise ``UnavailableError`` when files of a range were changed since it was planned.

    An erasure replaces files of an archive that is the source, and a replay of its dead letters
    removes some. That is not damage: the range is planned and read again.
    """
    now = source.reader(task.range)
    if now != task.reader or (isinstance(now, Changing) and now.is_changing):
        raise UnavailableError(
            f"source partition `{task.range.partition.text}`: its files are being changed by "
            "an erasure or a replay of dead letters: read it again",
            partition=task.range.partition.text,
        )
