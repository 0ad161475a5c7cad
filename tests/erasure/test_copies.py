"""A proof finds copies that were made long ago, renamed, or of a source that others read too."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidelog
from tests.archive.test_names import Shell
from tidelog import Event, Home, Proof
from tidelog.catalog.base import Delete, Put
from tidelog.connectors.by_url import store_at
from tidelog.coordination.audit import (
    ACTIONS_KEPT_MS,
    Action,
    AuditRecord,
    put_record,
    record_action,
)
from tidelog.erasure.topic_copies import (
    Originals,
    find_copies,
    may_be_same,
    originals_of_topic,
    source_of_url,
)
from tidelog.errors import InvalidError, TidelogError
from tidelog.model import layout
from tidelog.model.address import recorded_name
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.times import moment_ms
from tidelog.model.topic import decode_row, encode_row
from tidelog.testing.scheduler import FakeClock


def failing(event: Event) -> None:
    raise ValueError("refused")


FAILING = {"on_error": "dead-letter", "retries": 0, "until_caught_up": True}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    for name in ("t", "copy", "letters"):
        shell.made.create_topic(name, 1)
    return shell


def let_time_pass(home: Home) -> None:
    """Dates all records of the home's audit more than the time back that they are kept."""
    context = home.context
    for row in list(context.catalog.scan(layout.HOME_AUDIT)):
        action = decode_row(row.value, Action, "action")
        old = msgspec.structs.replace(action, at_ms=action.at_ms - ACTIONS_KEPT_MS - 86_400_000)
        put = Put(layout.audit_row(old.at_ms, old.id), encode_row(old))
        for change in (put, Delete(row.row)):
            context.catalog.write(layout.HOME_AUDIT, change, write_id=context.ids.new())


def listed(home: Home, topic: str = "t") -> list[str]:
    """What a clean proof says it has not searched."""
    proof = home.erase(topic, ids=["gone"])
    assert proof.is_clean, proof.traces
    return proof.out_of_reach


def test_copies_that_only_the_audit_records_are_found_for_good(shell: Shell) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.playback("t", "earliest", "latest", to="topic:copy")
    for _ in range(2):
        with home.consumer("t", "c") as consumer:
            consumer.run(failing, dead_letter="letters", **FAILING)  # type: ignore[arg-type]
        home.consumers("t").get("c").seek("earliest")
    let_time_pass(home)
    record_action(home.context, "login", "x")
    home.sweep()
    left = [(each.op, each.note.rpartition(", to ")[2]) for each in home.actions()]
    assert left == [("playback", "topic:copy"), ("dead letters", "topic:letters"), ("login", "")]
    found = [each.copy.partition(" (")[0] for each in home.erase("t", ids=["gone"]).traces]
    assert set(found) == {"topic `copy`", "topic `letters`"}


def test_deletes_of_an_earlier_event_do_not_hide_a_copy(shell: Shell) -> None:
    home = shell.made
    home.append("copy", [Event(b"trial", id="gone", key=b"k")])
    assert home.erase("copy", ids=["gone"]).is_clean
    home.append("t", [Event(b"1", id="gone", key=b"k")])
    home.archives.create("a", source="topic:copy")
    home.pumps.create("p", source="topic:t", topic="copy").run()
    home.archives.get("a").run()
    assert [each.value for each in home.read("copy")] == [b"1"]
    found = {each.what for each in home.erase("t", ids=["gone"]).traces}
    assert found == {"holds offset 1 of partition 0: readers still see it", "holds 1 of them"}
    home.erase("copy", ids=["gone"])
    assert home.prove_erased("t", ids=["gone"]).is_clean
    late = Event(b"2", id="gone", timestamp=1_700_000_000_000)
    home.append("copy", [late])  # by a producer, which brings new events
    home.sweep(0)
    assert home.prove_erased("t", ids=["gone"]).is_clean


