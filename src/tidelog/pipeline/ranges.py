"""What a driver does about a range that could not be done: end it earlier, or plan it again."""

from __future__ import annotations

from tidelog.errors import TidelogError, UnavailableError
from tidelog.model.pipeline import offsets_between
from tidelog.pipeline.base import Task
from tidelog.sinks.base import RefusedError
from tidelog.sources.base import Changing, Range, Source

__all__ = ["check_plan", "end_before"]


def end_before(source: Source, range: Range, error: TidelogError) -> str | None:
    """Return where to end a range, so that the record which a sink refused is not in it.

    None for other errors, and where nothing is before the record. Where positions are not offsets,
    it is the end of the batch before.
    """
    if not isinstance(error, RefusedError):
        return None
    is_offset = offsets_between(range.start, range.limit) is not None
    position = str(error.context["offset"]) if is_offset else error.context.get("reached")
    if position is None or not source.before(range.start, position):
        return None
    return position if source.before(position, range.limit) else None


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
