"""Exceptions that are not Tidelog's: nothing that was read is lost, and no lease lapses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tidelog
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.coordination.ownership import beating
from tidelog.log.consumer.delivery import LeaseReader
from tidelog.settings import LogSettings


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 2)
        for partition in (0, 1):
            opened.append("t", [Event(b"%d" % partition)], partition=partition)
        yield opened


def test_poll_returns_what_it_read_before_a_foreign_exception(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh = LeaseReader.refresh
    calls = 0

    def failing(reader: LeaseReader) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("out of memory")
        return refresh(reader)

    with home.consumer("t", "c") as consumer:
        monkeypatch.setattr(LeaseReader, "refresh", failing)
        first = consumer.poll()
        assert len(first) == 1
        with pytest.raises(MemoryError):
            consumer.poll()
        second = consumer.poll()
        assert {event.value for event in [*first, *second]} == {b"0", b"1"}


def test_lease_is_kept_after_a_foreign_exception(home: Home) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(lease_ttl_ms=60))
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 1:
            raise RuntimeError("of a driver")

    with beating(home.context, beat) as lost:
        until(lambda: beats > 2)
    assert not lost.is_set()
