"""Segments: an object holds the bytes of its own events and of no other."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.model.event import Event

SECRETS = [b"secret-id", b"secret-key", b"secret-value", b"secret-header"]


def events(*names: str) -> pa.Table:
    made = [
        Event(
            f"{name}-value".encode(),
            f"{name}-key".encode(),
            id=f"{name}-id",
            timestamp=1,
            type=f"{name}-type",
            headers=(("name", f"{name}-header".encode()),),
        )
        for name in names
    ]
    return table_of(made, 1)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "between others", "last"])
def test_piece_of_a_table_holds_no_byte_of_the_other_events(place: int) -> None:
    names = ["secret"] * 3
    names[place] = "public"
    data = encode_staged([(0, events(*names).slice(place, 1))]).data
    assert b"public-value" in data
    assert [secret for secret in SECRETS if secret in data] == []
