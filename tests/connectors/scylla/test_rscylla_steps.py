"""rscylla's example, step by step: a stream of changes, a consumer with fate, and its cursor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tidelog
from tests.servers.scylla_play import Play, Row
from tests.support.named_pipelines import create_pipeline
from tests.support.scylla_reads import START_MS, at
from tests.support.scylla_tables import drain
from tidelog import Event
from tidelog.home import World, create_home
from tidelog.settings import Settings

pytestmark = pytest.mark.usefixtures("no_session_outlives_its_server")


@pytest.mark.server
def test_steps_of_rscylla(play: Play, tmp_path: Path) -> None:
    for number in range(20):
        row = Row("insert", f"r{number % 3}", number, {"state": "new"})
        play.write(START_MS + number * 1_000, row)
    play.session.execute("INSERT INTO orders (region, id, note) VALUES ('r1', 1, 'base row')")
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as home:
        home.create_topic("orders", 3)
        # NewStream(keyspace, table), with windows of a second and the default lag
        create_pipeline(home.context, "orders", play.url(window="1s"), "topic:orders")
        assert drain(home, "orders", at(5)) == 20
        # NewConsumer(name, fn), whose fn is failing; Run goes on after errors
        handled: list[Event] = []
        fate = tidelog.Fate(seed=7, rate=0.2)
        with home.consumer("orders", "example") as consumer:
            failing = fate.with_failures(handled.append)
            consumer.run(failing, retries=50, retry_base_ms=1, until_caught_up=True)
        assert sum(fate.failed.values()) > 0
        assert len({event.id for event in handled}) == 20  # at least once
        # the event: ID, ForeignID, Type, and what rscylla left to do
        first = min(handled, key=lambda event: event.timestamp or 0)
        names = ["cursor_gen", "cursor_time", "stream_id", "stream_time", "stream_seq"]
        assert list(json.loads(first.id or "")) == names
        assert json.loads(first.key or b"") == {"region": "r0", "id": 0}
        assert first.type == "insert"
        assert json.loads(first.value or b"")["columns"]["state"]["value"] == "new"
        one = next(event for event in handled if json.loads(event.key or b"")["id"] == 1)
        row_now = home.pumps.get("orders").fetch_row(one)
        assert row_now is not None
        assert row_now["note"] == "base row"
        # the same without a topic: the stream calls the handler itself, here with younger changes
        now_ms = home.context.clock.now_ms()
        for number in range(5):
            play.write(now_ms - 60_000 + number, Row("insert", "r1", 100 + number))
        seen: list[Event] = []
        stream = home.stream(play.url())
        assert stream.run(seen.append, name="direct", until_caught_up=True) == 5
        assert sorted(json.loads(each.key or b"")["id"] for each in seen) == list(range(100, 105))
        assert stream.run(seen.append, name="direct", until_caught_up=True) == 0
        assert stream.fetch_row(one) == row_now
        # the cursor: another run has nothing to do, and one from an event's id has its second on
        assert drain(home, "orders", at(5)) == 0
        home.create_topic("rest", 3)
        last = max(handled, key=lambda event: event.timestamp or 0)
        create_pipeline(home.context, "rest", play.url(start=last.id), "topic:rest")
        assert drain(home, "rest", at(5)) == 1
