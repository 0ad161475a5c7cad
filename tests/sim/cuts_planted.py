"""Bugs planted into the cuts of ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidelog.connectors.sink import WriterResult
from tidelog.pipeline import ranges
from tidelog.pipeline.tasks import TaskOutput

__all__ = ["cut_after_a_short_one_counts", "failed_cut_is_passed_over", "manifest_misses_a_part"]

Patch = pytest.MonkeyPatch


def manifest_misses_a_part(patch: Patch) -> None:
    """Files of the second of several cuts are not listed."""
    joined = ranges._joined

    def without(counted: Any) -> Any:
        staged = [each.staged for each in counted]
        gone = replace(staged[1], files=(), events=0, dead=0) if len(staged) > 1 else staged[0]
        lost = len(staged) > 1 and staged[1].events + staged[1].dead
        less = [replace(each, staged=gone, read=each.read - lost) for each in counted[1:2]]
        return joined([*counted[:1], *less, *counted[2:]])

    patch.setattr(ranges, "_joined", without)


def cut_after_a_short_one_counts(patch: Patch) -> None:
    """Cuts count even if one before them ended early."""
    join = ranges.join_parts

    def anyhow(tasks: Any, outcomes: Any) -> Any:
        ended = [
            replace(each, produced=replace(each.produced, end=task.range.limit))
            if each.produced and task is not tasks[-1]
            else each
            for task, each in zip(tasks, outcomes, strict=True)
        ]
        return join(tasks, ended)

    patch.setattr(ranges, "join_parts", anyhow)


def failed_cut_is_passed_over(patch: Patch) -> None:
    """A cut that failed counts as one without events."""
    join = ranges.join_parts

    def without(tasks: Any, outcomes: Any) -> Any:
        empty = [
            replace(each, error=None, produced=TaskOutput(task.range.limit, 0, WriterResult()))
            if each.error and task.part
            else each
            for task, each in zip(tasks, outcomes, strict=True)
        ]
        return join(tasks, empty)

    patch.setattr(ranges, "join_parts", without)
