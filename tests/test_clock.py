"""How long something is looked at, and when the last look is."""

from __future__ import annotations

from tidelog.clock import looks
from tidelog.testing.scheduler import FakeClock


def test_looks_are_as_far_apart_as_asked_and_the_last_one_says_so() -> None:
    clock = FakeClock()
    began_s = clock.monotonic_s()
    seen = [(clock.monotonic_s() - began_s, is_last) for is_last in looks(clock, 1.0, 0.4)]
    assert [round(at_s, 3) for at_s, _ in seen] == [0.0, 0.4, 0.8, 1.2]
    assert [is_last for _, is_last in seen] == [False, False, False, True]


def test_nothing_to_wait_for_is_one_look() -> None:
    assert list(looks(FakeClock(), 0.0, 0.4)) == [True]


def test_process_that_was_stopped_looks_once_more() -> None:
    clock = FakeClock()
    times = looks(clock, 1.0, 0.4)
    assert next(times) is False
    clock.sleep(60.0)  # stopped in the middle of the first look
    assert list(times) == [True]
