"""Strays: what counts as one, when its week begins, and what proves a loss without any date."""

from __future__ import annotations

import pytest

from tests.log.maintenance.test_lost_commits import Past, go_on
from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.model import layout, limits
from tidelog.model.topic import Strays, Topic, decode_row


@pytest.fixture
def past() -> Past:
    return Past()


def lose_second_commit(past: Past, topic: Topic) -> StoredSegment:
    """One flush to two partitions; the catalog's copy falls between its two commits."""
    appender = past.appender(topic)
    segment = past.shared_segment({0: ["p0"], 1: ["acked"]}, known=appender.known([0, 1]))
    stored = appender.upload(segment)
    appender.commit(stored, segment.pieces[0])
    past.keep()
    appender.commit(stored, segment.pieces[1])
    past.go_back()
    return stored


def noted(past: Past, topic: Topic) -> dict[str, int]:
    rows = [decode_row(row.value, Strays, row.row) for row in past.rows(topic, "stray/")]
    return {key: row.at_ms for row in rows for key in row.objects}


def test_segment_that_one_partition_names_may_be_lost_in_another(past: Past) -> None:
    topic = past.topic(partitions=2)
    stored = lose_second_commit(past, topic)
    report = verify_topic(past.context, topic)
    assert (report.errors, report.warnings, report.possible_losses, report.orphans) == (0, 1, 1, 0)
    assert "not every partition names it" in report.findings[-1].what
    assert sweep_home(past.context, 0).objects_doubted == 1
    past.compile(topic)  # partition 0 needs it no more
    for day in range(7):
        assert sweep_home(past.context, HOUR_MS if day else 0).objects_doubted == 1
        assert verify_topic(past.context, topic).possible_losses == 1
        assert stored.key in past.objects()
        past.clock.advance(DAY_S)
    assert sweep_home(past.context, HOUR_MS).objects_deleted == 1
    assert stored.key not in past.objects()


def test_accepted_loss_of_one_partition_leaves_the_other_its_events(past: Past) -> None:
    topic = past.topic(partitions=2)
    stored = lose_second_commit(past, topic)
    assert sweep_home(past.context, 0, ["orders"]).objects_deleted == 0
    assert past.values(topic) == ["p0"]
    assert verify_topic(past.context, topic).findings == ()
    past.compile(topic)
    sweep_home(past.context, 0)
    assert stored.key not in past.objects()


def test_flush_under_way_is_not_a_loss(past: Past) -> None:
    topic = past.topic(partitions=2)
    appender = past.appender(topic)
    segment = past.shared_segment({0: ["p0"], 1: ["p1"]}, known=appender.known([0, 1]))
    stored = appender.upload(segment)
    appender.commit(stored, segment.pieces[0])
    past.append(topic, ["another"], 1)
    assert sweep_home(past.context, HOUR_MS).objects_doubted == 0
    _, moved = appender.commit(stored, segment.pieces[1])
    assert moved.key != stored.key
    assert (sweep_home(past.context, 0).objects_doubted, noted(past, topic)) == (0, {})
    assert verify_topic(past.context, topic).findings == ()


def test_week_of_a_stray_begins_when_a_sweep_has_noted_it(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a")
    past.keep()
    [lost] = past.append_each(topic, "lost")
    past.clock.advance(3 * WEEK_S)
    past.go_back()
    assert sweep_home(past.context, HOUR_MS).objects_doubted == 1
    assert noted(past, topic) == {lost: past.clock.now_ms()}
    past.clock.advance(WEEK_S - 1)
    assert sweep_home(past.context, HOUR_MS).objects_doubted == 1
    assert lost in past.objects()
    past.clock.advance(1)
    assert sweep_home(past.context, HOUR_MS).objects_deleted == 1
    assert lost not in past.objects()
    sweep_home(past.context, HOUR_MS)
    assert noted(past, topic) == {}


def test_notes_of_objects_that_are_no_strays_any_more_go(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STRAYS_AT_ONCE", 2)
    topic = past.topic()
    strays = sorted(past.orphan(topic).key for _ in range(5))
    sweep_home(past.context, 0)
    assert len(past.rows(topic, "stray/")) == 3
    since = noted(past, topic)
    assert sorted(since) == strays
    past.clock.advance(60)
    past.store.delete(strays[:3])
    sweep_home(past.context, 0)
    assert noted(past, topic) == {key: since[key] for key in strays[3:]}
    sweep_home(past.context, 0, ["orders"])
    sweep_home(past.context, 0)
    assert past.rows(topic, "stray/") == []


def test_note_of_a_date_that_is_to_come_is_replaced(past: Past) -> None:
    topic = past.topic()
    stray = past.orphan(topic)
    past.clock.jump(365 * DAY_S)
    sweep_home(past.context, 0)
    past.clock.jump(-365 * DAY_S)
    sweep_home(past.context, HOUR_MS)
    past.clock.advance(WEEK_S)
    sweep_home(past.context, HOUR_MS)
    assert stray.key not in past.objects()


@pytest.mark.parametrize("apart_s", [-DAY_S, 0, DAY_S])
def test_lost_commits_prove_themselves_whatever_their_dates_are(past: Past, apart_s: int) -> None:
    topic = past.topic()
    past.append_each(topic, "a")
    past.keep()
    first = past.append_each(topic, "lost")
    past.clock.jump(apart_s)
    second = past.append_each(topic, "lost too")
    past.clock.jump(-apart_s)
    past.go_back()
    go_on(past, topic)
    past.check_kept(topic, first | second, is_proven=True)


def test_journal_beyond_the_next_offset_proves_a_loss(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    past.compile(topic)
    past.keep()
    past.append_each(topic, "c", "d")
    past.compile(topic)
    sweep_home(past.context, 0)  # deletes what was compiled: the journal has the only copy
    past.go_back()
    for _ in range(3):  # epochs catch up
        past.append(topic, ["x"])
        past.compile(topic)
        trim_topic(past.context, topic, ToOffsets({0: past.head(topic).next}))
    key = layout.journal(topic.incarnation, 0, 0, past.head(topic).next, "work", "id")
    past.store.put(key, b"compiled of runs that the catalog has lost")
    report = sweep_home(past.context, 0)
    assert [each.topic for each in report.refused] == ["orders"]
    assert key in past.objects()


@pytest.mark.parametrize("behind", ["rows", "object"])
def test_first_sweep_whose_clock_is_behind_does_not_shorten_the_week(
    past: Past, behind: str
) -> None:
    topic = past.topic()
    past.append(topic, ["kept"])
    if behind == "object":
        past.clock.advance(2 * DAY_S)
    appender = past.appender(topic)
    segment = past.shared_segment({0: ["lost"]}, known=appender.known([0]))
    stored = appender.upload(segment)  # whose commit the catalog has lost
    if behind == "rows":
        past.clock.advance(2 * DAY_S)
        past.append(topic, ["later"])
    past.clock.jump(-8 * DAY_S)  # after a boot, in a folder
    assert sweep_home(past.context, 0).objects_doubted == 1
    past.clock.jump(8 * DAY_S)
    for _ in range(7):
        assert sweep_home(past.context, 0).objects_doubted == 1
        assert stored.key in past.objects()
        past.clock.advance(DAY_S)
    assert sweep_home(past.context, 0).objects_deleted == 1
