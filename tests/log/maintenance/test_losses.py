"""Objects that a catalog has forgotten: a proven loss is refused, a possible one is kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tests.support.child_processes import ROOT
from tests.support.compiled_journals import Press
from tests.support.topic_upkeep import DAY_S, HOUR_MS, WEEK_S, House
from tidelog import Event, Home
from tidelog.catalog.base import Delete, Put
from tidelog.codec.segment import read_known
from tidelog.errors import CorruptError, NotFoundError
from tidelog.home import create_home, open_home
from tidelog.log.late_readers import check_all_read
from tidelog.log.maintenance import sweep as sweep_module
from tidelog.log.maintenance.lost_commits import Losses
from tidelog.log.maintenance.sweep import SweepReport, sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.unused_objects import ObjectUses
from tidelog.model import layout
from tidelog.model.topic import AppenderView, Head, HeldRow, Strays, decode_row, encode_row
from tidelog.settings import load_settings


class Embedded:
    """A home in a folder, whose catalog can be put back to an older copy."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "home"
        self.copy = folder / "copy.sqlite"
        create_home(load_settings(str(self.path), {}, folder))[0].close()
        with self.open() as home:
            home.create_topic("orders")

    def open(self) -> Home:
        return open_home(self.path)

    def append(self, *values: str) -> None:
        """One run for each, all by one producer."""
        with self.open() as home:
            for value in values:
                home.append("orders", [Event(value.encode())])

    def keep_copy(self) -> None:
        shutil.copy(self.path / "catalog.sqlite", self.copy)

    def go_back(self) -> None:
        for path in self.path.glob("catalog.sqlite*"):
            path.unlink()
        shutil.copy(self.copy, self.path / "catalog.sqlite")

    def notes_are_older(self, days: float) -> None:
        """As if the sweep that has noted the strays had run this many days earlier."""
        with self.open() as home:
            where = layout.topic_partition(home.topic("orders").incarnation, 0)
            rows = list(home.catalog.scan(where, "stray/", "stray0"))
            assert rows
            for row in rows:
                noted = decode_row(row.value, Strays, row.row)
                passed_ms = int(days * 24 * HOUR_MS)
                times = noted.kept_ms + passed_ms, noted.seen_ms or noted.at_ms
                older = Strays(noted.at_ms - passed_ms, noted.objects, *times)
                change = Put(row.row, encode_row(older), expect=row.version)
                home.catalog.write(where, change, write_id=home.context.ids.new())

    def segments(self) -> set[Path]:
        return set(self.path.rglob("*.arrow"))

    def sweep(self, accept: bool = False) -> SweepReport:
        with self.open() as home:
            return home.sweep(0, accept_loss=["orders"] if accept else [])


@pytest.fixture
def embedded(tmp_path: Path) -> Embedded:
    return Embedded(tmp_path)


def check_refused(embedded: Embedded, segments: set[Path]) -> None:
    """``verify`` fails, and no sweep deletes anything, however often it runs."""
    with embedded.open() as home:
        report = home.verify("orders")
    assert report.errors == report.proven_losses > 0, report.findings
    errors = [finding.what for finding in report.findings if finding.severity == "error"]
    assert all("the catalog has lost commits" in what for what in errors)
    for _ in range(3):
        swept = embedded.sweep()
        assert [each.topic for each in swept.refused] == ["orders"]
        assert "--accept-loss orders" in str(swept.refused[0].error)
        assert "\n" not in str(swept.refused[0].error)
        assert swept.objects_deleted == 0
    assert embedded.segments() == segments


def test_rolled_back_catalog_is_noticed_and_nothing_is_deleted(embedded: Embedded) -> None:
    embedded.append("a", "b")
    embedded.keep_copy()
    embedded.append("c", "d", "e")
    segments = embedded.segments()
    embedded.go_back()
    check_refused(embedded, segments)
    with embedded.open() as home:  # as docs/operating.md says
        named = {event.value for event in home.read("orders")}
        lost = [pa.ipc.open_file(path.read_bytes()).read_all() for path in segments]
        for table in lost:
            if table["value"][0].as_py() not in named:
                home.append("orders", table)
    assert embedded.sweep(accept=True).objects_deleted == 3
    with embedded.open() as home:
        values = [event.value for event in home.read("orders")]
        assert sorted(values) == [b"a", b"b", b"c", b"d", b"e"]
        assert home.verify("orders").findings == ()


