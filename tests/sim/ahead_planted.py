"""Bugs planted into reading ahead."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidelog.coordination.pipeline_rows import read_intent, read_partitions, read_progress
from tidelog.maintenance import pipeline_sweep
from tidelog.model import layout
from tidelog.pipeline import cycle

__all__ = ["begins_at_the_limit", "sweeps_pass_it_over"]

Patch = pytest.MonkeyPatch


def begins_at_the_limit(patch: Patch) -> None:
    """What is read ahead begins at the limit of the range before, even if that one ended short."""
    intend = cycle.intend_next

    def at_limit(source: Any, intent: Any, manifest: Any, wanted: Any, now_ms: int) -> Any:
        manifest = msgspec.structs.replace(manifest, end=intent.limit)
        return intend(source, intent, manifest, wanted, now_ms)

    patch.setattr(cycle, "intend_next", at_limit)


def sweeps_pass_it_over(patch: Patch) -> None:
    """A sweep deletes what was staged for a range that is read ahead."""
    read_named = pipeline_sweep._read_named

    def decided_only(context: Any, pipeline: str) -> Any:
        named = read_named(context, pipeline)
        for partition in read_partitions(context, pipeline):
            head = read_progress(context, pipeline, partition)
            intent = read_intent(context, pipeline, partition)
            if head is not None and intent is not None and intent.manifest:
                named.under_way.discard((layout.manifest_folder(partition), head.epoch))
        return named

    patch.setattr(pipeline_sweep, "_read_named", decided_only)
