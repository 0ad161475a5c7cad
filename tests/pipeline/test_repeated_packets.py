"""Writes that arrive again after every later write: no row that was deleted comes back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tests.pipeline.test_driver import Home, grow
from tidelog.archive.freeze import freeze_heads, release_heads
from tidelog.catalog.base import Change, Delete
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.connectors.source import Chunk, SourcePartition, SourceRange
from tidelog.coordination.pipeline_rows import list_partitions, read_intent
from tidelog.errors import ConflictError, InvalidError, UnavailableError
from tidelog.model import layout
from tidelog.model.archive import Promotion
from tidelog.model.pipeline import Begin, ListedPartition
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import PipelineFailures, read_failures
from tidelog.pipeline.pipeline import CycleReport

PARTITION = SourcePartition("t", "0")
ERROR = InvalidError("event `id-7`: has no time: fix the parser")


class RepeatingCatalog(MemoryCatalog):
    """Sends every write that has landed once more after each later one, the oldest last."""

    def __init__(self) -> None:
        super().__init__()
        self._landed: list[tuple[str, tuple[Change, ...], str]] = []

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        super().write(partition, *changes, write_id=write_id)
        self._landed.append((partition, changes, write_id))
        for where, again, known in reversed(self._landed):
            with contextlib.suppress(ConflictError):
                super().write(where, *again, write_id=known)


class FailingCatalog(MemoryCatalog):
    """Refuses to delete while it is told to."""

    fails = False

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        if self.fails and any(isinstance(each, Delete) for each in changes):
            raise UnavailableError("catalog: no answer: try again")
        super().write(partition, *changes, write_id=write_id)


def home_on(catalog: MemoryCatalog) -> Home:
    home = Home(partitions=1)
    home.context = dataclasses.replace(home.context, catalog=catalog)
    return home


def run(home: Home, cycle: Cycle) -> CycleReport:
    bounds = home.source.bounds([PARTITION])
    return cycle.run({PARTITION: bounds[PARTITION].end}, bounds)


def test_driver_archives_everything_once() -> None:
    home = home_on(RepeatingCatalog())
    home.driver().run()
    grow(home, 70)
    home.driver().run()
    home.check()


def test_withdrawn_range_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that knows no ends has nothing to read; the driver keeps its partition."""
    home = home_on(RepeatingCatalog())
    cycle = Cycle(home.context, home.pipeline, "one")
    cycle.claim(PARTITION, Begin("0", "earliest"))

    def nothing(wanted: SourceRange) -> Iterator[Chunk]:
        yield Chunk(pa.RecordBatch.from_pylist([], table_of([], 0).schema), wanted.start)

    with monkeypatch.context() as patch:
        patch.setattr(home.source, "read", nothing)
        for _ in range(2):
            assert run(home, cycle).errors == {}
            assert read_intent(home.context, "inc", PARTITION.text) is None
    report = run(home, cycle)
    assert report.errors == {}
    assert cycle.position(PARTITION) == "60"
    home.check()


def test_frozen_head_that_comes_back_does_not_stop_a_driver() -> None:
    """A partition without a head gets a frozen one in a promote, which is deleted after it."""
    home = home_on(RepeatingCatalog())
    list_partitions(home.context, "inc", [ListedPartition(PARTITION.text)])
    promotion = Promotion("promote", 2, 0)
    freeze_heads(home.context, home.pipeline, promotion)
    release_heads(home.context, "inc", promotion)
    assert home.context.catalog.get(layout.pipeline_partition("inc", PARTITION.text), "head")
    home.driver().run()
    home.check()


def test_removed_failure_does_not_come_back() -> None:
    home = home_on(RepeatingCatalog())
    failures = PipelineFailures(home.context, "inc")
    for _ in range(2):
        failures.add([(PARTITION, ERROR)])
        assert read_failures(home.context, "inc")[PARTITION.text].message == ERROR.message
        failures.remove([PARTITION])
        assert read_failures(home.context, "inc") == {}


def test_failures_of_two_drivers_do_not_hinder_each_other() -> None:
    home = home_on(MemoryCatalog())
    other = SourcePartition("t", "1")
    one, two = PipelineFailures(home.context, "inc"), PipelineFailures(home.context, "inc")
    one.add([(PARTITION, ERROR)])
    two.add([(other, ERROR)])
    one.add([(PARTITION, ERROR)])
    assert read_failures(home.context, "inc").keys() == {PARTITION.text, other.text}
    one.remove([PARTITION])
    two.remove([other])
    assert read_failures(home.context, "inc") == {}


def test_failure_whose_removal_failed_is_removed_later() -> None:
    catalog = FailingCatalog()
    home = home_on(catalog)
    failures = PipelineFailures(home.context, "inc")
    failures.add([(PARTITION, ERROR)])
    catalog.fails = True
    failures.remove([PARTITION])
    assert not failures.is_failing(PARTITION)
    catalog.fails = False
    failures.remove([PARTITION])
    assert read_failures(home.context, "inc") == {}
