"""What users of rscylla know: fixed windows, a start by an event, base rows, servers by token."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra.metadata import Murmur3Token
from cassandra.policies import SimpleConvictionPolicy
from cassandra.pool import Host

from tests.servers.scylla_play import Play, Row
from tests.support.scylla_reads import START_MS, at, opened, order_ticks, read_all
from tidelog.connectors.scylla import reader as reading
from tidelog.connectors.scylla import session as sessions
from tidelog.connectors.scylla.session import StreamAwarePolicy, parse_scylla
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address

pytestmark = pytest.mark.usefixtures("no_session_outlives_its_server")


def fill(play: Play, count: int, step_ms: int = 1_000) -> None:
    for number in range(count):
        row = Row("insert", f"r{number % 7}", number, {"state": "new"})
        play.write(START_MS + number * step_ms, row)


@pytest.mark.server
def test_windows_of_a_fixed_width_find_the_same_and_no_window_is_wider(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(play, 60)
    widths: list[int] = []
    read = reading.ChangeRead._read_window

    def noted(self: Any, layout: Any, generation: Any, start: int, end: int) -> Any:
        widths.append(end - start)
        return read(self, layout, generation, start, end)

    monkeypatch.setattr(reading.ChangeRead, "_read_window", noted)
    found = read_all(opened(play.url(groups=1, window="10s"), at(5)))
    assert len(found) == 60
    assert max(widths) == 10_000
    assert len(widths) >= 6


@pytest.mark.server
def test_reading_begins_at_the_second_of_an_event(play: Play) -> None:
    fill(play, 30, step_ms=500)
    events = sorted(read_all(opened(play.url(groups=1), at(5))), key=order_ticks)
    later = opened(play.url(groups=1, start=events[21].id), at(5))
    found = sorted(read_all(later), key=order_ticks)
    assert [event.id for event in found] == [event.id for event in events[20:]]


@pytest.mark.server
def test_base_row_of_a_change_is_fetched_by_its_key(play: Play) -> None:
    play.write(START_MS, Row("insert", "r", 1, {"state": "new"}))
    play.write(START_MS + 1, Row("row_delete", "r", 2))
    play.write(START_MS + 2, Row("partition_delete", "r", None))
    play.session.execute("INSERT INTO orders (region, id, note) VALUES ('r', 1, 'as it is now')")
    source = opened(play.url(groups=1), at(5))
    one, gone, part = sorted(read_all(source), key=order_ticks)
    row = source.fetch_row(one.key or b"")
    assert row is not None
    assert (row["region"], row["id"], row["note"]) == ("r", 1, "as it is now")
    assert source.fetch_row(gone.key or b"") is None
    for key in (part.key or b"", b"r", b"[1]", b""):
        with pytest.raises(InvalidError, match="primary key"):
            source.fetch_row(key)


def test_readers_of_a_process_share_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ScyllaSession", lambda place: SimpleNamespace(place=place))
    monkeypatch.setattr(sessions, "_sessions", {})
    url = "scylla://host:9042/shop.{}?window={}s"
    orders, again, clicks = (
        parse_scylla(parse_address(url.format(*each)), {}, 0)[0]
        for each in (("orders", 1), ("orders", 10), ("clicks", 1))
    )
    assert sessions.session_of(orders) is sessions.session_of(again)
    assert sessions.session_of(orders) is not sessions.session_of(clicks)


def test_statement_goes_to_a_server_that_holds_its_streams() -> None:
    tokens = [Murmur3Token(token) for token in (-100, 0, 100)]
    hosts = [
        Host(f"127.0.0.{n}", SimpleConvictionPolicy, host_id=uuid.UUID(int=n)) for n in (1, 2, 3)
    ]
    for host in hosts:
        host.set_location_info("dc", "rack")
    token_map = SimpleNamespace(
        ring=tokens, token_to_host_owner=dict(zip(tokens, hosts, strict=True))
    )
    policy = StreamAwarePolicy("dc")
    cluster = SimpleNamespace(metadata=SimpleNamespace(token_map=token_map))
    policy.populate(cluster, hosts)
    for token, holder in ((-101, 0), (-100, 0), (-99, 1), (50, 2), (101, 0)):
        near = token.to_bytes(8, "big", signed=True) + bytes(8)
        plan = list(policy.make_query_plan(None, SimpleNamespace(near=near)))
        assert plan[0] is hosts[holder]
        assert {each.address for each in plan} == {each.address for each in hosts}
    assert len(list(policy.make_query_plan(None, SimpleNamespace(near=None)))) == 3
    token_map.ring = []
    assert len(list(policy.make_query_plan(None, SimpleNamespace(near=bytes(16))))) == 3
