"""A proof finds events that pumps, restores and playbacks copied; `archive erase` lists them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.archive.test_names import Shell
from tests.support.archive_look import FIRST_S
from tidelog import Event
from tidelog.archive.archive import find_archive
from tidelog.catalog.base import Put
from tidelog.connectors.topic.sink import TopicSink
from tidelog.coordination.pipeline_rows import list_pipelines
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_scope import TopicScope
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import UnavailableError
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.pipeline import Intent
from tidelog.model.topic import encode_row
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.playback.session import NamedPlayback, find_playback, start_playback

COMMANDS = {
    "pump": ["pump", "topic:t", "--topic", "copy", "--no-spark"],
    "restore": ["archive", "restore", "a", "--to", "topic:copy", "--no-spark"],
    "playback": [
        *("playback", "t", "--start", "2020-01-01", "--end", "2100-01-01"),
        *("--to", "topic:copy", "--resume", "drill"),
    ],
}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Two events in a topic with an archive, and an empty topic for copies."""
    shell = Shell(tmp_path)
    shell.made.create_topic("t", 1)
    shell.made.create_topic("copy", 1)
    times = (FIRST_S * 1000, FIRST_S * 1000 + 1)
    names = zip(("gone", "stays"), times, strict=True)
    shell.made.append(
        "t", [Event(b"1", key=name.encode(), id=name, timestamp=at) for name, at in names]
    )
    shell("archive", "create", "a", "--source", "topic:t", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    return shell


def erase(shell: Shell, topic: str) -> None:
    shell.made.delete(topic, ["gone"])
    purge(shell.made.context, shell.made.topic(topic), 0)


def proof(shell: Shell, topic: str = "t") -> Proof:
    return prove_erased(shell.made.context, shell.made.topic(topic), ["gone"])


@pytest.mark.parametrize("how", COMMANDS)
def test_proof_finds_the_event_in_a_copy_until_it_is_erased_there(shell: Shell, how: str) -> None:
    shell(*COMMANDS[how])
    assert [event.id for event in shell.made.read("copy", 0)] == ["gone", "stays"]
    erase(shell, "t")
    (trace,) = proof(shell).traces
    assert trace.copy.startswith("topic `copy` (p")
    assert trace.what.endswith("holds offset 0 of partition 0: readers still see it")
    assert trace.do == "run `tidelog delete copy ID --prove`"
    erase(shell, "copy")
    assert proof(shell).is_erased


@pytest.mark.parametrize("forgotten", [False, True])
def test_proof_finds_the_copy_of_a_playback_without_a_name(shell: Shell, forgotten: bool) -> None:
    shell(*(COMMANDS["playback"] if forgotten else COMMANDS["playback"][:-2]))
    if forgotten:
        shell.made.playbacks.forget("drill")
    erase(shell, "t")
    (trace,) = proof(shell).traces
    assert trace.copy == "topic `copy` (a playback copied events of `t` to it)"
    erase(shell, "copy")
    assert proof(shell).is_erased
    (origin,) = proof(shell, "copy").out_of_reach
    assert origin.startswith("topic `t`: a playback copied events from it: was not searched")


def test_proof_reports_many_events_of_an_object_as_one_finding(shell: Shell) -> None:
    shell.made.append("t", [Event(b"2", key=b"gone", id=f"more-{n}") for n in range(7)])
    found = [each.what for each in shell.made.prove_erased("t", keys=[b"gone"]).traces]
    assert (
        "holds 7 of them, at offsets 2, 3, 4, 5, 6 and 2 more of partition 0: readers still see it"
        in found
    )


def test_proof_follows_copies_of_copies_and_their_archives(shell: Shell) -> None:
    shell(*COMMANDS["pump"])
    shell.made.create_topic("far", 1)
    shell("pump", "topic:copy", "--topic", "far", "--no-spark")
    shell("archive", "create", "b", "--source", "topic:far", "--kind", "backup")
    shell("archive", "run", "b", "--no-spark")
    assert [
        each.topic.name
        for each in TopicScope(shell.made.context, shell.made.topic("t")).copies().topics
    ] == [
        "copy",
        "far",
    ]
    erase(shell, "t")
    erase(shell, "copy")
    traces = proof(shell).traces
    assert any(each.object.startswith("archives/b/") for each in traces)
    assert all(each.copy.startswith("topic `far` (pipeline `") for each in traces)
    erase(shell, "far")
    assert proof(shell).is_erased


@pytest.mark.parametrize("how", COMMANDS)
def test_proof_follows_copies_through_a_topic_that_was_deleted(shell: Shell, how: str) -> None:
    shell(*COMMANDS[how])
    shell("archive", "create", "b", "--source", "topic:copy", "--kind", "backup")
    shell("archive", "run", "b", "--no-spark")
    shell.made.create_topic("far", 1)
    shell("pump", "topic:copy", "--topic", "far", "--no-spark")
    shell.made.delete_topic("copy", past_readers=True)
    erase(shell, "t")
    found = {each.object.partition("/")[0]: each for each in proof(shell).traces}
    assert set(found) == {"archives", "topics"}
    assert "topic `copy`" in found["archives"].copy
    assert found["archives"].copy.endswith("and it was deleted)")
    assert found["archives"].do.startswith("run `tidelog archive erase b --id ID --prove`, which")
    assert found["topics"].copy.startswith("topic `far` (")
    erase(shell, "far")
    shell.made.archives.get("b").erase(ids=["gone"], prove=False)
    assert proof(shell).is_erased


def test_proof_searches_what_a_killed_delete_leaves_of_a_copy(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell(*COMMANDS["pump"])
    with monkeypatch.context() as patch:
        patch.setattr(type(shell.made.store), "delete", die)
        with pytest.raises(UnavailableError):
            shell.made.delete_topic("copy", past_readers=True)
    erase(shell, "t")
    (trace,) = proof(shell).traces
    assert trace.what.endswith("holds 1 of them: its topic is being deleted")
    shell.made.delete_topic("copy")
    assert proof(shell).is_erased


def test_sweep_removes_what_a_killed_pump_staged_for_a_topic_that_was_deleted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = shell.made.context
    pump = open_pump(context, PumpOptions("topic:t", "copy"), LocalWorkers(1))
    with monkeypatch.context() as patch:
        patch.setattr(TopicSink, "publish", die)
        with pytest.raises(UnavailableError):
            Driver(context, pump, DriverOptions()).run()
    shell.made.delete_topic("copy", past_readers=True)
    assert list(shell.made.store.list("staging/"))
    erase(shell, "t")  # which sweeps
    assert proof(shell).is_erased


def die(*_: object, **__: object) -> None:
    raise UnavailableError("killed")


@pytest.mark.parametrize("how", ["pump", "restore"])
def test_proof_finds_the_copy_of_a_pipeline_that_was_deleted(shell: Shell, how: str) -> None:
    shell(*COMMANDS[how])
    (pipeline,) = list_pipelines(shell.made.context)
    shell("pipeline", "delete", pipeline.name, "--yes")
    erase(shell, "t")
    (trace,) = proof(shell).traces
    assert trace.copy == "topic `copy` (a pipeline that was deleted copied events of `t` to it)"
    assert trace.what.startswith("holds offset 0")
    erase(shell, "copy")
    assert proof(shell).is_erased


def test_new_event_in_a_copy_is_not_a_trace(shell: Shell) -> None:
    shell(*COMMANDS["pump"])
    erase(shell, "t")
    erase(shell, "copy")
    shell.made.append("copy", [Event(b"new", id="gone")])
    assert proof(shell).is_erased


def test_range_of_a_pump_under_way_keeps_the_proof_from_being_clean(shell: Shell) -> None:
    shell(*COMMANDS["pump"])
    erase(shell, "t")
    erase(shell, "copy")
    assert proof(shell).is_erased
    (pump,) = list_pipelines(shell.made.context)
    where = layout.pipeline_partition(pump.incarnation, "t/0")
    intent = Put("intent", encode_row(Intent("0", "2")))
    shell.made.catalog.write(where, intent, write_id=shell.made.context.ids.new())
    (trace,) = proof(shell).traces
    assert (trace.object, trace.what) == (
        where,
        f"a range of pipeline `{pump.name}` is under way there",
    )


def test_playback_under_way_keeps_the_proof_from_being_clean(shell: Shell) -> None:
    shell(*COMMANDS["playback"])
    erase(shell, "t")
    erase(shell, "copy")
    assert proof(shell).is_erased
    context = shell.made.context
    pinned = find_playback(context, "drill")
    assert pinned is not None
    start_playback(context, "again", pinned)
    assert proof(shell).is_erased, "no process plays it"
    playing = NamedPlayback(context, "again", 1)
    assert playing.take(lambda: True)
    (trace,) = proof(shell).traces
    assert trace.what == "playback `again` of the topic is under way"
    playing.release(lot_is_out=True)
    assert proof(shell).is_erased


def test_proof_lists_copies_outside_of_the_home(shell: Shell, tmp_path: Path) -> None:
    sink = f"file:{tmp_path}/out.jsonl"
    shell(*COMMANDS["playback"][:-3], sink, "--resume", "drill")
    erase(shell, "t")
    found = proof(shell)
    (said,) = found.out_of_reach
    assert said.startswith(
        f"`{sink}`: playback `drill` copied events of `t` to it: was not searched"
    )


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_proof_lists_the_archive_that_a_topic_with_its_name_was_restored_from(
    shell: Shell, is_forgotten: bool
) -> None:
    shell.made.delete_topic("t", past_readers=True)
    shell.made.create_topic("t", 1)
    shell("archive", "restore", "a", "--to", "topic:t", "--no-spark")
    how = "a pipeline that was deleted may have"
    for pipeline in shell.made.pumps.list(restores=True):
        if is_forgotten:
            pipeline.delete()
        else:
            how = f"pipeline `{pipeline.name}`"
    erase(shell, "t")
    do = "was not searched: erase these events there too, with `tidelog archive erase a`"
    listed = [f"archive `a`: {how} copied events from it: {do}"]
    if is_forgotten:  # then its partitions alone show that it had a topic of this name
        listed.append(f"archive `a`: may have got them from topics named `t`: {do}")
    assert proof(shell).out_of_reach == listed


def test_erase_from_an_archive_lists_topics_that_were_restored_from_it(shell: Shell) -> None:
    shell(*COMMANDS["restore"])
    shell.made.delete_topic("t", past_readers=True)
    reason = shell.made.reason("asked", "ada")
    done = erase_archived(
        shell.made.context, find_archive(shell.made.context, "a"), reason, ["gone"]
    )
    assert done.events == 1
    (said,) = done.out_of_reach
    assert said.startswith("topic `copy`: pipeline `")
    assert said.endswith("delete these events there too, with `tidelog delete copy`")


def test_erase_from_an_archive_lists_archives_of_a_restored_topic_that_was_deleted(
    shell: Shell,
) -> None:
    shell(*COMMANDS["restore"])
    shell("archive", "create", "b", "--source", "topic:copy", "--kind", "backup")
    shell("archive", "run", "b", "--no-spark")
    for name in ("copy", "t"):
        shell.made.delete_topic(name, past_readers=True)
    found = shell.made.archives.get("a").erase(ids=["gone"], prove=False)
    (said,) = found.out_of_reach
    assert said.startswith("archive `b`: has events of topic `copy`, which was deleted (pipeline")
    assert said.endswith("erase these events there too, with `tidelog archive erase b`")


def test_erase_from_an_archive_names_folders_that_were_named_by_the_events(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    home.create_topic("t", 1)
    values = [json.dumps({"at": FIRST_S, "user": user}).encode() for user in ("ada", "bob")]
    home.append("t", [Event(value, id=f"id-{n}") for n, value in enumerate(values)])
    shell(
        "archive",
        "create",
        "a",
        "--source",
        "topic:t",
        *("--kind", "partition"),
        "--parser",
        "split:user|json:at",
    )
    shell("archive", "run", "a", "--no-spark")
    home.delete_topic("t", past_readers=True)
    done = erase_archived(
        home.context, home.archives.get("a").info, home.reason("asked", "ada"), ["id-0"]
    )
    (named,) = done.named
    assert named.startswith("archives/a/g1/t/ada/")