def test_every_object_of_a_topic_with_a_proven_loss_is_an_error(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    before = embedded.segments()
    embedded.append("first lost", "second lost")
    embedded.append("of another producer")
    embedded.go_back()
    with embedded.open() as home:
        report = home.verify("orders")
    lost = {str(path.relative_to(embedded.path / "objects")) for path in embedded.segments()}
    lost -= {str(path.relative_to(embedded.path / "objects")) for path in before}
    found = {each.where: each.what for each in report.findings if each.severity == "error"}
    assert found.keys() == {f"object `{key}`" for key in lost}
    assert (report.proven_losses, report.possible_losses, report.warnings) == (3, 0, 0)
    assert any(what.startswith("was committed at offset 1") for what in found.values()), found


def test_catalog_that_lost_its_write_ahead_log_is_noticed(embedded: Embedded) -> None:
    embedded.append("a")
    with embedded.open() as home:
        for value in (b"b", b"c", b"d"):
            home.append("orders", [Event(value)])
        assert (embedded.path / "catalog.sqlite-wal").stat().st_size > 0
        embedded.keep_copy()  # without the write-ahead log
    segments = embedded.segments()
    embedded.go_back()
    with embedded.open() as home:
        assert len(list(home.read("orders"))) < 4
    check_refused(embedded, segments)


def test_rolled_back_catalog_is_noticed_after_others_went_on(embedded: Embedded) -> None:
    embedded.append("a", "b")
    embedded.keep_copy()
    embedded.append("c", "d", "e")
    embedded.go_back()
    embedded.append("f", "g", "h", "i")  # the same offsets again
    check_refused(embedded, embedded.segments())


def test_accepted_loss_is_remembered_for_these_objects_alone(embedded: Embedded) -> None:
    embedded.append("a")
    embedded.keep_copy()
    embedded.append("b", "c", "d")
    embedded.go_back()
    with embedded.open() as home:
        young = home.sweep("1h", accept_loss=["orders"])
        assert (young.objects_deleted, young.refused) == (0, ())
        report = home.verify("orders")
        assert (report.errors, report.warnings, report.orphans) == (0, 0, 3)
    assert embedded.sweep().objects_deleted == 3
    embedded.keep_copy()
    embedded.append("e", "f", "g")
    embedded.go_back()
    check_refused(embedded, embedded.segments())


def test_only_topics_that_exist_can_be_accepted(embedded: Embedded) -> None:
    with embedded.open() as home, pytest.raises(NotFoundError):
        home.sweep(0, accept_loss=["others"])


def test_last_commit_that_was_lost_is_a_possible_loss(embedded: Embedded) -> None:
    embedded.append("a")
    embedded.keep_copy()
    embedded.append("b")
    segments = embedded.segments()
    embedded.go_back()
    with embedded.open() as home:
        report = home.verify("orders")
        assert (report.errors, report.warnings, report.possible_losses) == (0, 1, 1)
        assert "the catalog has lost this commit" in report.findings[-1].what
    swept = embedded.sweep()
    assert (swept.objects_deleted, swept.objects_doubted, swept.refused) == (0, 1, ())
    assert embedded.segments() == segments


def test_sweep_that_does_not_look_for_losses_deletes_the_only_copy(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "find_losses", lambda *_: Losses())
    monkeypatch.setattr(ObjectUses, "is_settled", lambda *_: True)  # as if no row had to list it
    embedded.append("a")
    embedded.keep_copy()
    embedded.append("b", "c", "d")
    embedded.go_back()
    assert embedded.sweep().objects_deleted == 3


DYING = """
import os, signal, sys
from tidelog import Event
from tidelog.home import open_home
from tidelog.log.producer.append import Appender

Appender.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
open_home(sys.argv[1]).append("orders", [Event(b"never acknowledged")])
"""


def test_orphan_of_a_killed_producer_is_listed_and_deleted_after_a_week(embedded: Embedded) -> None:
    embedded.append("a")
    before = embedded.segments()
    died = subprocess.run([sys.executable, "-c", DYING, embedded.path], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    [orphan] = embedded.segments() - before
    with embedded.open() as home:
        report = home.verify("orders")
        assert (report.errors, report.possible_losses) == (0, 1)
        [finding] = report.findings
        assert orphan.name in finding.where
        assert home.sweep(0).objects_doubted == 1
    days_ago = orphan.stat().st_mtime - 8 * 24 * 3600
    for path in (*before, orphan):  # the date of an object does not count
        os.utime(path, (days_ago, days_ago))
    embedded.append("b", "c")
    embedded.notes_are_older(6.9)
    with embedded.open() as home:
        assert (home.sweep(0).objects_doubted, home.verify("orders").warnings) == (1, 1)
    embedded.notes_are_older(0.2)
    with embedded.open() as home:
        assert home.sweep("1h").objects_deleted == 1
        assert home.verify("orders").findings == ()
    assert not orphan.exists()


def test_segment_carries_what_its_appender_knew(embedded: Embedded) -> None:
    embedded.append("a", "b")
    known = [read_known(path.read_bytes(), "") for path in embedded.segments()]
    first, second = sorted(known, key=lambda each: each[0].next)
    assert first == [AppenderView(0, 1, 0)]
    assert (second[0].next, second[0].base) == (1, 0)
    assert (embedded.path / "objects" / second[0].object) in embedded.segments()


def test_segment_is_a_whole_arrow_file_and_damage_of_what_it_knew_is_noticed(
    embedded: Embedded,
) -> None:
    embedded.append("a")
    [path] = embedded.segments()
    data = path.read_bytes()
    assert pa.ipc.open_file(data).read_all().column("value").to_pylist() == [b"a"]
    at = data.rindex(b"[[0,1,")
    for broken in (data[:at] + b"[[1" + data[at + 3 :], data[:-4], b"", b"ARROW1"):
        with pytest.raises(CorruptError):
            read_known(broken, "")


@pytest.fixture
def house() -> House:
    return House()


def refusal(house: House) -> str:
    """The only refusal of a sweep, which has deleted nothing."""
    before = house.objects()
    report = sweep_home(house.context, 0)
    [refused] = report.refused
    assert (report.objects_deleted, house.objects()) == (0, before)
    return str(refused.error)


@pytest.mark.parametrize("folder", ["segments", "amendments"])
def test_object_above_the_generation_proves_a_loss(house: House, folder: str) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    if folder == "segments":
        key = layout.segment(topic.incarnation, 3, house.ids.new())
    else:
        key = layout.amendment(topic.incarnation, 3, 0, 0, house.ids.new())
    house.store.put(key, b"x")
    for _ in range(5):
        assert "has a generation above" in refusal(house)
    assert verify_topic(house.context, topic).proven_losses == 1
    assert sweep_home(house.context, 0, ["orders"]).refused == ()
    while key in house.objects():  # until the generation has passed it
        assert sweep_home(house.context, 0).refused == ()
    assert house.values(topic) == ["a"]


def test_value_of_an_update_after_a_forgotten_amendment_proves_a_loss(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    house.put(topic, "head", msgspec.structs.replace(house.head(topic), amendments=4))
    for sequence in (3, 4, 5):
        key = layout.amendment(topic.incarnation, 0, 0, sequence, f"{sequence}")
        house.store.put(key, b"x")
    report = verify_topic(house.context, topic)
    assert (report.proven_losses, report.possible_losses, report.orphans) == (3, 0, 3)
    assert "amendment 5" in refusal(house)


def test_journal_above_the_epoch_proves_a_loss() -> None:
    press = Press()
    topic = press.topic()
    press.append(topic, ["a"])
    press.put(topic, layout.COMPILE_ROW, encode_row(HeldRow("", 2)))
    press.store.put(layout.journal(topic.incarnation, 0, 2, 0, "crashed"), b"x")
    press.store.put(layout.journal(topic.incarnation, 0, 3, 0, "lost"), b"x")
    assert "epoch 3" in refusal(press)
    assert verify_topic(press.context, topic).proven_losses == 2


def test_journal_of_the_present_epoch_is_doubted_only_beside_a_proof() -> None:
    press = Press()
    topic = press.topic()
    press.append(topic, ["a"])
    press.put(topic, layout.COMPILE_ROW, encode_row(HeldRow("compiler", 2)))
    press.store.put(layout.journal(topic.incarnation, 0, 2, 0, "under way"), b"x")
    report = verify_topic(press.context, topic)
    assert (report.proven_losses, report.possible_losses) == (0, 0)
    press.store.put(layout.journal(topic.incarnation, 0, 3, 0, "lost"), b"x")
    assert verify_topic(press.context, topic).proven_losses == 2


def test_trimmed_and_compiled_segments_are_no_loss() -> None:
    press = Press()
    topic = press.topic()
    for value in ("a", "b", "c"):
        press.append(topic, [value])
    press.compile(topic)
    press.append(topic, ["d"])
    trim_topic(press.context, topic, ToOffsets({0: 4}))
    press.clock.advance(DAY_S)
    report = verify_topic(press.context, topic)
    assert (report.errors, report.warnings) == (0, 0)
    swept = sweep_home(press.context, HOUR_MS)
    assert (swept.objects_doubted, swept.refused) == (0, ())
    assert press.objects() == set()


@pytest.mark.parametrize("base", [0, 1, 2])
def test_sweep_refuses_a_topic_that_has_lost_a_row(house: House, base: int) -> None:
    topic = house.topic(partitions=2)
    for value in ("a", "b", "c"):
        house.append(topic, [value], 1)
    where = layout.topic_partition(topic.incarnation, 1)
    house.catalog.write(where, Delete(layout.run_row(base)), write_id="lost")
    assert f"`orders/1`: no row holds offsets {base} to {base + 1}" in refusal(house)


def test_sweep_refuses_a_topic_that_has_lost_the_row_of_a_journal() -> None:
    press = Press()
    topic = press.topic()
    press.append(topic, ["a", "b"])
    press.compile(topic)
    press.append(topic, ["c"])
    where = layout.topic_partition(topic.incarnation, 0)
    press.catalog.write(where, Delete(layout.journal_row(0)), write_id="lost")
    assert "no row holds offsets 0 to 2" in refusal(press)


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1, 2]])
@pytest.mark.parametrize("start", [3, 4])
def test_trim_past_lost_rows_leaves_no_slot_rows(house: House, lost: list[int], start: int) -> None:
    topic = house.topic()
    for value in ("a", "b", "c"):
        house.append(topic, [value])
    house.append(topic, ["d", "e"])
    where = layout.topic_partition(topic.incarnation, 0)
    for base in lost:
        house.catalog.write(where, Delete(layout.run_row(base)), write_id=f"lost {base}")
    trim_topic(house.context, topic, ToOffsets({0: start}))
    assert {layout.slot_place(row.row)[1] for row in house.rows(topic, "slot/")} == {3}
    findings = verify_topic(house.context, topic).findings
    assert not [each for each in findings if "slot/" in each.where]