def test_proof_lists_copies_with_other_ids_or_keys(shell: Shell) -> None:
    home = shell.made
    for name in ("further", "same"):
        home.create_topic(name, 1)
    value = json.dumps({"order": "o-1", "user": "u-7"}).encode()
    home.append("t", [Event(value, id="gone", key=b"k")])
    home.pumps.create("p", source="topic:t", topic="copy", id_field="order", key_field="user").run()
    home.pumps.create("q", source="topic:copy", topic="further").run()
    home.pumps.create("r", source="topic:t", topic="same", type_field="user").run()
    assert [each.id for each in home.read("further")] == ["o-1"]
    assert home.erase("same", ids=["gone"]).is_clean
    said = listed(home)
    assert [each.partition(":")[0] for each in said] == ["topic `copy`", "topic `further`"]
    assert all("with other ids: was searched only for the ids of the orig" in each for each in said)
    for name in ("p", "q"):
        home.pumps.get(name).delete()
    assert [each.partition(":")[0] for each in listed(home)] == ["topic `copy`", "topic `further`"]
    proof = home.erase("t", key=b"k")
    assert ["with other keys" in each for each in proof.out_of_reach] == [True, True]


HOUR_MS = 3_600_000


def due_event(home: Home) -> Event:
    """An event whose value names a time that is ahead."""
    due_ms = home.context.clock.now_ms() + HOUR_MS
    return Event(json.dumps({"due": due_ms}).encode(), id="gone", key=b"k")


def after_that_time(home: Home) -> None:
    """Lets the time pass at which such an event is due."""
    clock = FakeClock(home.context.clock.now_ms() + 2 * HOUR_MS)
    home.context = dataclasses.replace(home.context, clock=clock)


def left_in(proof: Proof) -> set[tuple[str, str]]:
    """Which copies still hold events, and in which folders."""
    return {(each.copy.partition("` (")[0], each.object.partition("/")[0]) for each in proof.traces}


@pytest.mark.parametrize("is_deleted", [False, True])
def test_events_to_which_a_pump_gave_other_times_are_not_new(
    shell: Shell, is_deleted: bool
) -> None:
    home = shell.made
    home.create_topic("further", 1)
    home.append("t", [due_event(home)])
    home.pumps.create("p", source="topic:t", topic="copy", time_field="due").run()
    home.pumps.create("q", source="topic:copy", topic="further").run()
    home.archives.create("a", source="topic:further", format="jsonlines").run()
    if is_deleted:  # then the home's audit says it
        home.pumps.get("p").delete()
        home.pumps.get("q").delete()
    home.erase("t", ids=["gone"])
    after_that_time(home)
    for wanted in ({"ids": ["gone"]}, {"keys": [b"k"]}):
        assert left_in(home.prove_erased("t", **wanted)) == {  # type: ignore[arg-type]
            ("topic `copy", "topics"),
            ("topic `further", "topics"),
            ("topic `further", "archives"),
        }
    for name in ("copy", "further"):
        home.erase(name, ids=["gone"])
    proof = home.prove_erased("t", ids=["gone"])
    assert (proof.verdict, proof.out_of_reach) == ("erased", [])


def test_proof_for_an_archive_finds_copies_with_other_times(shell: Shell, tmp_path: Path) -> None:
    home, source = shell.made, tmp_path / "in"
    source.mkdir()
    event = due_event(home)
    columns = {"value": [event.value], "id": [event.id], "key": [event.key]}
    pq.write_table(pa.table(columns), source / "a.parquet")
    os.utime(source / "a.parquet", (1_700_000_000, 1_700_000_000))
    archive = home.archives.create("a", source=f"file:{source}")
    archive.run()
    home.pumps.create("p", source="archive:a", topic="copy", time_field="due").run()
    archive.erase(key=b"k")
    after_that_time(home)
    proof = home.archives.get("a").prove_erased(keys=[b"k"])
    assert left_in(proof) == {("topic `copy", "topics")}


def test_new_events_of_a_copy_with_other_times_are_listed(shell: Shell) -> None:
    home = shell.made
    home.append("t", [due_event(home)])
    home.pumps.create("p", source="topic:t", topic="copy", time_field="due").run()
    home.erase("t", ids=["gone"])
    home.erase("copy", ids=["gone"])
    late = home.context.clock.now_ms() + 2 * HOUR_MS
    home.append("copy", [Event(b"new", id="gone", timestamp=late)])
    after_that_time(home)
    home.context.clock.sleep(HOUR_MS / 1000)
    proof = home.prove_erased("t", ids=["gone"])
    assert proof.verdict == "erased"
    (said,) = proof.out_of_reach
    assert "hold 1 event with these ids or keys and later times than the delete there" in said
    # One that came before the original was deleted is not new by its time alone.
    home.create_topic("u", 1)
    home.create_topic("of-u", 1)
    home.append("of-u", [Event(b"trial", id="gone")])
    home.erase("of-u", ids=["gone"])
    home.append("u", [due_event(home)])
    home.pumps.create("u", source="topic:u", topic="of-u", time_field="due").run()
    home.context.clock.sleep(1)
    home.erase("u", ids=["gone"])
    home.context.clock.sleep(2 * HOUR_MS / 1000)
    assert left_in(home.prove_erased("u", ids=["gone"])) == {("topic `of-u", "topics")}


