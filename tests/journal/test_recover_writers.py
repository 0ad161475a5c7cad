"""After a restore named writers send their lost events again; recovery leaves these to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.log.maintenance.test_losses import Embedded
from tidelog import Home
from tidelog.cli.main import cli
from tidelog.codec.segment import read_known
from tidelog.journal.compile_steps import CompilePolicy


class Restored(Embedded):
    """A home with a pump and a named producer, whose catalog goes back before their last runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._source = folder / "in"
        self._source.mkdir()
        with self.open() as home:
            home.create_topic("pumped")
        self._write(2)
        self.run_writers()
        self.keep_copy()
        for count in (4, 6):
            self._write(count)
            self.run_writers()
        self.go_back()

    def _write(self, count: int) -> None:
        lines = "".join(json.dumps({"o": f"i{number}"}) + "\n" for number in range(count))
        (self._source / "a.jsonl").write_text(lines)

    def command(self, *args: str) -> Result:
        return CliRunner().invoke(cli, ["--home", str(self.path), *args])

    def run_writers(self) -> None:
        ids = ("--id-field", "o")
        source = str(self._source / "a.jsonl")
        pump = ("pump", f"file:{self._source}", "--topic", "pumped", "--name", "pp", "--no-spark")
        produce = ("produce", "orders", source, "--name", "np", "--format", "json")
        for args in (pump, produce):
            done = self.command(*args, *ids)
            assert done.exit_code == 0, done.output

    def ids(self, topic: str) -> list[str | None]:
        with self.open() as home:
            found = []
            for partition in range(home.topic(topic).partitions):
                found += [event.id for event in home.read(topic, partition, 0)]
            return sorted(found, key=str)


ALL = [f"i{number}" for number in range(6)]
TOPICS = pytest.mark.parametrize(
    ("topic", "writer"), [("pumped", "pump or restore `pp`"), ("orders", "producer `np`")]
)


@TOPICS
def test_recovery_before_the_writers_leaves_their_events_to_them(
    tmp_path: Path, topic: str, writer: str
) -> None:
    restored = Restored(tmp_path)
    early = restored.command("topic", "recover", topic)
    assert early.exit_code == 1
    assert f"4 lost events of {writer}" in early.output
    assert len(restored.ids(topic)) == 2
    restored.run_writers()
    assert restored.ids(topic) == ALL
    late = restored.command("topic", "recover", topic, "--json")
    assert late.exit_code == 0, late.output
    report = json.loads(late.output)
    assert (report["appended"], report["present"], report["waiting"]) == (0, 4, 0)
    assert restored.ids(topic) == ALL
    with restored.open() as home:
        assert home.verify(topic).errors == 0
        assert topic not in [each.topic for each in home.sweep(0).refused]


def test_one_lost_cycle_of_a_pump_is_proven_until_it_is_recovered(tmp_path: Path) -> None:
    restored = Restored(tmp_path)
    restored.run_writers()
    restored.keep_copy()
    restored._write(8)
    restored.run_writers()
    restored.go_back()
    with restored.open() as home:
        assert home.verify("pumped").proven_losses > 0
        assert "pumped" in [each.topic for each in home.sweep(0).refused]
        assert home.recover_topic("pumped", include=["writers"]).appended == 2
        assert home.recover_topic("pumped", include=["writers"]).appended == 0
        assert home.verify("pumped").proven_losses == 0
    assert len(restored.ids("pumped")) == 8


@TOPICS
def test_recovery_after_the_writers_appends_nothing_twice(
    tmp_path: Path, topic: str, writer: str
) -> None:
    restored = Restored(tmp_path)
    restored.run_writers()
    assert restored.command("topic", "recover", topic).exit_code == 0
    assert restored.ids(topic) == ALL


def test_events_of_a_writer_that_is_not_there_any_more_are_recovered_on_request(
    tmp_path: Path,
) -> None:
    restored = Restored(tmp_path)
    with restored.open() as home:
        waiting = home.recover_topic("orders", dry_run=True)
        assert (waiting.appended, waiting.waiting, waiting.writers) == (0, 4, ["producer `np`"])
        report = home.recover_topic("orders", include=["writers"])
        assert (report.appended, report.waiting, report.writers) == (4, 0, [])
    assert restored.ids("orders") == ALL


@pytest.fixture
def embedded(tmp_path: Path) -> Embedded:
    return Embedded(tmp_path)


def append_named(home: Home, *ids: str) -> None:
    with home.producer("orders", name="np") as producer:
        for sequence, event_id in enumerate(ids):
            producer.send(event_id.encode(), id=event_id, sequence=sequence)


def test_unnamed_events_are_recovered_beside_those_that_wait(embedded: Embedded) -> None:
    embedded.keep_copy()
    with embedded.open() as home:
        append_named(home, "a", "b")
    embedded.append("c")
    embedded.go_back()
    with embedded.open() as home:
        report = home.recover_topic("orders")
        assert (report.appended, report.waiting) == (1, 2)
        append_named(home, "a", "b")
        assert home.recover_topic("orders").waiting == 0
        values = [event.value for event in home.read("orders", 0, 0)]
        assert sorted(value or b"" for value in values) == [b"a", b"b", b"c"]


def test_journal_waits_where_a_named_writer_has_a_row(embedded: Embedded) -> None:
    with embedded.open() as home:
        append_named(home, "a")
    embedded.keep_copy()
    before = embedded.segments()
    with embedded.open() as home:
        append_named(home, "a", "b")
        home.compile("orders", CompilePolicy.everything())
    for path in embedded.segments() - before:
        path.unlink()  # as a sweep does after its grace
    embedded.go_back()
    with embedded.open() as home:
        assert home.recover_topic("orders").waiting >= 1
        assert home.recover_topic("orders", include=["writers"]).appended >= 1


def test_segment_says_which_named_producer_wrote_it(embedded: Embedded) -> None:
    embedded.append("x")
    with embedded.open() as home:
        append_named(home, "a")
    known = [read_known(path.read_bytes(), "") for path in embedded.segments()]
    assert sorted(each.writer for some in known for each in some) == ["", "np"]
