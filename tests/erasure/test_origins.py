"""An erasure from a copy says what it covered, and where the same events are still held."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.archive.test_names import Shell
from tidelog import Event, Home
from tidelog.coordination.audit import DeadLetterRecorder
from tidelog.erasure.delete_archived import erase_archived
from tidelog.testing.scheduler import FakeClock


def test_erase_from_a_copy_names_the_archive_that_still_holds_the_event(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    home.create_topic("t", 1)
    home.append("t", [Event(b"1", id="gone"), Event(b"2", id="stays")])
    for name, source in (("first", "topic:t"), ("copy", "archive:first"), ("far", "archive:copy")):
        shell("archive", "create", name, "--source", source, "--kind", "backup")
        shell("archive", "run", name, "--no-spark")
    home.delete_topic("t", past_readers=True)
    reason = home.reason("asked", "ada")
    done = erase_archived(home.context, home.archives.get("copy").info, reason, ["gone"])
    assert {each.archive for each in done.archives} == {"copy", "far"}
    (left,) = done.left
    assert left.startswith("archive `first`: `copy` was made from it, and it holds 1 of these")
    assert (
        erase_archived(home.context, home.archives.get("first").info, reason, ["gone"]).left == ()
    )
    assert (
        erase_archived(home.context, home.archives.get("copy").info, reason, ["stays"]).events == 1
    )


def test_erase_names_sources_that_it_does_not_search(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("1\n")
    shell("archive", "create", "a", "--source", f"file:{tmp_path}/in", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    home = shell.made
    done = erase_archived(
        home.context, home.archives.get("a").info, home.reason("asked", "ada"), ["x"]
    )
    (said,) = done.out_of_reach
    assert said == f"source `file:{tmp_path}/in`: was not searched: delete these events there too"


def test_proof_of_a_restored_topic_names_the_archive_that_it_came_from(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    home.create_topic("t", 1)
    home.create_topic("back", 1)
    home.append("t", [Event(b"1", id="gone")])
    shell("archive", "create", "a", "--source", "topic:t", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    shell("archive", "restore", "a", "--to", "topic:back", "--no-spark")
    home.delete("back", ["gone"])
    (said,) = home.prove_erased("back", ids=["gone"]).out_of_reach
    assert said.startswith("archive `a`: pipeline `")
    assert said.endswith("erase these events there too, with `tidelog archive erase a`")
    assert home.prove_erased("t", ids=["gone"]).out_of_reach == []


def test_copy_of_an_event_dated_in_the_future_is_a_trace_of_its_key(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    for name in ("a", "b"):
        home.create_topic(name)
    future = datetime(2100, 1, 1, tzinfo=UTC)
    dated = Event(b"y", key=b"customer-7", id="y", timestamp=future)
    home.append("a", [Event(b"x", key=b"customer-7", id="x"), dated])
    home.pumps.create("copies", source="topic:a", topic="b").run()
    home.delete("a", ["y"])
    home.erase("b", ids=["x"])
    proof = home.erase("a", key=b"customer-7")
    assert [each.id for each in home.read("b")] == ["y"]
    [trace] = proof.traces
    assert trace.what.endswith("holds offset 1 of partition 0: readers still see it")


def failing(event: Event) -> None:
    if event.id == "gone":
        raise ValueError("refused")


def test_dead_letters_of_handlers_are_traces_of_an_erased_event(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    for name in ("t", "by-consumer", "by-stream", "none"):
        home.create_topic(name, 1)
    home.append("t", [Event(b"1", id="gone"), Event(b"2", id="stays")])
    how = {"on_error": "dead-letter", "retries": 0, "until_caught_up": True}
    with home.consumer("t", "c") as consumer:
        consumer.run(failing, dead_letter="by-consumer", **how)  # type: ignore[arg-type]
    with home.consumer("t", "d") as consumer:
        consumer.run(len, batch=True, dead_letter="none", **how)  # type: ignore[arg-type]
    home.stream("topic:t").run(failing, name="s", dead_letter="by-stream", **how)  # type: ignore[arg-type]
    said = sorted(f"{each.copy}: {each.what}" for each in home.erase("t", ids=["gone"]).traces)
    assert [each.partition(":")[0] for each in said] == [
        "topic `by-consumer` (consumer `c` moved failed events of `t` to it)",
        "topic `by-stream` (stream `s` moved failed events of `t` to it)",
    ]
    for name in ("by-consumer", "by-stream"):
        (origin,) = home.erase(name, ids=["gone"]).out_of_reach
        assert origin.startswith("topic `t`: ")
        assert origin.endswith("delete these events there too, with `tidelog delete t`")
    assert home.prove_erased("t", ids=["gone"]).verdict == "erased"
    letters = [each.note for each in home.actions() if each.op == "dead letters"]
    assert sorted(letters) == [
        "of consumer `c`, to topic:by-consumer",
        "of stream `s`, to topic:by-stream",
    ]


def test_dead_letters_of_an_archive_are_traces_of_an_event_erased_from_it(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    home.create_topic("t", 1)
    home.create_topic("letters", 1)
    home.append("t", [Event(b"1", id="gone")])
    shell("archive", "create", "a", "--source", "topic:t", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    home.stream("archive:a").run(
        failing,
        name="s",
        on_error="dead-letter",
        dead_letter="letters",
        retries=0,
        until_caught_up=True,
    )
    home.delete_topic("t", past_readers=True)
    (trace,) = home.archives.get("a").erase(ids=["gone"]).traces
    assert trace.copy.startswith("topic `letters` (stream `s` moved failed events of `a` to it)")


def test_proof_names_what_else_the_home_has_of_an_outside_source(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"id": "gone"}\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text('{"id": "gone"}\n')
    source = f"file:{tmp_path}/in"
    for name in ("t", "u"):
        home.create_topic(name, 1)
        home.pumps.create(source=source, topic=name, id_field="id").run()
    for name, url in (("same", source), ("unlike", f"file:{tmp_path}/other")):
        home.archives.create(name, source=url).run()
    origin, archive, topic = home.erase("t", ids=["gone"]).out_of_reach
    assert origin.startswith(f"source `{source}`: ")
    assert archive == (
        f"archive `same`: may have got them from `{source}`: was not searched: erase these events "
        "there too, with `tidelog archive erase same`"
    )
    assert topic.startswith("topic `u`: pipeline `")
    assert topic.endswith("delete these events there too, with `tidelog delete u`")


def test_proof_names_an_archive_of_a_copied_folder(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    home.create_topic("t", 1)
    home.append("t", [Event(b"1", id="gone"), Event(b"2", id="stays")])
    home.archives.create("a", source="topic:t").run()
    folder = next(tmp_path.rglob("archives/a/g1"))
    shutil.copytree(folder, tmp_path / "copied")
    home.archives.create("of-copy", source=f"file:{tmp_path}/copied").run()
    (said,) = home.erase("t", ids=["gone"]).out_of_reach
    assert said.startswith("archive `of-copy`: may have got them from `file:")
    erased = home.archives.get("of-copy").erase(ids=["gone"])
    assert (erased.verdict, erased.deleted and erased.deleted.archived) == ("erased", 1)


def test_proof_follows_events_out_of_the_home_and_back(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    home.create_topic("t", 1)
    home.create_topic("back", 1)
    home.append("t", [Event(b"1", id="gone")])
    file = tmp_path / "out" / "played.jsonl"
    file.parent.mkdir()
    home.playback("t", "earliest", "latest", to=f"file:{file}", name="once")
    home.pumps.create(source=f"file:{file}", topic="back", id_field="id").run()
    home.archives.create("a", source=f"file:{file.parent}").run()
    proof = home.erase("t", ids=["gone"])
    (trace,) = proof.traces
    assert trace.copy.startswith("topic `back` (pipeline `")
    assert [each.partition(":")[0] for each in proof.out_of_reach] == [
        "topic `back`",  # whose ids are those of a field
        "`file",
        "archive `a`",
    ]


def create_again(home: Home, name: str, old: str, *, sorts_before: bool) -> None:
    """Creates a topic again, with an incarnation that sorts before or after the old one."""
    for _ in range(200):
        home.create_topic(name, 1)
        if (home.topic(name).incarnation < old) == sorts_before:
            return
        home.delete_topic(name, past_readers=True)
    pytest.fail("no incarnation sorts as it should")


@pytest.mark.parametrize("sorts_before", [False, True])
def test_archive_of_a_topic_of_dead_letters_is_searched_after_the_topic_was_deleted(
    tmp_path: Path, sorts_before: bool
) -> None:
    home = Shell(tmp_path).made
    for name in ("t", "letters", "played"):
        home.create_topic(name, 1)
    home.append("t", [Event(b"1", id="gone")])
    with home.consumer("t", "c") as consumer:
        consumer.run(
            failing,
            on_error="dead-letter",
            dead_letter="letters",
            retries=0,
            until_caught_up=True,
        )
    home.playback("t", "earliest", "latest", to="topic:played")
    old = home.topic("played").incarnation
    for name in ("letters", "played"):
        home.archives.create(name, source=f"topic:{name}").run()
        home.delete_topic(name, past_readers=True)
    create_again(home, "played", old, sorts_before=sorts_before)
    traces = home.erase("t", ids=["gone"]).traces
    assert {each.object.split("/")[1] for each in traces} == {"letters", "played"}
    for name in ("letters", "played"):
        home.archives.get(name).erase(ids=["gone"])
    assert home.prove_erased("t", ids=["gone"]).verdict == "erased"


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("how", ["restore", "pump", "playback"])
def test_proof_for_an_archive_names_what_its_deleted_topic_was_copied_from(
    tmp_path: Path, how: str, deleted: bool
) -> None:
    home = Shell(tmp_path).made
    for name in ("first", "t"):
        home.create_topic(name, 1)
    home.append("first", [Event(b"1", id="gone")])
    origin = home.archives.create("origin", source="topic:first")
    origin.run()
    if how == "restore":
        origin.restore(to="topic:t")
    elif how == "pump":
        home.pumps.create(source="topic:first", topic="t").run()
    else:
        home.playback("first", "earliest", "latest", to="topic:t")
    home.archives.create("a", source="topic:t").run()
    for name in ("t", "first") if deleted else ("t",):
        home.delete_topic(name, past_readers=True)
    proof = home.archives.get("a").erase(ids=["gone"])
    assert proof.verdict == "erased"
    said = [each.partition(":")[0] for each in proof.out_of_reach]
    topic = [] if how == "restore" else ["topic `first`"]
    archive = ["archive `origin`"] if deleted or how == "restore" else []
    assert said == [*topic, *archive]
    if deleted:
        assert home.archives.get("origin").erase(ids=["gone"]).verdict == "erased"


def test_archive_of_a_copy_is_searched_after_pump_and_copy_were_deleted(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    for name in ("t", "copy"):
        home.create_topic(name, 1)
    home.append("t", [Event(b"1", id="gone")])
    pump = home.pumps.create(source="topic:t", topic="copy")
    pump.run()
    home.archives.create("a", source="topic:copy").run()
    pump.delete()
    home.delete_topic("copy", past_readers=True)
    (trace,) = home.erase("t", ids=["gone"]).traces
    assert trace.object.startswith("archives/a/")
    how = "a pipeline that was deleted may have copied events of `t` to it"
    assert trace.copy.startswith(f"topic `copy` ({how}, and it was deleted)")
    assert home.archives.get("a").erase(ids=["gone"]).verdict == "erased"
    assert home.prove_erased("t", ids=["gone"]).verdict == "erased"


def test_topic_that_was_created_after_pump_and_copy_were_deleted_is_no_copy(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    for name in ("t", "copy"):
        home.create_topic(name, 1)
    home.append("t", [Event(b"1", key=b"k", id="gone")])
    pump = home.pumps.create(source="topic:t", topic="copy")
    pump.run()
    pump.delete()
    home.delete_topic("copy", past_readers=True)
    home.create_topic("copy", 1)
    home.append("copy", [Event(b"its own", key=b"k", id="stays")])
    proof = home.erase("t", key=b"k")
    assert (proof.verdict, proof.out_of_reach) == ("erased", [])
    assert home.prove_erased("copy", ids=["stays"]).out_of_reach == []


def test_topics_of_dead_letters_are_recorded_once_a_day(tmp_path: Path) -> None:
    home = Shell(tmp_path).made
    clock = FakeClock()
    context = dataclasses.replace(home.context, clock=clock)
    record = DeadLetterRecorder(context, "topic:t", "letters", "consumer `c`")
    for hours, records in ((0, 1), (23, 1), (2, 2), (1, 2)):
        clock.sleep(hours * 3600.0)
        record()
        assert len([each for each in home.actions() if each.op == "dead letters"]) == records
