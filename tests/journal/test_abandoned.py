"""Uploads that a live process will never commit: erased bytes in them are deleted at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.log.maintenance.test_lost_commits import Past
from tidelog import Event, Home
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import Segment, encode_segment, encode_staged
from tidelog.connectors.sink import Lot
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.home import create_home, open_home
from tidelog.journal import amendment_writer as marks
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.producer.staged import StagedSegment
from tidelog.settings import load_settings
from tidelog.store.base import put_fresh

SECRET = b"secret bytes " * 1_000


@pytest.fixture
def home(tmp_path: Path) -> Home:
    create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0].close()
    return open_home(tmp_path / "home")


def holders(home: Home, topic: str) -> list[str]:
    """The objects of a topic that hold the secret."""
    found = []
    for info in home.store.list(f"topics/{home.topic(topic).incarnation}/"):
        data = home.store.get(info.key, 0, info.size)
        if info.key.endswith(".arrow"):
            values = pa.ipc.open_file(data).read_all()["value"].to_pylist()
        else:
            values = [data]
        if any(SECRET in (value or b"") for value in values):
            found.append(info.key)
    return found


def purge(home: Home, topic: str) -> None:
    compile_topic(home.context, home.topic(topic), CompilePolicy.everything())
    assert home.sweep(0).objects_doubted == 0
    assert holders(home, topic) == []


def delete_before(home: Home, appender: Appender, partition: int) -> None:
    """Erase the event just before the appender's first commit to a partition."""
    commit: Callable[..., Any] = appender.commit
    done: list[int] = []

    def wrapped(stored: Any, piece: Any, *others: Any) -> Any:
        if piece.partition == partition and not done:
            done.append(1)
            home.delete("dst", ["u-7"])
        return commit(stored, piece, *others)

    appender.commit = wrapped  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("others", [0, 1])
def test_copy_that_meets_an_erasure_leaves_none_of_its_bytes(home: Home, others: int) -> None:
    with home:
        home.create_topic("src", 2)
        home.create_topic("dst", 2)
        home.append("src", [Event(b"plain", id="k0")], partition=0)
        more = [Event(b"another", id=f"k{n}") for n in range(1, 1 + others)]
        home.append("src", [Event(SECRET, id="u-7"), *more], partition=1)
        home.append("dst", [Event(SECRET, id="u-7")], partition=1)
        sink = TopicPlaybackSink(home.context, home.topic("dst"), "drill", True)
        delete_before(home, sink._appender, 1)
        table = pa.Table.from_batches(list(home.playback_arrow("src"))).combine_chunks()
        assert sink.put(Lot(0, table.to_batches()[0])) == 1
        sink.close()
        assert len(list(home.read("dst", 1))) == others
        purge(home, "dst")


@pytest.mark.parametrize("partition", [0, 1])
def test_staged_copy_that_meets_an_erasure_leaves_none_of_its_bytes(
    home: Home, partition: int
) -> None:
    with home:
        topic = home.create_topic("dst", 2)
        home.append("dst", [Event(SECRET, id="u-7")], partition=1)
        now_ms = home.context.clock.now_ms()
        parts = [[Event(b"plain", id="k0")], [Event(SECRET, id="u-7"), Event(b"more", id="k1")]]
        tables = [(number, table_of(part, now_ms)) for number, part in enumerate(parts)]
        segment = encode_staged(tables)
        home.store.put("staging/p/0000000001/a/1/0", segment.data)
        copier = Copier(home.context, topic, "pump")
        delete_before(home, copier, partition)
        staged = StagedSegment("staging/p/0000000001/a/1/0", segment.pieces)
        assert append_staged(copier, [staged]) == 1
        assert [len(list(home.read("dst", number))) for number in range(2)] == [1, 1]
        purge(home, "dst")


def sweep_all(home: Home) -> None:
    home.sweep(0)


def compile_all(home: Home) -> None:
    compile_topic(home.context, home.topic("t"), CompilePolicy.everything())


@pytest.mark.parametrize("beside", [sweep_all, compile_all])
def test_large_value_that_is_stored_twice_leaves_none_of_its_bytes(
    home: Home, monkeypatch: pytest.MonkeyPatch, beside: Callable[[Home], None]
) -> None:
    done: list[int] = []

    def put(store: Any, key: str, data: bytes) -> None:
        put_fresh(store, key, data)
        if not done:
            done.append(1)
            beside(home)  # between the upload and the row

    with home:
        home.create_topic("t")
        home.append("t", [Event(b"x", id="u-7")])
        monkeypatch.setattr(marks, "put_fresh", put)
        home.update("t", "u-7", SECRET)
        assert len(holders(home, "t")) == 2
        home.delete("t", ["u-7"])
        purge(home, "t")


def test_request_that_another_with_its_key_overtakes_leaves_no_stray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past()
    topic = past.topic()
    upload = Appender.upload
    uploads: list[StoredSegment] = []

    def overtaken(self: Appender, segment: Segment) -> StoredSegment:
        stored = upload(self, segment)
        uploads.append(stored)
        if len(uploads) == 1:
            append_once(past.context, topic, "key", [Event(b"once")])
        return stored

    monkeypatch.setattr(Appender, "upload", overtaken)
    append_once(past.context, topic, "key", [Event(b"once")])
    assert past.values(topic) == ["once"]
    trim_topic(past.context, topic, ToOffsets({0: 1}))
    assert sweep_home(past.context, 0).objects_doubted == 0
    assert past.objects() == set()


def test_proof_names_a_partly_committed_upload_and_its_remedy_works(home: Home) -> None:
    with home:
        topic = home.create_topic("t", 2)
        appender = Appender(home.context, topic, "~killed")
        now_ms = home.context.clock.now_ms()
        parts = [(0, [Event(SECRET, id="u-7")]), (1, [Event(b"x", id="u-8")])]
        tables = [(number, table_of(part, now_ms)) for number, part in parts]
        segment = encode_segment(tables, appender.known([0, 1]))
        stored = appender.upload(segment)
        appender.commit(stored, segment.pieces[0])  # killed here
        home.delete("t", ["u-7"])
        compile_topic(home.context, topic, CompilePolicy.everything())
        assert home.sweep(0).objects_doubted == 1
        [trace] = home.prove_erased(topic.name, ids=["u-7"]).traces
        assert trace.object == stored.key
        assert "`tidelog sweep --accept-loss t`" in trace.do
        home.sweep(0, accept_loss=["t"])
        assert home.prove_erased(topic.name, ids=["u-7"]).is_erased
        assert holders(home, "t") == []