def test_transforms_and_systems_outside_may_change_times(shell: Shell) -> None:
    home = shell.made
    home.append("t", [due_event(home)])
    made = NamedPipeline("p", "i", "topic:t", "topic:copy", "c", 0, transform="m:f")
    assert "time" in made.renames
    home.playback("t", "earliest", "latest", to=f"file:{shell.home}.jsonl")
    home.pumps.create("p", source=f"file:{shell.home}.jsonl", topic="copy").run()
    found = find_copies(home.context, originals_of_topic(home.context, home.topic("t")))
    assert [(each.topic.name, each.is_retimed) for each in found.topics] == [("copy", True)]


def test_proof_lists_files_that_playbacks_without_a_name_wrote(
    shell: Shell, tmp_path: Path
) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/a.jsonl")
    home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/b.jsonl", name="b")
    assert len(listed(home)) == 2
    shell("playback", "--forget", "b")
    assert sorted(each.partition("`: ")[0] for each in listed(home)) == [
        f"`file:{tmp_path}/a.jsonl",
        f"`file:{tmp_path}/b.jsonl",
    ]


def test_dead_letters_of_the_same_source_outside_are_listed_or_searched(
    shell: Shell, tmp_path: Path
) -> None:
    home = shell.made
    home.create_topic("from", 1)
    home.append("from", [Event(json.dumps({"order": "gone"}).encode(), id="gone", key=b"k")])
    home.archives.create("first", source="topic:from").run()
    (folder,) = Path(shell.home).rglob("archives/first/g1")
    shutil.copytree(folder, tmp_path / "in")
    shell("archive", "delete", "first", "--delete-files", "--yes")
    home.delete_topic("from", past_readers=True)
    source = f"file:{tmp_path}/in"
    home.stream(source).run(failing, name="s", dead_letter="letters", **FAILING)  # type: ignore[arg-type]
    home.pumps.create("p", source=source, topic="t").run()
    home.archives.create("a", source=source).run()
    assert any(each.startswith("topic `letters`: stream `s` moved") for each in listed(home))
    home.pumps.get("s").delete()
    proof = home.archives.get("a").erase(ids=["gone"])
    assert [each.copy.partition(" (")[0] for each in proof.traces] == ["topic `letters`"]


def test_proof_lists_archives_that_were_deleted_as_lost(shell: Shell, tmp_path: Path) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    shell("archive", "create", "a", "--source", "topic:t", "--to", f"file:{tmp_path}/far")
    shell("archive", "run", "a", "--no-spark")
    (tmp_path / "far").rename(tmp_path / "away")
    shell("archive", "delete", "a", "--lost-files", "--yes")
    (said,) = listed(home)
    assert said.startswith("archive `a` in `file:")
    assert "was deleted because its files were lost: was not searched" in said
    home.append("copy", [Event(b"1", id="gone")])
    assert listed(home, "copy") == []


def test_sources_are_compared_by_what_they_name() -> None:
    assert source_of_url("kafka://a:9092,b:9092/orders?group=x") == ("kafka", "orders")
    assert source_of_url("kinesis://orders?region=eu-west-1") == ("kinesis", "orders")
    assert recorded_name("kinesis://orders?region=eu-west-1") == "kinesis:orders"
    assert recorded_name("https://host/a-secret") == "https:"
    assert recorded_name("file:/" + "x" * 500) == "file:"
    same = [
        ("kafka", "orders"),
        ("kafka", ""),
        ("kafka", "orders,clicks"),
        ("kafka", "ord*"),
    ]
    assert all(may_be_same(("kafka", "orders"), each) for each in same)
    assert not may_be_same(("kafka", "orders"), ("kafka", "clicks"))
    assert not may_be_same(("kafka", "orders"), ("kinesis", "orders"))
    assert may_be_same(("file", "/in"), ("file", "/in/a.jsonl"))
    assert not may_be_same(("file", "/in"), ("file", "/in-2"))
    assert not may_be_same(("archive", "a"), ("archive", ""))
    originals = Originals(frozenset(), frozenset(), frozenset({"t"}), frozenset({("file", "/in")}))
    assert originals.has(("topic", "t"))
    assert originals.has(("file", "/in/a.jsonl"))
    assert not originals.has(("topic", "other"))


