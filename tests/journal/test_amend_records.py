"""Amendments of several audit records in one call: what one record learns is not the others'."""

from __future__ import annotations

import pytest

from tests.faults.test_amend_faults import amender, append, filled, values
from tests.faults.test_amend_races import context_of
from tests.journal.test_copies import At, copying, ids
from tests.support.compiled_journals import Press
from tidelog.journal import amend


@pytest.fixture(autouse=True)
def _one_event_in_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amend, "_records", lambda marks: ([mark] for mark in marks))


def test_deleted_event_of_a_later_record_stays_deleted() -> None:
    """The first record is looked up again, when the second's event has been deleted."""
    press = Press()
    topic = filled(press, 12, partitions=2)

    def act() -> None:
        press.compile(topic)
        amender(press.context, topic).delete(["0-0"])

    done = amender(context_of(press, 1, "before", act), topic).update(
        {"1-0": b"new", "0-0": b"new"}
    )
    assert done.missing == ("0-0",)
    left = values(press.context, topic)
    assert "0-0" not in left
    assert left["1-0"] == b"new"


@pytest.mark.parametrize("way", ["sink", "playback"])
def test_copy_at_any_moment_of_a_delete_of_several_records_does_not_stay(way: str) -> None:
    for number in range(200):
        press = Press()
        topic = press.topic("t", 2)
        for partition, each in ((0, "w"), (1, "v"), (0, "x")):
            append(press, topic, partition, [each])
        run = copying(press, topic, way)
        faults = At(number, lambda p=press, r=run: r(p.context))  # type: ignore[misc]
        amender(press.faulty(faults), topic).delete(["w", "v", "x"])
        assert "x" not in ids(press.context, topic), number
        if faults.calls <= number:
            return
    pytest.fail("a delete takes more calls than that")
