"""Text of events: what is accepted is UTF-8, so every reader can decode it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tidelog
from tidelog import Event, Home
from tidelog.codec import event_batch as codec
from tidelog.codec.event_batch import STORED_SCHEMA, check_events, stored_batch
from tidelog.codec.event_json import batch_lines
from tidelog.errors import CorruptError, InvalidError

_HEADERS = STORED_SCHEMA.field("headers").type
_BAD = b"\xff\xfe"


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t")
        yield opened


def _text(*values: bytes | None) -> pa.Array:
    """A column of text with any bytes, as Arrow allows."""
    return pa.array(values, pa.binary()).view(pa.string())


def _headers(*names: bytes) -> pa.Array:
    pairs = pa.StructArray.from_arrays(
        [_text(*names), pa.array([b"v"] * len(names), pa.binary())],
        fields=list(_HEADERS.value_type),
    )
    return pa.ListArray.from_arrays(list(range(len(names) + 1)), pairs, type=_HEADERS)


def _table(column: str) -> pa.Table:
    """Three events, the second of which has text that is not UTF-8."""
    bad = _headers(b"a", _BAD, b"c") if column == "headers" else _text(b"a", _BAD, None)
    return pa.table({"value": [b"0", b"1", b"2"], column: bad})


@pytest.mark.parametrize(
    "call",
    [
        lambda home, text: home.append_once("t", text, [Event(b"1")]),
        lambda home, text: home.consumers("t").get(text),
        lambda home, text: home.delete_consumer("t", text),
        lambda home, text: home.search("t", tidelog.SearchQuery(id=text)),
        lambda home, text: home.search("t", tidelog.SearchQuery(text=text)),
        lambda home, text: home.sql(f"select '{text}'"),
        lambda home, text: tidelog.open(text),
    ],
)
def test_argument_that_is_not_unicode_is_invalid(home: Home, call: Any) -> None:
    with pytest.raises(InvalidError):
        call(home, "\ud800")


def test_empty_idempotency_key_is_refused(home: Home) -> None:
    with pytest.raises(InvalidError, match="the key is empty"):
        home.append_once("t", "", [Event(b"1")])
    assert list(home.read("t")) == []


def test_printing_events_keeps_none_of_them_in_memory() -> None:
    table = codec.table_of([Event(b"x" * 1_000_000)], 0)
    batch = codec.with_position(codec.one_batch(table), "t", 0, 0)
    batch_lines(batch)
    tracemalloc.start()
    for _ in range(10):
        batch_lines(batch)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


@pytest.mark.parametrize("column", ["id", "type", "headers"])
def test_text_that_is_not_utf8_is_refused_and_nothing_is_stored(home: Home, column: str) -> None:
    with pytest.raises(InvalidError, match=r"row 1: event: its .* is not valid UTF-8") as refused:
        home.append("t", _table(column))
    assert refused.value.context["row"] == 1
    with pytest.raises(InvalidError):
        home.append("t", _table(column).slice(1, 1))
    assert len(home.append("t", _table(column).slice(2, 1))) == 1
    assert [event.value for event in home.read("t")] == [b"2"]


def test_if_absent_refuses_ids_that_are_not_utf8(home: Home) -> None:
    table = pa.table({"value": [b"0"], "id": _text(_BAD)})
    with pytest.raises(InvalidError, match="not valid UTF-8"):
        home.append("t", table, if_absent=True)


@pytest.mark.parametrize("column", ["id", "type", "headers"])
def test_older_event_with_bad_text_is_named_by_readers_and_verify(
    home: Home, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tidelog.log.producer.producer.check_events", lambda *_, **__: None)
        home.append("t", _table(column), partition=0)
    (found,) = [each for each in home.verify("t").findings if each.severity == "error"]
    assert "offset 1: its" in found.what
    assert "not valid UTF-8" in found.what
    with home.consumer("t", "c") as consumer:
        with pytest.raises(CorruptError, match=r"`t/0`, offset 1: its .* not valid UTF-8"):
            consumer.poll()
        (batch,) = consumer.poll_arrow().to_batches()
        with pytest.raises(CorruptError, match="partition `t/0`, offset 1: its"):
            batch_lines(batch)
        consumer.seek(0, 2)
        assert [event.value for event in consumer.poll()] == [b"2"]


_short = st.binary(max_size=6)
_texts = st.one_of(st.none(), _short, st.text(max_size=4).map(str.encode))
_rows = st.fixed_dictionaries(
    {
        "value": st.one_of(st.none(), _short),
        "key": st.one_of(st.none(), _short),
        "id": _texts,
        "type": _texts,
        "headers": st.one_of(
            st.none(),
            st.lists(st.tuples(_texts, st.one_of(st.none(), _short)), max_size=3),
        ),
    }
)


def _given(rows: list[dict[str, Any]]) -> pa.Table:
    raw = pa.list_(pa.struct([("name", pa.binary()), ("value", pa.binary())]))
    listed = [
        None
        if row["headers"] is None
        else [{"name": name, "value": value} for name, value in row["headers"]]
        for row in rows
    ]
    lists = pa.array(listed, raw)
    pairs = lists.values
    named = pa.StructArray.from_arrays(
        [pairs.field("name").view(pa.string()), pairs.field("value")],
        fields=list(_HEADERS.value_type),
    )
    headers = pa.ListArray.from_arrays(
        lists.offsets, named, type=_HEADERS, mask=lists.is_null() if len(lists) else None
    )
    return pa.table(
        {
            "value": pa.array([row["value"] for row in rows], pa.binary()),
            "key": pa.array([row["key"] for row in rows], pa.binary()),
            "id": _text(*[row["id"] for row in rows]),
            "type": _text(*[row["type"] for row in rows]),
            "headers": headers,
        }
    )


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_rows, max_size=4), st.integers(0, 2))
def test_accepted_table_is_read_back_as_it_was_given(rows: list[dict[str, Any]], cut: int) -> None:
    table = _given(rows).slice(min(cut, len(rows)))
    stored = stored_batch(table, 5)
    try:
        check_events(stored, 1 << 20)
    except InvalidError:
        return
    batch = codec.one_batch(stored)
    read = list(codec.events_of(batch, "t", 0, 0))
    for event, row in zip(read, rows[min(cut, len(rows)) :], strict=True):
        assert (event.value, event.key) == (row["value"], row["key"])
        assert (event.id or "").encode() == (row["id"] or b"")
        assert (event.type is None) == (row["type"] is None)
        assert (event.type or "").encode() == (row["type"] or b"")
        expected = [(name.decode(), value) for name, value in row["headers"] or ()]
        assert list(event.headers) == expected
    again = codec.table_of([Event(e.value, e.key, e.id, 5, e.type, e.headers) for e in read], 5)
    check_events(again, 1 << 20)
    assert list(codec.events_of(codec.one_batch(again), "t", 0, 0)) == read
