"""Merging by offset: every event once, in order, whatever the streams are cut into."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.codec.event_batch import EVENT_SCHEMA, table_of, with_position
from tidelog.connectors.merge import MergeInput, gathered, merged, within
from tidelog.errors import CorruptError
from tidelog.model.event import Event


def rows(offsets: list[int], size: int = 1) -> pa.RecordBatch:
    """One row for each offset, whose value says so."""
    if not offsets:
        return pa.RecordBatch.from_pylist([], schema=EVENT_SCHEMA)
    events = [Event(b"%d" % offset + b"x" * size) for offset in offsets]
    batch = with_position(table_of(events, 0).to_batches()[0], "t", 0, 0)
    return batch.set_column(2, EVENT_SCHEMA.field(2), pa.array(offsets, pa.int64()))


def stream(
    *batches: list[int], opened: list[int] | None = None, first: int | None = None
) -> MergeInput:
    begin = min((min(each) for each in batches if each), default=0) if first is None else first

    def batches_of() -> Iterator[pa.RecordBatch]:
        if opened is not None:
            opened.append(begin)
        yield from map(rows, batches)

    return MergeInput(f"stream at {begin}", begin, batches_of)


def offsets_of(streams: list[MergeInput]) -> list[int]:
    found: list[int] = []
    for batch in merged(streams):
        assert batch.num_rows
        batch.validate(full=True)
        values = [int(value.rstrip(b"x")) for value in batch.column("value").to_pylist()]
        assert values == batch.column("offset").to_pylist()
        found += values
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=60), st.data())
def test_any_streams_give_the_sorted_whole(
    places: list[tuple[int, int]], data: st.DataObject
) -> None:
    held: dict[int, list[int]] = {}
    offset = 0
    for number, step in places:
        offset += step
        held.setdefault(number, []).append(offset)
    streams = []
    for offsets in held.values():
        cuts = sorted(data.draw(st.lists(st.integers(0, len(offsets)), max_size=3)))
        pieces = [offsets[a:b] for a, b in zip([0, *cuts], [*cuts, len(offsets)], strict=True)]
        streams.append(stream(*pieces, first=data.draw(st.integers(0, offsets[0]))))
    assert offsets_of(streams) == sorted(o for offsets in held.values() for o in offsets)


def test_too_much_is_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.connectors.merge._MERGE_BYTES", 1_000)
    streams = [stream(list(range(n, 3_000, 3))) for n in range(3)]
    batches = list(merged(streams))
    assert len(batches) > 100
    assert [o for each in batches for o in each.column("offset").to_pylist()] == list(range(3_000))


def test_a_stream_is_opened_when_it_is_reached() -> None:
    opened: list[int] = []
    streams = [stream([n, n + 5], opened=opened) for n in (0, 3, 20, 100)]
    found = merged(streams)
    assert next(found).column("offset").to_pylist() == [0, 3, 5]
    assert opened == [0, 3]
    list(found)
    assert opened == [0, 3, 20, 100]


@pytest.mark.parametrize(
    ("streams", "says"),
    [
        ([stream([1, 3]), stream([2, 3, 4])], "stream at 1 and stream at 2: both have offset 3"),
        ([stream([1, 3]), stream([3, 4])], "stream at 1 and stream at 3: both have offset 3"),
        ([stream([1, 1])], "do not rise"),
        ([stream([2, 1])], "do not rise"),
        ([stream([1, 2], [2, 3])], "do not rise after 2"),
        ([stream([1, 2], first=2)], "do not rise after 1"),
    ],
)
def test_what_is_not_in_order_is_told(streams: list[MergeInput], says: str) -> None:
    with pytest.raises(CorruptError, match=says):
        list(merged(streams))


def test_nothing_at_all() -> None:
    assert offsets_of([]) == []
    assert offsets_of([stream([]), stream([], [])]) == []


def test_within_is_half_open() -> None:
    batch = rows([1, 4, 6])
    for start, end, wanted in ((0, 9, [1, 4, 6]), (1, 6, [1, 4]), (2, 4, []), (4, 5, [4])):
        assert within(batch, start, end).column("offset").to_pylist() == wanted


def test_small_batches_are_joined_and_the_last_chunk_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_ROWS", 4)
    pieces = [(rows([n]), str(n + 1)) for n in range(10)]
    chunks = list(gathered(pieces, "12"))
    assert [(chunk.batch.num_rows, chunk.position) for chunk in chunks] == [
        (4, "4"),
        (4, "8"),
        (2, "12"),
    ]
    monkeypatch.setattr("tidelog.connectors.merge._CHUNK_BYTES", 1_000)
    large = [(rows([n], 2_000), str(n + 1)) for n in range(3)]
    assert [chunk.batch.num_rows for chunk in gathered(large, "3")] == [1, 1, 1, 0]
    (nothing,) = gathered([], "7")
    assert (nothing.batch.num_rows, nothing.position) == (0, "7")
