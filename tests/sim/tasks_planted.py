"""Bugs planted into what tasks stage: segments of Spark's batches, and files of erasures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidelog.coordination.commits import load_manifest
from tidelog.erasure.object_search import ObjectSearch
from tidelog.erasure.rewrite import PartitionRewriter
from tidelog.journal.compile import PartitionCompile
from tidelog.log.maintenance import sweep as log_sweep
from tidelog.log.producer.append import Appender
from tidelog.spark import write as commit

__all__ = [
    "batches_have_no_numbers",
    "files_of_older_contents",
    "killed_writes_stay",
    "proof_passes_over_spark",
]

Patch = pytest.MonkeyPatch


def batches_have_no_numbers(patch: Patch) -> None:
    """A driver appends the segments of a batch that is decided, whatever is in the topic."""
    append = commit.append_staged

    def anyhow(producer: Any, segments: Any, first: int = 0, pool: Any = None) -> int:
        producer = type(producer)(
            producer._context, producer._topic, f"~{producer._context.ids.new()}"
        )
        return append(producer, segments, first, pool)

    patch.setattr(commit, "append_staged", anyhow)
    patch.setattr(Appender, "_claim", lambda *_: [])
    patch.setattr(Appender, "_recovered_at", lambda *_: None)


def killed_writes_stay(patch: Patch) -> None:
    """A sweep leaves what killed writes have staged."""
    patch.setattr(log_sweep, "left_by_sinks", lambda *_: [])


def proof_passes_over_spark(patch: Patch) -> None:
    """A proof does not search what tasks of Spark have staged."""
    loose = ObjectSearch.loose

    def other(self: Any, key: str, *rest: Any) -> None:
        if "/sinks/" not in key:
            loose(self, key, *rest)

    patch.setattr(ObjectSearch, "loose", other)


def files_of_older_contents(patch: Patch) -> None:
    """An erasure decides on what its tasks have staged, whatever others erased meanwhile."""
    record = PartitionRewriter.record_staged

    def anyhow(self: Any, work: Any, each: Any, entries: Any) -> Any:
        committed = self._committed(each.row)
        if committed is not None:
            found = load_manifest(self._context.store, committed.manifest)
            work = replace(work, ranges=found.each_range)
        return record(self, work, each, entries)

    patch.setattr(PartitionRewriter, "record_staged", anyhow)


def overtaken_plan(patch: Patch) -> None:
    """Tasks compile what was planned, even if another process has replaced its objects since."""
    patch.setattr(PartitionCompile, "is_stale", lambda *_: False)
