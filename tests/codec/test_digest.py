"""Digests of events: the same for the same events, in any order and in any tables."""

from __future__ import annotations

import pyarrow as pa

from tidelog.codec.event_batch import Contents, contents_of, table_of
from tidelog.model.event import Event

EVENTS = [
    Event(f"{n}".encode(), key=b"k" if n % 2 else None, id=f"i{n}", headers=(("h", b"\xff"),))
    for n in range(50)
]


def digest(events: list[Event]) -> Contents:
    return contents_of(table_of(events, 0))


def test_order_and_tables_do_not_matter() -> None:
    whole = digest(EVENTS)
    assert digest(EVENTS[::-1]) == whole
    assert digest(EVENTS[:7]).plus(digest(EVENTS[7:])) == whole
    assert Contents().plus(whole) == whole
    assert whole.events == 50
    assert not whole.differs(digest(EVENTS[::-1]))


def test_every_part_of_an_event_counts() -> None:
    whole = digest(EVENTS)
    one = EVENTS[3]
    for other in (
        Event(b"x", key=one.key, id=one.id, headers=one.headers),
        Event(one.value, key=b"x", id=one.id, headers=one.headers),
        Event(one.value, key=one.key, id="x", headers=one.headers),
        Event(one.value, key=one.key, id=one.id, headers=(("h", b"x"),)),
        Event(one.value, key=one.key, id=one.id, headers=one.headers, timestamp=1),
        Event(one.value, key=one.id.encode() if one.id else b"", id="k", headers=one.headers),
    ):
        assert whole.differs(digest([*EVENTS[:3], other, *EVENTS[4:]]))
    assert whole.differs(digest(EVENTS[:-1]))
    assert whole.differs(digest([*EVENTS, EVENTS[0]]))


def test_no_events_have_a_digest_too() -> None:
    assert contents_of(pa.table({"value": pa.array([], pa.binary())})).events == 0
