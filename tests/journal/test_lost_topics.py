"""A topic whose registry row was lost is made a topic again, with all its events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import tidelog
from tidelog import Event, Home
from tidelog.catalog.base import Delete, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.cli.main import cli
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.home import create_home, open_home
from tidelog.journal.recover import RecoverReport
from tidelog.log.maintenance import incarnations
from tidelog.log.maintenance.incarnations import LostTopic
from tidelog.log.topics import find_topic
from tidelog.model import layout
from tidelog.model.topic import encode_row
from tidelog.settings import load_settings
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog
from tidelog.testing.scheduler import Crash, FakeClock, seeded_ids


class Lost:
    """A home with topic ``late`` of two partitions, which its catalog does not know any more."""

    def __init__(self, folder: Path, row_only: bool = False) -> None:
        self.path = folder / "home"
        self._catalog = self.path / "catalog.sqlite"
        create_home(load_settings(str(self.path), {}, folder))[0].close()
        with self.open() as home:
            home.create_topic("orders")
            home.append("orders", [Event(b"o")])
        saved = self._catalog.read_bytes()
        with self.open() as home:
            self.incarnation = home.create_topic("late", 2, slot="5s").incarnation
            for number in range(6):
                event = Event(b"%d" % number, id=f"id-{number}", timestamp=number * 60_000 + 1_500)
                home.append("late", [event], partition=number % 2)
            home.delete("late", "id-4")
            with home.consumer("late", "c") as consumer:
                consumer.poll(10)
                consumer.commit()
        if row_only:
            with closing(sqlite3.connect(self._catalog)) as file, file:
                file.execute("DELETE FROM rows WHERE row = 'topic/late'")
        else:
            for path in self.path.glob("catalog.sqlite*"):
                path.unlink()
            self._catalog.write_bytes(saved)

    def open(self) -> Home:
        return open_home(self.path)


def values(home: Home, topic: str) -> list[list[bytes | None]]:
    partitions = range(home.topic(topic).partitions)
    return [[event.value for event in home.read(topic, each)] for each in partitions]


def test_topic_that_the_catalog_does_not_know_comes_back_by_the_documented_commands(
    tmp_path: Path,
) -> None:
    lost = Lost(tmp_path)
    run = CliRunner()

    def run_cli(*args: str) -> str:
        result = run.invoke(cli, ["--home", str(lost.path), *args], catch_exceptions=False)
        return f"{result.exit_code} {result.output}"

    command = f"tidelog topic recover NAME --incarnation {lost.incarnation}"
    assert command in run_cli("verify")
    recover = ("topic", "recover", "late", "--incarnation", lost.incarnation, "--json")
    code, _, text = run_cli(*recover, "--dry-run").partition(" ")
    report = json.loads(text)
    assert (code, report["objects"], report["events"], report["appended"]) == ("0", 6, 6, 6)
    assert "late" not in run_cli("topic", "list"), "a dry run changes nothing"
    assert json.loads(run_cli(*recover).partition(" ")[2])["appended"] == 6
    assert run_cli("verify").startswith("0 ")
    assert json.loads(run_cli(*recover).partition(" ")[2])["objects"] == 0, "nothing comes twice"
    with lost.open() as home:
        assert values(home, "late") == [[b"0", b"2", b"4"], [b"1", b"3", b"5"]]
        assert home.sweep(0).refused == ()
        assert home.sweep(0).refused == ()
        assert values(home, "late") == [[b"0", b"2", b"4"], [b"1", b"3", b"5"]]
        assert values(home, "orders") == [[b"o"]]
        home.append("late", [Event(b"new")])
        assert home.verify("late").errors == 0


def test_topic_that_lost_only_its_registry_row_is_as_it_was(tmp_path: Path) -> None:
    lost = Lost(tmp_path, row_only=True)
    with lost.open() as home:
        with pytest.raises(InvalidError, match="another resolution than 1000 ms: give --slot"):
            home.recover_topic("late", incarnation=lost.incarnation)
        dry = home.recover_topic("late", incarnation=lost.incarnation, slot="5s", dry_run=True)
        assert (dry.objects, dry.appended) == (0, 0)
        done = home.recover_topic("late", incarnation=lost.incarnation, slot="5s")
        assert (done.objects, done.appended) == (0, 0)
        assert values(home, "late") == [[b"0", b"2"], [b"1", b"3", b"5"]], "deletes are kept"
        assert [each.cursor for each in home.lag("late")] == [3, 3]
        assert home.verify("late").errors == 0
        assert [event.value for event in home.playback("late", 60_000, 180_000)] == [b"1", b"2"]
        assert home.sweep(0).refused == ()


def test_topic_that_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    lost = Lost(tmp_path)
    with lost.open() as home:
        for wrong, topic, partitions, match in (
            (lost.incarnation, "orders", None, "exists already"),
            (lost.incarnation, "late", 1, "give --partitions 2 or more"),
            ("x", "late", None, "give one that"),
            ("0" * 32, "late", None, "has no events here"),
            (home.topic("orders").incarnation, "late", None, "is topic `orders`"),
        ):
            with pytest.raises((InvalidError, AlreadyExistsError, NotFoundError), match=match):
                home.recover_topic(topic, incarnation=wrong, partitions=partitions)
        with pytest.raises(InvalidError, match="give both or neither"):
            home.recover_topic("orders", partitions=2)
        assert [each.name for each in home.topics()] == ["orders"]
        home.sweep("1h", accept_loss=[lost.incarnation])
        with pytest.raises(InvalidError, match="was deleted"):
            home.recover_topic("late", incarnation=lost.incarnation)


def test_more_partitions_than_the_objects_show_can_be_given(tmp_path: Path) -> None:
    lost = Lost(tmp_path)
    with lost.open() as home:
        home.recover_topic("back", incarnation=lost.incarnation, partitions=4)
        assert home.topic("back").incarnation == lost.incarnation
        assert [len(each) for each in values(home, "back")] == [3, 3, 0, 0]


@pytest.mark.parametrize("call", range(1, 16))
def test_call_that_dies_while_it_makes_the_topic_is_finished_by_the_next(
    tmp_path: Path, call: int
) -> None:
    lost = Lost(tmp_path)
    with lost.open() as home:
        store, faults = MemoryStore(FakeClock()), Faults(crash_after_call=call)
        for info in home.store.list(f"topics/{lost.incarnation}/"):
            store.put(info.key, home.store.get(info.key))
    catalog = MemoryCatalog()
    context = Context(store, catalog, FakeClock(), seeded_ids(1), faults.random)
    died = Context(store, FaultyCatalog(catalog, faults), FakeClock(), seeded_ids(2), faults.random)
    try:
        LostTopic(died, "late", lost.incarnation).register(None, 1_000)
    except Crash:
        LostTopic(context, "late", lost.incarnation).register(None, 1_000)
    found = find_topic(context, "late")
    assert (found.incarnation, found.partitions) == (lost.incarnation, 2)
    assert LostTopic(context, "late", lost.incarnation).is_registered


def test_compiled_events_without_ids_come_back_once(tmp_path: Path) -> None:
    path = tmp_path / "home"
    create_home(load_settings(str(path), {}, tmp_path))[0].close()
    catalog = path / "catalog.sqlite"
    saved = catalog.read_bytes()
    with open_home(path) as home:
        incarnation = home.create_topic("late").incarnation
        for value in (b"a", b"b", b"c"):
            home.append("late", [Event(value)])
        home.compile("late")
        home.append("late", [Event(b"d")])
    for file in path.glob("catalog.sqlite*"):
        file.unlink()
    catalog.write_bytes(saved)
    with open_home(path) as home:
        dry = home.recover_topic("late", incarnation=incarnation, dry_run=True)
        assert (dry.objects, dry.events, dry.appended) == (5, 4, 4)
        assert home.recover_topic("late", incarnation=incarnation).appended == 4
        assert values(home, "late") == [[b"a", b"b", b"c", b"d"]]
        assert home.sweep(0).refused == ()


class LostRows:
    """A home in memory whose catalog loses rows of topic ``late``, which has two partitions."""

    def __init__(self) -> None:
        self.home = tidelog.open("memory:")
        self.incarnation = self.home.create_topic("late", 2).incarnation
        for partition in range(2):
            self.home.append("late", [Event(b"a"), Event(b"b")], partition=partition)

    def lose(self, *heads: int, rows: Sequence[int] = ()) -> None:
        """The registry row, the heads of some partitions, and all rows of others."""
        self._delete(layout.REGISTRY, layout.topic_row("late"))
        for partition in heads:
            self._delete(layout.topic_partition(self.incarnation, partition), "head")
        for partition in rows:
            where = layout.topic_partition(self.incarnation, partition)
            for row in list(self.home.context.catalog.scan(where)):
                self._delete(where, row.row)

    def _delete(self, where: str, row: str) -> None:
        context = self.home.context
        context.catalog.write(where, Delete(row), write_id=context.ids.new())

    def recover(self, name: str = "late", *, dry_run: bool = False) -> RecoverReport:
        return self.home.recover_topic(name, incarnation=self.incarnation, dry_run=dry_run)


def test_topic_whose_floors_are_above_its_objects_can_be_appended_to() -> None:
    lost = LostRows()
    lost.home.compile("late")
    for _ in range(5):
        lost.home.sweep(0)
    lost.lose()
    lost.recover()
    lost.home.append("late", [Event(b"c")], partition=0)
    assert values(lost.home, "late") == [[b"a", b"b", b"c"], [b"a", b"b"]]


def test_recovery_raises_a_generation_that_is_below_a_floor() -> None:
    lost = LostRows()
    for _ in range(5):
        lost.home.sweep(0)
    context, topic = lost.home.context, lost.home.topic("late")
    below = encode_row(msgspec.structs.replace(topic, generation=0))
    change = Put(layout.topic_row("late"), below)
    context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
    lost.home.recover_topic("late")
    lost.home.append("late", [Event(b"c")], partition=0)
    assert lost.home.sweep(0).refused == ()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head", [0, 1])
def test_partition_that_has_rows_and_no_head_is_refused(head: int, compiled: bool) -> None:
    lost = LostRows()
    if compiled:
        lost.home.compile("late")
    lost.lose(head)
    for dry_run in (True, False):
        with pytest.raises(CorruptError, match=rf"`late/{head}`: has no `head` row"):
            lost.recover(dry_run=dry_run)
    assert lost.home.topics() == []


def test_dry_run_counts_what_the_call_then_does() -> None:
    lost = LostRows()
    lost.lose(rows=[1])
    dry = lost.recover(dry_run=True)
    assert (dry.events, dry.appended) == (2, 2)
    assert lost.home.topics() == []
    assert lost.recover().appended == 2
    assert values(lost.home, "late") == [[b"a", b"b"], [b"a", b"b"]]


def test_rows_above_a_partition_that_has_none_are_found() -> None:
    lost = LostRows()
    lost.lose(rows=[0])
    for info in list(lost.home.context.store.list("topics/")):
        lost.home.context.store.delete([info.key])
    lost.recover()
    assert lost.home.topic("late").partitions == 2


def test_incarnation_becomes_one_topic_when_two_names_are_given_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = LostRows()
    lost.lose()
    real = LostTopic._wanted

    def stalls(self: LostTopic, *given: Any) -> Any:
        monkeypatch.undo()
        lost.recover("other")
        return real(self, *given)

    monkeypatch.setattr(LostTopic, "_wanted", stalls)
    with pytest.raises(InvalidError, match="is topic `other`"):
        lost.recover()
    assert [topic.name for topic in lost.home.topics()] == ["other"]
    lost.home.append("other", [Event(b"c")], partition=0)
    assert values(lost.home, "other") == [[b"a", b"b", b"c"], [b"a", b"b"]]


def test_loss_is_not_accepted_of_a_topic_that_is_brought_back_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = LostRows()
    lost.lose()
    real = incarnations.add_name

    def stalls(*given: Any) -> None:
        monkeypatch.undo()
        lost.recover()
        real(*given)

    monkeypatch.setattr(incarnations, "add_name", stalls)
    with pytest.raises(InvalidError, match="was brought back meanwhile"):
        lost.home.sweep(0, accept_loss=[lost.incarnation])
    assert lost.home.sweep(0).refused == ()
    assert values(lost.home, "late") == [[b"a", b"b"], [b"a", b"b"]]
