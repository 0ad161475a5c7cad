"""What became of events of flushes that have ended: their positions, or one error for all."""

from __future__ import annotations

import numpy as np
import pytest

from tidelog.errors import PartialAppendError, UnavailableError, UnknownOutcomeError
from tidelog.log.producer.flush import (
    Flush,
    FlushPart,
    SendFuture,
    flushes_of,
    positions_of,
)


def flush_of(stored: dict[int, int], events: int, error: BaseException | None = None) -> Flush:
    """A flush of events for partition 0 that has ended; ``stored`` has offsets by row."""
    flush = Flush("t")
    flush.partitions = np.zeros(events, np.int32)
    for row, offset in stored.items():
        flush.note_stored(part(row), offset)
    flush.finish(error)
    return flush


def part(*rows: int) -> FlushPart:
    return FlushPart(0, None, np.array(rows, np.int64), None)


def sent(flush: Flush, *rows: int) -> list[SendFuture]:
    return [SendFuture(flush, row) for row in rows]


def test_positions_are_in_the_order_of_the_events() -> None:
    one, two = flush_of({0: 5, 1: 6, 2: 7}, 3), flush_of({0: 8}, 1)
    found = positions_of("t", flushes_of([*sent(one, 0, 2), *sent(two, 0)]))
    assert found.offsets.tolist() == [5, 7, 8]
    whole = positions_of("t", [(one, None), (two, None)])
    assert whole.offsets.tolist() == [5, 6, 7, 8]


def test_some_stored_and_some_unknown_is_an_error_that_says_which() -> None:
    lost = UnknownOutcomeError("reply lost")
    flush = Flush("t")
    flush.partitions = np.zeros(3, np.int32)
    flush.note_stored(part(0), 5)
    flush.note_unknown(part(1), lost)
    flush.finish(lost)
    for given in (flushes_of(sent(flush, 0, 1, 2)), [(flush, None)]):
        with pytest.raises(PartialAppendError) as caught:
            positions_of("t", given)
        assert [each and each.offset for each in caught.value.positions] == [5, None, None]
        assert list(caught.value.unknown) == [1]
        assert caught.value.__cause__ is lost
    assert positions_of("t", flushes_of(sent(flush, 0))).offsets.tolist() == [5]


def test_event_that_is_not_stored_is_not_unknown_since_another_partition_is() -> None:
    lost = UnknownOutcomeError("reply lost")
    flush = Flush("t")
    flush.partitions = np.zeros(2, np.int32)
    flush.note_unknown(part(0), lost)
    flush.finish(lost)
    with pytest.raises(UnavailableError, match="this event is not stored"):
        positions_of("t", flushes_of(sent(flush, 1)))
    with pytest.raises(UnknownOutcomeError, match="reply lost"):
        positions_of("t", flushes_of(sent(flush, 1, 0)))


def test_flush_that_failed_before_it_was_divided_has_one_error() -> None:
    flush = Flush("t")
    flush.finish(UnavailableError("no store"))
    with pytest.raises(UnavailableError, match="no store"):
        positions_of("t", flushes_of(sent(flush, 0, 1)))


def test_event_that_is_stored_is_a_success_whatever_ended_its_flush() -> None:
    flush = flush_of({0: 5}, 2, KeyboardInterrupt())
    assert positions_of("t", flushes_of(sent(flush, 0))).offsets.tolist() == [5]
    with pytest.raises(KeyboardInterrupt):
        positions_of("t", flushes_of(sent(flush, 0, 1)))
