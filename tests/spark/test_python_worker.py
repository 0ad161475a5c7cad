"""Python workers of Spark: notes that are private and small, and garbage without modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.spark.conftest import Read
from tidelog import Event, Home
from tidelog.errors import InvalidError
from tidelog.spark import workers
from tidelog.spark.failures import note_path


def test_note_of_a_task_is_in_a_folder_that_only_its_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},{tmp_path / 'other'}")
    context = SimpleNamespace(taskAttemptId=lambda: 7)
    monkeypatch.setattr(workers, "_context", lambda: context)
    task = SimpleNamespace(staging="staging/p/1/x")
    path = workers._note_path(task)  # type: ignore[arg-type]
    assert path == tmp_path / "tidelog-notes" / "staging-p-1-x-7"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_notes_need_a_python_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    with pytest.raises(InvalidError, match="outside of its Python workers"):
        note_path("x")


def test_offsets_of_a_note_are_ranges() -> None:
    chance = random.Random(5)
    for _ in range(200):
        chunks = [sorted(chance.sample(range(n * 20, n * 20 + 20), 15)) for n in range(3)]
        chunks[chance.randrange(3)] = []
        arrays = [np.array(each, np.int64) for each in chunks]
        runs = workers._OffsetRuns.joined([workers._OffsetRuns.of(each) for each in arrays])
        read = {offset for each in chunks for offset in each}
        assert runs.total == len(read)
        missing = runs.missing(np.arange(70))
        assert missing.tolist() == [n for n in range(70) if n not in read]
    whole = workers._OffsetRuns.of(np.arange(1_000_000))
    assert (whole.starts.tolist(), whole.ends.tolist()) == ([0], [1_000_000])


def folder_of(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([pa.array([str(note_path("x").parent)])], ["folder"])


@pytest.mark.spark
def test_note_of_pushed_filters_is_beside_the_blocks_of_the_session(
    home: Home, local_spark: SparkSession, read: Read
) -> None:
    home.create_topic("orders", 1)
    home.append("orders", [Event(b"1")])
    (row,) = local_spark.range(0, 1, 1, 1).mapInArrow(folder_of, "folder string").collect()
    folder = Path(row.folder)
    before = set(folder.iterdir())
    assert read("orders", pushFilters=True).where("offset = 0").count() == 1
    (note,) = set(folder.iterdir()) - before
    assert note.name.startswith("filters-")
    assert folder.parent.name.startswith("blockmgr-"), "Spark removes it with the session"
