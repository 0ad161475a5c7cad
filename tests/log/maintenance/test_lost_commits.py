"""A catalog that went back: no sweep deletes an acknowledged event, no matter what follows.

Each test loses commits in another way, lets producers, compiles, trims and amendments go on, and
looks at the objects of what was acknowledged before.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.child_processes import ROOT
from tests.support.compiled_journals import Between, Press
from tests.support.topic_upkeep import DAY_S, HOUR_MS
from tidelog import Event, Home
from tidelog.home import create_home, open_home
from tidelog.journal.amendment_writer import AmendmentChange, AmendmentWriter
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.topic import LossAccepted, Topic, decode_row
from tidelog.settings import load_settings

WEEK_S = 7 * DAY_S
LARGE = b"large " * 3_000


class Past(Press):
    """A house whose catalog can be put back to a copy."""

    def keep(self) -> None:
        self._kept = copy.deepcopy(self.catalog._partitions)

    def go_back(self) -> None:
        self.catalog._partitions = copy.deepcopy(self._kept)

    def append_each(self, topic: Topic, *values: str) -> set[str]:
        """One-shot producers, one after another; the objects that they have stored."""
        before = self.objects()
        for value in values:
            self.append(topic, [value])
            self.clock.advance(1)
        return self.objects() - before

    def check_kept(self, topic: Topic, lost: set[str], is_proven: bool) -> None:
        """``verify`` names each lost object, and sweeps keep all, with any grace."""
        for grace_ms in (HOUR_MS, 0, 0):
            report = sweep_home(self.context, grace_ms)
            assert lost <= self.objects(), "a sweep deleted acknowledged events"
            assert [each.topic for each in report.refused] == ["orders"] * is_proven
            if not is_proven and not grace_ms:
                assert report.objects_doubted == len(lost)
            self.clock.advance(3600)
        found = verify_topic(self.context, topic)
        assert bool(found.proven_losses) == bool(found.errors) == is_proven, found.findings
        named = [each.where for each in found.findings if each.severity != "note"]
        assert {f"object `{key}`" for key in lost} <= set(named)


@pytest.fixture
def past() -> Past:
    return Past()


def go_on(past: Past, topic: Topic) -> None:
    """Others take the same offsets; then all is compiled, and some trimmed."""
    past.append_each(topic, "f", "g", "h", "i")
    past.compile(topic)
    past.append_each(topic, "j", "k")
    trim_topic(past.context, topic, ToOffsets({0: 7}))
    past.clock.advance(DAY_S)
    past.append_each(topic, "l")


@pytest.mark.parametrize("lost", [2, 3, 8])
def test_lost_commits_prove_themselves_after_compile_and_trim(past: Past, lost: int) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    past.keep()
    objects = past.append_each(topic, *(f"lost {number}" for number in range(lost)))
    past.go_back()
    go_on(past, topic)
    past.check_kept(topic, objects, is_proven=True)


def test_one_lost_commit_is_kept_for_a_week_in_a_busy_topic(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    past.keep()
    objects = past.append_each(topic, "lost")
    past.go_back()
    for _ in range(3):
        go_on(past, topic)
        past.check_kept(topic, objects, is_proven=False)
    past.clock.advance(WEEK_S)
    assert sweep_home(past.context, HOUR_MS).objects_doubted == 0
    assert not objects & past.objects()


def test_first_segments_of_many_producers_prove_a_loss(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a")
    past.keep()
    appenders = [past.appender(topic) for _ in range(3)]
    before = past.objects()
    for appender in appenders:
        segment = past.shared_segment({0: ["lost"]}, known=appender.known([0]))
        appender.commit(appender.upload(segment), segment.pieces[0])
        past.clock.advance(1)
    objects = past.objects() - before
    past.go_back()
    go_on(past, topic)
    past.check_kept(topic, objects, is_proven=True)


def test_every_stray_is_read_however_many_there_are(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a")
    for _ in range(400):
        past.orphan(topic)
    past.keep()
    past.append_each(topic, "lost", "lost too")
    past.go_back()
    go_on(past, topic)
    [refused] = sweep_home(past.context, HOUR_MS).refused
    assert "objects that show it: 1)" in str(refused.error)
    assert verify_topic(past.context, topic).proven_losses == 402  # each of them may be one


def test_lost_value_of_an_update_is_kept_when_others_are_amended_since(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b", "c")
    past.keep()
    seen = read_head(past.context, topic, 0)
    writer = AmendmentWriter(past.context, topic, 0, seen, "audit", past.clock.now_ms())
    writer.put([AmendmentChange("id", 0, 1, "update", LARGE)])
    [value] = [key for key in past.objects() if "/amendments/" in key]
    past.go_back()
    for offset in (0, 1, 2):
        past.amend(topic, offset, b"later")
    go_on(past, topic)
    past.check_kept(topic, {value}, is_proven=False)


def test_journal_is_kept_when_the_catalog_forgot_it_and_its_sources_are_deleted(
    past: Past,
) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    trim_topic(past.context, topic, ToOffsets({0: 2}))
    past.keep()
    past.append_each(topic, "lost", "lost too")
    past.compile(topic)
    assert sweep_home(past.context, 0).objects_deleted == 4
    [journal] = past.objects()
    past.go_back()
    for _ in range(3):  # until the epoch of the compiler is above that of the journal
        past.append_each(topic, "c")
        past.compile(topic)
    past.clock.advance(DAY_S)
    past.append_each(topic, "d")
    past.check_kept(topic, {journal}, is_proven=True)


@pytest.mark.parametrize("more", [1, 3, 5])
def test_journal_proves_a_loss_no_matter_what_is_appended_and_compiled_since(
    past: Past, more: int
) -> None:
    """Its epoch and its first offset are below those of the catalog soon: it has other events."""
    topic = past.topic()
    past.append_each(topic, "a", "b")
    past.compile(topic)
    sweep_home(past.context, 0)
    past.keep()
    kept = past.objects()
    past.append_each(topic, "lost", "lost too", "lost as well")
    past.compile(topic)
    sweep_home(past.context, 0)
    lost = past.objects() - kept
    past.go_back()
    for number in range(more):
        past.append_each(topic, f"new {number}")
        past.compile(topic)
    past.check_kept(topic, lost, is_proven=True)
    past.clock.advance(2 * WEEK_S)
    past.check_kept(topic, lost, is_proven=True)


def test_journals_of_a_compile_that_died_are_no_loss_and_go(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    Between(past, topic)
    found = verify_topic(past.context, topic)
    assert (found.warnings, found.orphans) == (0, 1)
    report = sweep_home(past.context, 0)
    assert (report.objects_deleted, report.objects_doubted) == (1, 0)
    assert sweep_home(past.context, 0).objects_seen == 2
    assert past.rows(topic, "unused/") == []


def test_segment_is_kept_when_the_row_of_one_partition_is_lost(past: Past) -> None:
    topic = past.topic(partitions=3)
    appender = past.appender(topic)
    segment = past.shared_segment({0: ["p0"], 2: ["p2"]}, known=appender.known([0, 2]))
    stored = appender.upload(segment)
    appender.commit(stored, segment.pieces[0])
    past.keep()
    appender.commit(stored, segment.pieces[1])
    past.go_back()
    for partition in range(3):
        for value in ("later", "and later"):
            past.append(topic, [value], partition)
    past.compile(topic)
    trim_topic(past.context, topic, ToOffsets({0: 3, 1: 2, 2: 2}))
    past.clock.advance(DAY_S)
    past.append(topic, ["last"])
    past.check_kept(topic, {stored.key}, is_proven=False)


def test_segment_stored_twice_is_deleted_once_no_partition_needs_its_copy(
    past: Past,
) -> None:
    """A sweep passes the generation between the commits of two partitions."""
    topic = past.topic(partitions=2)
    appender = past.appender(topic)
    segment = past.shared_segment({0: ["p0"], 1: ["p1"]}, known=appender.known([0, 1]))
    first = appender.upload(segment)
    appender.commit(first, segment.pieces[0])
    sweep_home(past.context, 0)
    _, second = appender.commit(first, segment.pieces[1])
    assert second.key != first.key
    trim_topic(past.context, topic, ToOffsets({0: 1}))
    report = sweep_home(past.context, 0)
    assert (report.objects_deleted, report.objects_doubted) == (1, 0)
    assert past.values(topic, 1) == ["p1"]
    trim_topic(past.context, topic, ToOffsets({1: 1}))
    sweep_home(past.context, 0)
    assert past.objects() == set()
    sweep_home(past.context, 0)
    assert past.rows(topic, "unused/") == past.rows(topic, "unused/", 1) == []


def test_value_that_a_newer_amendment_replaces_is_deleted_by_the_next_sweep(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a", "b")
    for kind in ("update", "delete"):
        seen = read_head(past.context, topic, 0)
        writer = AmendmentWriter(past.context, topic, 0, seen, "audit", past.clock.now_ms())
        value = None if kind == "delete" else LARGE
        writer.put([AmendmentChange("id", 0, 1, kind, value)])
    report = sweep_home(past.context, 0)
    assert (report.objects_deleted, report.objects_doubted) == (1, 0)


def test_accepted_loss_ends_at_the_present_time_of_the_store(past: Past) -> None:
    topic = past.topic()
    past.append_each(topic, "a")
    past.clock.jump(DAY_S)
    past.orphan(topic)  # by a store whose clock was ahead
    past.clock.jump(-DAY_S)
    sweep_home(past.context, 0, ["orders"])
    [row] = past.rows(topic, layout.ACCEPTED_ROW)
    assert decode_row(row.value, LossAccepted, "").until_ms <= past.clock.now_ms()
    past.clock.advance(1)
    past.keep()
    objects = past.append_each(topic, "lost", "lost too", "lost three")
    past.go_back()
    go_on(past, topic)
    for grace_ms in (HOUR_MS, 0):
        assert sweep_home(past.context, grace_ms).refused
    assert objects <= past.objects()


PRODUCING = """
import os, signal, sys
from tidelog import Event
from tidelog.home import open_home