def test_reason_in_the_audit_of_a_copy_is_found(shell: Shell) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.pumps.create("p", source="topic:t", topic="copy").run()
    for name in ("t", "copy"):
        home.erase(name, ids=["gone"])
    died = AuditRecord(home.context.ids.new(), "delete", "me", 1, "gone asked", ())
    put_record(home.context, home.topic("copy"), died)
    (trace,) = home.prove_erased("t", ids=["gone"]).traces
    assert trace.what.endswith("quotes one of them in its reason")
    assert trace.do.startswith("run `tidelog delete copy ID` again")
    home.delete("copy", ["gone"])
    assert home.prove_erased("t", ids=["gone"]).is_clean


class _Answering(BaseHTTPRequestHandler):
    """Accepts everything below `/open`, and nothing else."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path.startswith("/open") else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_named_playback_is_listed_once_and_as_what_it_did(
    shell: Shell, server: str, tmp_path: Path
) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.playback("t", "earliest", "latest", to=f"{server}/open", name="http1")
    with pytest.raises(TidelogError):
        home.playback("t", "earliest", "latest", to=f"{server}/closed", name="http2")
    with pytest.raises(InvalidError, match="No such file"):
        home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/none/a", name="unopened")
    assert [each.partition(": was not")[0] for each in listed(home)] == [
        f"`{server}/open`: playback `http1` copied events of `t` to it",
        f"`{server}/closed`: playback `http2` may have copied events of `t` to it",
    ]
    home.playbacks.forget("http1")
    assert "`http:`: a playback copied events of `t` to it: was not searched" in "".join(
        listed(home)
    )


def test_name_of_a_forgotten_playback_does_not_hide_what_it_copied(
    shell: Shell, tmp_path: Path
) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/a.jsonl", name="again")
    home.playbacks.forget("again")
    with pytest.raises(InvalidError, match="No such file"):
        home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/none/a", name="again")
    (said,) = listed(home)
    assert said.startswith(f"`file:{tmp_path}/a.jsonl`: a playback copied events of `t` to it")


def test_audit_of_a_playback_has_the_times_that_it_played(shell: Shell, tmp_path: Path) -> None:
    home = shell.made
    home.append("t", [Event(b"1", id="gone")])
    home.playback("t", to=f"file:{tmp_path}/a.jsonl")
    home.playback("t", "earliest", "latest", to=f"file:{tmp_path}/b.jsonl", name="b")
    first, second = (each.note for each in home.actions() if each.op == "playback")
    start, end = first.partition(", to ")[0].split(" to ")
    assert moment_ms(end, 0) - moment_ms(start, 0) == 15 * 60 * 1000
    assert second == f"the first to the last, as b, to file:{tmp_path}/b.jsonl"


@pytest.mark.parametrize("where", ["dropped", "aside", "staged", "values", "outside"])
def test_what_a_late_driver_leaves_in_the_archive_of_a_copy_is_a_trace(
    tmp_path: Path, where: str
) -> None:
    home, _ = tidelog.create_home(tmp_path / "home")
    for name in ("t", "copy"):
        home.create_topic(name, 1)
    home.append("t", [Event(b"v", id="x"), Event(b"v", id="other")])
    home.pumps.create("p", source="topic:t", topic="copy").run()
    to = (tmp_path / "outside").as_uri() if where == "outside" else None
    archive = home.archives.create("a", source="topic:copy", to=to)
    archive.run()
    file = next(iter(archive.files())).path
    store = store_at(home.context, archive.info.store)
    data, staged = store.get(file), f"staging/{archive.info.pipeline(1)}/copy%2F0/1/x/y/0"
    if where == "dropped":
        archive.backfill()
        archive.promote()
        home.archives.get("a").drop(1)
    for name in ("copy", "t"):
        assert home.erase(name, ids=["x"]).is_erased
    late = {"dropped": file, "aside": f"archives/a/_aside/m/{file}"}.get(where, staged)
    store.put(late, b"a value\n" if where == "values" else data)
    traces = home.prove_erased("t", ids=["x"]).traces
    assert [trace.object for trace in traces] == [late]
    assert "copy" in traces[0].copy or where in ("staged", "values")
