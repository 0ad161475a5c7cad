"""An erasure from a copy says what it covered, and where the same events are still held."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tests.archive.test_names import Shell
from tidelog import Event
from tidelog.archive.archive import find_archive
from tidelog.erasure.from_archives import erase_archived
from tidelog.erasure.proof_search import prove_erased


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
    done = erase_archived(home.context, find_archive(home.context, "copy"), reason, ["gone"])
    assert {each.archive for each in done.archives} == {"copy", "far"}
    (left,) = done.left
    assert left.startswith("archive `first`: `copy` was made of it, and it holds 1 of these events")
    assert (
        erase_archived(home.context, find_archive(home.context, "first"), reason, ["gone"]).left
        == ()
    )
    assert (
        erase_archived(home.context, find_archive(home.context, "copy"), reason, ["stays"]).events
        == 1
    )


def test_erase_names_sources_that_it_does_not_search(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("1\n")
    shell("archive", "create", "a", "--source", f"file:{tmp_path}/in", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    home = shell.made
    done = erase_archived(
        home.context, find_archive(home.context, "a"), home.reason("asked", "ada"), ["x"]
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
    (said,) = prove_erased(home.context, home.topic("back"), ["gone"]).out_of_reach
    assert said.startswith("archive `a`: pipeline `")
    assert said.endswith("erase these events there too, with `tidelog archive erase a`")
    assert prove_erased(home.context, home.topic("t"), ["gone"]).out_of_reach == []


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
    assert trace.what.endswith("holds offset 1 of partition 0: was not deleted")
