"""Streaming writes with real Spark: replayed micro-batches are stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.conftest import Stream
from tidelog import Event, Home


def fill(home: Home, start: int, end: int) -> None:
    home.append("orders", [Event(str(number).encode()) for number in range(start, end)])


def copied(home: Home) -> list[int]:
    events = [event for partition in range(2) for event in home.read("copy", partition)]
    return sorted(int(event.value or b"-1") for event in events)


def forget(checkpoint: Path, batches: int) -> None:
    """What a driver's death before its last commits were noted leaves behind."""
    commits = [file for file in (checkpoint / "commits").iterdir() if file.name.isdecimal()]
    for file in sorted(commits, key=lambda file: int(file.name))[-batches:]:
        file.unlink()
        (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def topics(home: Home) -> Home:
    home.create_topic("orders", 2)
    home.create_topic("copy", 2)
    fill(home, 0, 30)
    return home


@pytest.mark.spark
def test_a_replayed_micro_batch_is_stored_once(
    topics: Home, stream: Stream, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    stream("orders", "copy", maxEventsPerTrigger=12)
    assert copied(topics) == list(range(30))
    for batches in (1, 2):
        forget(checkpoint, batches)
        query = stream("orders", "copy", maxEventsPerTrigger=12)
        replayed = [progress["numInputRows"] for progress in query.recentProgress]
        assert sum(replayed) > 0, "Spark has run the batch again"
        assert copied(topics) == list(range(30))
    fill(topics, 30, 40)
    forget(checkpoint, 1)
    stream("orders", "copy", maxEventsPerTrigger=12)
    assert copied(topics) == list(range(40))
    left = [info.key for info in topics.store.list("topics/") if "/sinks/" in info.key]
    assert left == []
    assert topics.verify("copy").errors == 0


@pytest.mark.long
@pytest.mark.spark
def test_two_queries_write_side_by_side_under_their_own_names(topics: Home, stream: Stream) -> None:
    stream("orders", "copy", "one", sink="one")
    stream("orders", "copy", "two", sink="two")
    assert copied(topics) == sorted([*range(30), *range(30)])
    with pytest.raises(StreamingQueryException, match="bring its checkpoint back"):
        stream("orders", "copy", "three", sink="one")
    assert len(copied(topics)) == 60


@pytest.mark.spark
def test_stream_whose_checkpoint_was_set_back_by_one_batch_loses_nothing(
    topics: Home, stream: Stream, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    stream("orders", "copy")
    fill(topics, 30, 40)
    forget(checkpoint, 1)
    for file in (checkpoint / "offsets").glob("*0*"):  # the plan of batch 0 too
        file.unlink()
    with pytest.raises(StreamingQueryException, match=r"is stored with 30 events.* again with 40"):
        stream("orders", "copy")
    assert copied(topics) == list(range(30))
    stream("orders", "copy", "whole", sink="again")
    assert copied(topics) == sorted([*range(30), *range(40)])


@pytest.mark.spark
def test_stream_notices_that_its_target_was_deleted_and_made_again(
    topics: Home, stream: Stream
) -> None:
    stream("orders", "copy")
    topics.delete_topic("copy")
    topics.create_topic("copy", 2)
    fill(topics, 30, 40)
    with pytest.raises(StreamingQueryException, match="was deleted and made again since query"):
        stream("orders", "copy")
    assert copied(topics) == []
