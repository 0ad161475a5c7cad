"""One set of rules for an event's fields, whichever way it comes in.

What is accepted can be found, deleted, updated, played into a topic and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest

import tidelog
from tests.support.serving import serving
from tidelog import Event, Home
from tidelog.codec.event_batch import STORED_SCHEMA
from tidelog.connectors.topic.segments import EventLimit, SegmentTarget, SegmentWriter
from tidelog.errors import InvalidError
from tidelog.log.producer.idempotent_append import append_once
from tidelog.model import limits
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock

_HEADERS = STORED_SCHEMA.field("headers").type


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t")
        yield opened


def _table(event: Event) -> pa.Table:
    headers = [{"name": name, "value": value} for name, value in event.headers]
    columns = {
        "value": pa.array([b"fine", event.value], pa.binary()),
        "id": pa.array([None, event.id], pa.string()),
        "headers": pa.array([None, headers], _HEADERS),
    }
    return pa.table(columns)


def _send(home: Home, event: Event) -> None:
    home.producer("t").send(event.value, id=event.id, headers=event.headers).result()


def _stage(home: Home, event: Event) -> None:
    """As pumps, restores and playbacks in Spark stage events."""
    table = _table(event)
    columns = {
        field.name: table.column(field.name)
        if field.name in table.column_names
        else pa.nulls(2, field.type)
        for field in STORED_SCHEMA
    }
    columns["timestamp"] = pa.chunked_array([pa.array([0, 0]).cast(STORED_SCHEMA.field(0).type)])
    columns["offset"] = pa.chunked_array([pa.array([0, 1])])
    batch = pa.table(columns).to_batches()[0]
    target = SegmentTarget("topic:t", EventLimit(limits.EVENT_BYTES_MAX))
    writer = SegmentWriter(MemoryStore(FakeClock()), "s", target, lambda batch: None)  # type: ignore[arg-type,return-value]
    writer.write(batch)


WAYS: dict[str, Callable[[Home, Event], object]] = {
    "send": _send,
    "list": lambda home, event: home.append("t", [Event(b"fine"), event]),
    "arrow": lambda home, event: home.append("t", _table(event)),
    "absent": lambda home, event: home.append("t", [event], if_absent=True),
    "absent arrow": lambda home, event: home.append("t", _table(event)[1:], if_absent=True),
    "once": lambda home, event: append_once(home.context, home.topic("t"), "k", [event]),
    "stage": _stage,
}

BAD = {
    "empty id": (Event(b"x", id=""), "id is empty"),
    "long id": (Event(b"x", id="i" * (limits.ID_BYTES_MAX + 1)), "id has 8193 bytes"),
    "long id as UTF-8": (Event(b"x", id="é" * (limits.ID_BYTES_MAX // 2 + 1)), "id has 8194 bytes"),
    "many headers": (
        Event(b"x", id="a", headers=(("", b""),) * (limits.HEADERS_MAX + 1)),
        "10001 headers",
    ),
    "header overhead": (
        Event(b"x" * (limits.EVENT_BYTES_MAX - 100), id="a", headers=(("", b""),) * 100),
        "bytes, at most",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", BAD)
def test_event_that_breaks_a_rule_is_refused_in_every_way(home: Home, way: str, bad: str) -> None:
    event, message = BAD[bad]
    with pytest.raises(InvalidError, match=message):
        WAYS[way](home, event)
    assert list(home.read("t")) == []


@pytest.mark.parametrize("way", [way for way in WAYS if way != "stage"])
def test_longest_id_is_accepted_found_and_deleted(home: Home, way: str) -> None:
    longest = "é" * (limits.ID_BYTES_MAX // 2)
    WAYS[way](home, Event(b"x", id=longest))
    assert home.get("t", longest).value == b"x"
    assert home.delete("t", longest).events == 1


def test_header_of_no_name_is_refused_in_a_table(home: Home) -> None:
    for header in (None, {"name": None, "value": b"x"}):
        table = pa.table({"value": [b"x"], "headers": pa.array([[header]], _HEADERS)})
        with pytest.raises(InvalidError, match="header without a name"):
            home.append("t", table)
    assert list(home.read("t")) == []


def test_longest_id_is_found_and_deleted_over_http(tmp_path: Path) -> None:
    longest = "日" * (limits.ID_BYTES_MAX // 3) + "xx"
    assert len(longest.encode()) == limits.ID_BYTES_MAX
    with serving(tmp_path) as served:
        assert served.post({"value": "x", "id": longest}).status_code == 201
        path = f"/topics/t/ids/{quote(longest, safe='')}"
        assert served.client.get(path).json()["id"] == longest
        assert served.client.delete(path).json()["deleted"] == 1
        assert served.post({"value": "x", "id": longest + "x"}).status_code == 400
        many = [["", ""]] * (limits.HEADERS_MAX + 1)
        assert served.post({"value": "x", "headers": many}).status_code == 400
        assert served.values() == []


def test_dead_letter_of_the_largest_event_can_be_updated(home: Home) -> None:
    """Its headers are Tidelog's, which come on top of the limit."""
    most = limits.EVENT_BYTES_MAX
    own = (("tidelog-error", b"e" * 100),)
    home._append_own("t", [Event(b"x" * (most - 1), id="a", headers=own)])
    home.update("t", "a", b"y" * (most - 1))
    assert home.get("t", "a").value == b"y" * (most - 1)
    home.append("t", [Event(b"x", id="b", headers=(("other", b"e" * 100),))])
    with pytest.raises(InvalidError, match="update of id `b`"):
        home.update("t", "b", b"y" * (most - 1))


def test_update_may_not_make_an_event_too_large_to_play(home: Home) -> None:
    """Key, id, type and headers count too, and what is accepted can be played into a topic."""
    most = limits.EVENT_BYTES_MAX
    event = Event(b"x", key=b"k" * 1_000, id="a", type="t" * 10, headers=(("h", b"v" * 500),))
    home.append("t", [event])
    rest = 1_000 + 1 + 10 + 1 + 500 + limits.HEADER_OVERHEAD_BYTES
    for size in (most - rest + 1, most):
        with pytest.raises(InvalidError, match=r"update of id `a`: .* at most"):
            home.update("t", "a", b"y" * size)
    assert home.get("t", "a").value == b"x"
    assert not list(home.audit("t"))
    home.update("t", "a", b"y" * (most - rest))
    home.create_topic("copy")
    (played,) = home.playback("t")
    home.append(
        "copy", [Event(played.value, played.key, played.id, 0, played.type, played.headers)]
    )