home = open_home(sys.argv[1])
for number in range(4):
    home.append("orders", [Event(b"lost")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def produce_once(path: Path, *values: bytes) -> None:
    for value in values:
        with open_home(path) as home:
            home.append("orders", [Event(value)])


def compile_all(home: Home) -> None:
    compile_topic(home.context, home.topic("orders"), CompilePolicy.everything())


def trim_some(home: Home) -> None:
    home.trim("orders", ToOffsets({0: 5}))


@pytest.mark.parametrize("acts", [(), (compile_all,), (compile_all, trim_some)])
def test_catalog_of_a_killed_process_without_its_write_ahead_log(
    tmp_path: Path, acts: tuple[Callable[[Home], None], ...]
) -> None:
    path = tmp_path / "home"
    create_home(load_settings(str(path), {}, tmp_path))[0].close()
    with open_home(path) as home:
        home.create_topic("orders")
    produce_once(path, b"a", b"b")
    before = set(path.rglob("*.arrow"))
    died = subprocess.run([sys.executable, "-c", PRODUCING, path], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    lost = set(path.rglob("*.arrow")) - before
    assert len(lost) == 4
    for ending in ("-wal", "-shm"):
        (path / f"catalog.sqlite{ending}").unlink()
    produce_once(path, b"c", b"d", b"e", b"f", b"g")
    with open_home(path) as home:
        for act in acts:
            act(home)
        for grace in ("1h", 0, 0):
            report: SweepReport = home.sweep(grace)
            assert [each.topic for each in report.refused] == ["orders"]
        assert home.verify("orders").proven_losses > 0
    assert all(each.exists() for each in lost)