def test_sweep_that_does_not_look_for_gaps_deletes_what_the_lost_row_named(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.log.maintenance.object_references.find_gap", lambda *_: None)
    topic = house.topic()
    for value in ("a", "b", "c"):
        house.append(topic, [value])
    house.append(topic, ["d"])
    house.clock.advance(DAY_S)
    where = layout.topic_partition(topic.incarnation, 0)
    house.catalog.write(where, Delete(layout.run_row(1)), write_id="lost")
    assert sweep_home(house.context, HOUR_MS).objects_doubted == 1
    house.clock.advance(WEEK_S)
    assert sweep_home(house.context, HOUR_MS).objects_deleted == 1


def test_sweep_refuses_a_topic_whose_rows_name_objects_that_are_gone(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    house.append(topic, ["b"])
    house.orphan(topic)
    house.store.delete([house.runs(topic)[0].object])
    assert "which is not there" in refusal(house)


def moves(head: Head) -> Iterator[Head]:
    yield msgspec.structs.replace(head, start=2)
    yield msgspec.structs.replace(head, journaled=2, compiled=1)


@pytest.mark.parametrize("number", [0, 1])
def test_rows_that_go_while_they_are_read_are_no_gap(house: House, number: int) -> None:
    """A trim, or a compile, moves the head and removes rows between two calls of the sweep."""
    topic = house.topic()
    for value in ("a", "b", "c"):
        house.append(topic, [value])
    before = house.head(topic)
    after = list(moves(before))[number]
    where = layout.topic_partition(topic.incarnation, 0)
    read = sweep_module.read_whole
    for base in (0, 1):
        house.catalog.write(where, Delete(layout.run_row(base)), write_id=f"gone-{base}")
    house.put(topic, "head", after)
    if number == 1:
        with pytest.raises(CorruptError, match="offsets 0 to 2"):  # no journal has them
            read(house.context, topic, 0, before)
        return
    head, found = read(house.context, topic, 0, before)
    assert (head.start, len(found.objects)) == (2, 1)


def test_lost_head_is_damage_and_not_a_deleted_topic(house: House) -> None:
    topic = house.topic()
    house.append(topic, ["a"])
    where = layout.topic_partition(topic.incarnation, 0)
    house.catalog.write(where, Delete("head"), write_id="lost")
    assert "has no `head` row" in refusal(house)
    with pytest.raises(CorruptError, match="has no `head` row"):
        check_all_read(house.context, topic)
    assert house.objects()
