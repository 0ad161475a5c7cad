"""What a topic was trimmed of does not come back by a recovery."""

from __future__ import annotations

import pytest

from tests.support.compiled_journals import Death, Press
from tests.support.topic_upkeep import DAY_S, HOUR_MS
from tidelog.catalog.memory import MemoryCatalog
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.topics import find_topic
from tidelog.model.topic import Topic
from tidelog.testing.scheduler import Crash


def recover(press: Press, *, dry_run: bool = False) -> RecoverReport:
    topic = find_topic(press.context, "orders")
    return recover_topic(press.context, Lookup(press.context, topic), dry_run=dry_run)


def sweep(press: Press, times: int = 2) -> None:
    for _ in range(times):
        press.clock.advance(DAY_S)
        assert not sweep_home(press.context, HOUR_MS).refused


def with_dead_compile(calls: int) -> tuple[Press, Topic, bool]:
    """Events 0 to 5 in three runs, and a compile of them that dies after some calls."""
    press = Press()
    topic = press.topic()
    for first in (0, 2, 4):
        press.append(topic, [str(first), str(first + 1)])
    died = False
    try:
        press.compile(topic, context=press.faulty(Death(calls)))
    except Crash:
        died = True
    return press, topic, died


@pytest.mark.parametrize("start", [2, 3, 6])
def test_trimmed_events_of_a_dead_compile_stay_away(start: int) -> None:
    left = 0
    for calls in range(200):
        press, topic, died = with_dead_compile(calls)
        trim_topic(press.context, topic, ToOffsets({0: start}))
        sweep(press)  # the segments of what was trimmed go
        expected = [str(offset) for offset in range(start, 6)]
        report = recover(press, dry_run=True)
        assert report.appended == 0, calls
        left = max(left, report.trimmed)
        assert recover(press).appended == 0, calls
        assert press.values(topic) == expected
        sweep(press, 10)
        assert press.values(topic) == expected
        assert recover(press).trimmed == 0, "a sweep deletes the journal a week after its note"
        if not died:
            assert left >= 2, "some compile died with a journal that holds them"
            return
    raise AssertionError("the compile never ended")


def test_journal_of_a_lost_compile_is_recovered_though_its_offsets_were_trimmed_since() -> None:
    """Without the plan of its compile nothing says that its events are those of the trim."""
    press = Press()
    topic = press.topic()
    catalog = press.catalog
    assert isinstance(catalog, MemoryCatalog)
    before = {name: dict(rows) for name, rows in catalog._partitions.items()}
    press.append(topic, ["lost 0", "lost 1"])
    press.compile(topic)
    for info in list(press.store.list()):
        if info.key.endswith(".arrow"):
            press.store.delete([info.key])  # as a sweep has, before the loss
    catalog._partitions = before
    press.append(topic, ["other 0", "other 1", "other 2"])
    trim_topic(press.context, topic, ToOffsets({0: 2}))
    report = recover(press)
    assert (report.appended, report.trimmed) == (2, 0)
    assert press.values(topic) == ["other 2", "lost 0", "lost 1"]
    assert recover(press).appended == 0
