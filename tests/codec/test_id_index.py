"""The id index: every id is found, strangers hardly ever, damage always."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.codec.segment import IdIndex, decode_index, encode_index, hash_ids
from tidelog.errors import CorruptError

pytestmark = pytest.mark.unit


def hash_id(text: str) -> int:
    return int(hash_ids(pa.array([text], pa.string()))[0])


def blocks_with(index: IdIndex, hashed: int) -> list[int]:
    """The blocks that may hold an id of this hash."""
    return [number for number, block in enumerate(index.blocks) if hashed >> 32 in block]


@given(st.lists(st.lists(st.none() | st.text(min_size=1, max_size=40), max_size=20), max_size=5))
@settings(max_examples=200, deadline=None)
def test_every_id_is_found_in_its_block(blocks: list[list[str | None]]) -> None:
    data = encode_index([pa.array(block, pa.string()) for block in blocks])
    texts = [[text for text in block if text is not None] for block in blocks]
    if not any(texts):
        assert data == b""
        return
    index = decode_index(data, "here")
    for number, block in enumerate(texts):
        for text in block:
            assert number in blocks_with(index, hash_id(text))


@given(st.lists(st.text(max_size=30), min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_a_hash_does_not_depend_on_its_neighbours(texts: list[str], data: st.DataObject) -> None:
    column = pa.array(texts, pa.string())
    first = data.draw(st.integers(0, len(texts) - 1))
    whole = hash_ids(column)
    assert list(hash_ids(column.slice(first))) == list(whole[first:])
    assert [hash_id(text) for text in texts] == whole.tolist()
    assert list(hash_ids(pa.chunked_array([column[:first], column[first:]]))) == list(whole)


def test_strangers_are_hardly_ever_taken_for_one_of_them() -> None:
    column = pa.array([str(uuid.UUID(int=n)) for n in range(100_000)])
    assert len(np.unique(hash_ids(column))) == 100_000
    index = decode_index(encode_index([column]), "here")
    strangers = hash_ids(
        pa.array([str(uuid.UUID(int=n)) for n in range(1 << 64, (1 << 64) + 20_000)])
    )
    assert sum(bool(blocks_with(index, int(each))) for each in strangers) < 10


def test_a_damaged_index_is_told() -> None:
    data = encode_index([pa.array(["a", "b", "c"])])
    for at in range(len(data)):
        broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(CorruptError):
            decode_index(broken, "here")
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            decode_index(data[:length], "here")
