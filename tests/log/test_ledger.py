"""Erased ids stay away: restores and pumps leave them out; ordinary producers may use them anew."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.support.ranges import batch_of, stage
from tidelog import Event
from tidelog.connectors.by_url import sink_at
from tidelog.home import Home, World, create_home
from tidelog.log import ledger
from tidelog.log.ledger import ErasedIds, announce_erasure, enter_erased, read_erased
from tidelog.log.topics import raise_head
from tidelog.model.topic import Head
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as found:
        found.create_topic("t", 2)
        yield found


def erase(home: Home, *ids: str) -> None:
    home.append("t", [Event(b"secret", id=each) for each in ids])
    home.delete("t", ids)


def events(*ids: str | None) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "key": pa.nulls(len(ids), pa.binary()),
            "timestamp": pa.array([0] * len(ids), pa.timestamp("ms")),
        }
    )


def ids(home: Home) -> list[str | None]:
    return [event.id for partition in (0, 1) for event in home.read("t", partition)]


def test_a_snapshot_knows_erased_ids_and_is_read_again_only_when_it_must() -> None:
    with create_home(Settings("memory:", "memory:"), world=World(environ={}))[0] as home:
        topic = home.create_topic("t", 2)
        nothing = read_erased(home.context, topic)
        assert len(nothing) == 0
        assert nothing.kept(events("a", None)) is None
        erase(home, "a", "é" * 2_000, "\U0001f30a")
        erased = read_erased(home.context, topic, nothing)
        assert len(erased) == 3
        assert erased.has("a")
        assert not erased.has("A")
        kept = erased.kept(events("b", None, "a", "\U0001f30a", "", "é" * 2_000))
        assert kept is not None
        assert kept.tolist() == [True, True, False, False, True, False]
        assert erased.kept(events("b", None)) is None
        assert erased.kept(events(None, None)) is None
        assert erased.kept(events()) is None
        assert read_erased(home.context, topic, erased) is erased
        again = pickle.loads(pickle.dumps(erased))
        assert again.has("a")
        assert again.mark == erased.mark
        assert ErasedIds().mark == ""


def test_announcement_whose_reply_is_lost_counts_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = home.topic("t")
    raise_head(home.context, topic, 0, lambda head: msgspec.structs.replace(head, copied=True))
    before = announce_erasure(home.context, topic, 0)

    def repeat(*given: Any) -> tuple[Head, Head]:
        raise_head(*given)
        return raise_head(*given)

    monkeypatch.setattr(ledger, "raise_head", repeat)
    assert announce_erasure(home.context, topic, 0).erasures == before.erasures + 1


def test_the_ledger_holds_no_id(home: Home) -> None:
    enter_erased(home.context, home.topic("t"), {"a-very-plain-id": 1}, {b"a very plain key": 1})
    topic = home.topic("t").incarnation
    rows = [
        row for number in range(256) for row in home.catalog.scan(f"erased/{topic}/{number:02x}")
    ]
    assert len(rows) == 2
    assert "plain" not in str(rows)


def test_a_writer_leaves_out_what_was_erased(home: Home) -> None:
    erase(home, "x", "y")
    sink = sink_at(home.context, "topic:t")
    sink.check([])
    batch = batch_of([Event(b"%d" % n, id=each) for n, each in enumerate("axbyc")])
    manifest = stage(sink, [batch])
    assert manifest.written == 3
    sink.publish(manifest)
    assert sorted(map(str, ids(home))) == ["a", "b", "c"]


@pytest.mark.parametrize("gone", ["x", "a", "c", "axbyc", "ac", "xby"])
def test_what_is_erased_between_staging_and_commit_is_left_out_too(home: Home, gone: str) -> None:
    sink = sink_at(home.context, "topic:t")
    sink.check([])
    batch = batch_of([Event(each.encode(), each.encode(), each) for each in "axbyc"])
    manifest = stage(sink, [batch])
    later = stage(sink, [batch_of([Event(b"later", b"a", "later")], base=5)], ordinal=5)
    erase(home, *gone)
    before = {info.key for info in home.store.list("staging/")}
    sink.publish(manifest)
    sink.publish(manifest)  # as the next driver does, after a crash
    sink.publish(later)
    assert sorted(map(str, ids(home))) == sorted([*(set("axbyc") - set(gone)), "later"])
    assert {info.key for info in home.store.list("staging/")} == before


def test_more_may_be_erased_before_the_next_driver_goes_on(home: Home) -> None:
    sink = sink_at(home.context, "topic:t?partition=same")
    batches = [batch_of([Event(b"v", id=f"{part}{n}") for n in range(4)], part) for part in (0, 1)]
    manifest = stage(sink, batches)
    erase(home, "00", "13")
    sink.publish(manifest)
    stored = ids(home)
    erase(home, "01", "12")
    sink.publish(manifest)  # all of it is there: nothing comes again
    assert stored == ["01", "02", "03", "10", "11", "12"]
    assert ids(home) == ["02", "03", "10", "11"]


def test_a_pump_that_reads_all_again_does_not_bring_back_what_was_erased(home: Home) -> None:
    home.create_topic("from", 2)
    home.append("from", [Event(b"v", id=each) for each in "abc"])

    def pump(name: str) -> int:
        pipeline = open_pump(home.context, PumpOptions("topic:from", "t", name), LocalWorkers(1))
        return Driver(home.context, pipeline, DriverOptions()).run()

    assert pump("one") == 3
    home.delete("t", "b")
    assert sorted(map(str, ids(home))) == ["a", "c"]
    assert pump("again") == 3
    assert sorted(map(str, ids(home))) == ["a", "a", "c", "c"]


def test_an_ordinary_producer_may_use_an_erased_id_anew(home: Home) -> None:
    erase(home, "x")
    home.append("t", [Event(b"new", id="x")])
    assert home.get("t", "x").value == b"new"
