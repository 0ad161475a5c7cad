"""An id or a key that is used again: by the ledger's time the new event is no trace of the old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.coordination.audit import Why
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.proof import Proof
from tidelog.maintenance.erase import purge

WHY = Why("ada", "asked for")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        made.append("t", [Event(b"old", b"k", "x")], partition=0)
        yield made


def delete(home: Home, by: str) -> int:
    """Delete the event, and return a time that the ledger does not reach."""
    if by == "id":
        assert delete_events(home.context, home.amender("t", WHY), ["x"]).events == 1
    else:
        assert delete_key(home.context, home.amender("t", WHY), b"k").events == 1
    return home.context.clock.now_ms() + 1


def prove(home: Home, by: str) -> Proof:
    purge(home.context, home.topic("t"), grace_ms=0)
    if by == "id":
        return home.prove_erased("t", ids=["x"])
    return home.prove_erased("t", keys=[b"k"])


@pytest.mark.parametrize("by", ["id", "key"])
@pytest.mark.parametrize("partition", [0, 1])
def test_new_event_with_a_freed_id_or_key_is_no_trace(home: Home, by: str, partition: int) -> None:
    archive = an_archive(home)
    drive(home, archive)
    later_ms = delete(home, by)
    home.append("t", [Event(b"new", b"k", "x", later_ms)], partition=partition)
    drive(home, archive)
    proof = prove(home, by)
    assert proof.traces == []
    assert proof.known
    assert [event.value for event in home.read("t", partition, 0)] == [b"new"]


def test_event_that_is_no_later_than_the_erasure_is_a_trace_in_another_partition(
    home: Home,
) -> None:
    delete(home, "id")
    home.append("t", [Event(b"old", b"k", "x", 1_000)], partition=1)
    (trace,) = prove(home, "id").traces
    assert trace.what == "holds offset 0 of partition 1: readers still see it"


def test_later_event_is_a_trace_in_an_object_that_no_row_names(home: Home) -> None:
    later_ms = delete(home, "id")
    home.append("t", [Event(b"ahead", b"k", "x", later_ms)], partition=1)
    segments = [info.key for info in home.store.list("topics/") if "/segments/" in info.key]
    loose = "topics/" + home.topic("t").incarnation + "/other/loose"
    home.store.copy(segments[-1], loose)
    purge(home.context, home.topic("t"), grace_ms=0)
    traces = home.prove_erased("t", ids=["x"]).traces
    assert [trace.object for trace in traces] == [loose], "no delete has seen its time"
