"""Trim, compile, sweep and verify together on files, as a user's home has them."""

from __future__ import annotations

from pathlib import Path

from tests.support.compiled_journals import Press, amend_by_hand
from tests.support.homes import a_catalog, a_store
from tidelog.clock import SystemClock
from tidelog.context import Context
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import BeforeTime, ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.topics import delete_topic


def test_a_topic_with_many_amendments_is_compiled_trimmed_and_swept(tmp_path: Path) -> None:
    press = Press()
    catalog = a_catalog(f"sqlite:{tmp_path}/catalog.sqlite", create=True)
    press.store, press.catalog = a_store(str(tmp_path / "objects")), catalog
    press.context = Context(press.store, catalog, SystemClock(), press.ids, press.context.random)
    topic = press.topic()
    for number in range(20):
        press.append(topic, [f"{number}-{n}" for n in range(20)], at_ms=1_000 * number)
    expected = press.events(topic)
    changes: dict[int, tuple[bytes | None] | None] = dict.fromkeys(range(300), (b"new",))
    changes |= dict.fromkeys(range(5, 400, 7))
    amend_by_hand(press.context, topic, 0, changes)
    expected |= {n: "new" for n, value in changes.items() if value is not None}
    expected = {n: v for n, v in expected.items() if changes.get(n, ()) is not None}
    assert press.events(topic) == expected
    trim_topic(press.context, topic, ToOffsets({0: 150}))
    expected = {n: v for n, v in expected.items() if n >= 150}
    kept = len([n for n in changes if n >= 140])  # those of the run at the start stay with it
    assert len(press.rows(topic, "amend/")) == kept
    press.compile(topic, CompilePolicy(min_events=1, min_amendments=1, max_events=60))
    assert press.events(topic) == expected
    report = sweep_home(press.context, 0)
    assert report.amendments_removed == kept
    assert press.head(topic).amended is None
    assert press.events(topic) == expected
    assert trim_topic(press.context, topic, BeforeTime(13_000))[0].new_start > 150
    sweep_home(press.context, 0)
    found = verify_topic(press.context, topic)
    assert (found.findings, found.orphans) == ((), 0)
    delete_topic(press.context, "orders")
    assert press.objects() == set()
    catalog.close()
