"""``delete --prove`` and ``verify --erased`` as a person runs them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

import tidelog as library
from tests.support.archive_look import an_archive, drive
from tests.support.cli_run import Run
from tidelog import Event
from tidelog.archive.read import find_event
from tidelog.erasure.matcher import EventMatcher
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout


def fill() -> None:
    with library.open() as home:
        home.create_topic("t", partitions=2)
        for partition in (0, 1):
            events = [
                Event(b"%d" % n, id=f"{partition}-{n}", key=b"k%d" % (n % 3)) for n in range(9)
            ]
            home.append("t", events, partition=partition)


def test_a_delete_is_proved(tidelog: Run) -> None:
    fill()
    assert tidelog("verify", "t", "--erased", "0-4").code == 1
    done = tidelog("delete", "t", "0-4", "--prove", "--json")
    assert done.code == 0, done.err
    (proof,) = done.rows()
    assert (proof["verdict"], proof["deleted"], proof["journals_made"]) == ("erased", 1, 2)
    assert (proof["erased"], proof["traces"]) == (True, [])
    assert proof["objects_searched"] == 2
    assert sum(place["objects"] for place in proof["places"]) == 2
    assert tidelog("verify", "t", "--erased", "0-4").code == 0
    again = tidelog("delete", "t", "0-4", "--prove", "--json")
    assert (again.code, again.rows()[-1]["erased"]) == (0, True), "it may have been deleted before"
    assert len(tidelog("verify", "t", "--json").rows()) == 1


def test_a_plain_delete_leaves_traces_that_are_told(tidelog: Run) -> None:
    fill()
    tidelog("delete", "t", "0-4", "1-4")
    shown = tidelog("verify", "t", "--erased", "0-4", "--erased", "1-4")
    assert shown.code == 1
    assert shown.out.startswith(b"NOT ERASED: something is left.\n")
    assert shown.out.decode().count("\n  topics/") == 2
    assert shown.out.decode().count("to do: ") == 1, "one command for all objects"
    assert b"tidelog compile t --amended" in shown.out


def test_all_events_of_a_key_are_proved_gone(tidelog: Run) -> None:
    fill()
    done = tidelog("delete", "t", "--key", "k1", "--yes", "--prove", "--json")
    assert (done.code, done.rows()[0]["deleted"]) == (0, 6)
    assert tidelog("verify", "t", "--erased-key", "k1", "--json").rows()[0]["erased"] is True
    assert tidelog("verify", "t", "--erased-key", "k2").code == 1


def test_what_cannot_be_proved_is_refused(tidelog: Run) -> None:
    fill()
    assert "say which" in tidelog("verify", "--erased", "x").err
    assert "not found" in tidelog("verify", "nope", "--erased", "x").err
    assert tidelog("verify", "t", "--erased", "\udcff").code == 2, "no UTF-8"


def test_what_was_never_there_is_not_proved(tidelog: Run) -> None:
    fill()
    shown = tidelog("verify", "t", "--erased", "never-was")
    assert shown.code == 1
    assert shown.out.startswith(
        b"NOTHING TO PROVE: an id or key that you gave was never deleted here. Check it"
    )
    mixed = tidelog("delete", "t", "never-was", "also-not", "--prove")
    assert b"not found           " in mixed.out
    assert b"never-was, also-not\n" in mixed.out
    for asked in (["never-was"], ["--key", "never-was"]):
        done = tidelog("delete", "t", *asked, "--yes", "--prove", "--json")
        proof = done.rows()[-1]
        assert (done.code, proof["erased"], proof["known"]) == (1, True, False)
    done = tidelog("delete", "t", "0-4", "--prove", "--json")
    assert (done.code, done.rows()[-1]["known"]) == (0, True)
    done = tidelog("verify", "t", "--erased", "0-4", "--erased", "never-was", "--json")
    assert (done.code, done.rows()[-1]["known"]) == (1, False)


def test_a_proof_is_saved_recorded_and_checked(tidelog: Run, tmp_path: Path) -> None:
    fill()
    file = tmp_path / "proof.json"
    done = tidelog(
        "delete", "t", "--key", "k1", "--yes", "--why", "request 7", "--proof", str(file)
    )
    assert done.code == 0, done.err
    assert done.out.startswith(b"ERASED: no object that was searched holds any of it.\n")
    assert b"k1" not in file.read_bytes(), "an auditor's copy keeps hashes of keys"
    deleted, _, proved = tidelog("audit", "t", "--key", "k1", "--json").rows()
    assert (deleted["op"], proved["op"], proved["why"]) == ("delete", "prove", "request 7")
    assert deleted["key"] == proved["key"]
    read = tidelog("proof", "check", str(file), "--key", "k1", "--recorded", "--json")
    assert (read.code, read.rows()[0]["sha256"]) == (0, proved["proof"]["sha256"])
    shown = tidelog("audit", "t").out.decode()
    assert f"erased, {proved['proof']['sha256'][:19]}" in shown
    assert tidelog("audit", "t", "--key", "k2", "--json").rows() == []
    assert (
        "does not cover this id or key" in tidelog("proof", "check", str(file), "--key", "k2").err
    )
    said = tidelog("proof", "check", str(file), "--key", "k1", "--recorded").out
    assert b"the key that you gave. The audit of the home has its hash." in said
    assert b"Use --recorded to compare its hash" in tidelog("proof", "check", str(file)).out


def test_a_changed_or_unknown_proof_is_refused(tidelog: Run, tmp_path: Path) -> None:
    fill()
    file, other = tmp_path / "proof.json", tmp_path / "other.json"
    tidelog("delete", "t", "0-4", "--proof", str(file))
    other.write_text(file.read_text().replace('"objects": 2', '"objects": 3'))
    changed = tidelog("proof", "check", str(other))
    assert (changed.code, "was changed after it was written" in changed.err) == (1, True)
    forged = library.Proof.load(file)
    forged.objects = 9
    other.unlink()
    forged.save(other)
    assert tidelog("proof", "check", str(other)).code == 0, "a hash alone does not show forgery"
    assert "does not have its hash" in tidelog("proof", "check", str(other), "--recorded").err
    other.write_text("{}")
    assert "is not a proof" in tidelog("proof", "check", str(other)).err
    file.unlink()
    left = tidelog("verify", "t", "--erased", "1-4", "--proof", str(file))
    assert left.code == 1
    checked = tidelog("proof", "check", str(file), "--id", "1-4", "--recorded", "--json")
    assert (checked.code, checked.rows()[0]["verdict"]) == (1, "not erased")


def test_a_scribe_goes_on_past_a_damaged_archive(tidelog: Run) -> None:
    fill()
    with library.open() as home:
        archives = [an_archive(home, name) for name in ("a", "b")]
        for archive in archives:
            drive(home, archive)
        folder = Path(home.store.url.removeprefix("file://")) / archives[0].folder()
        for path in folder.rglob("[0-9]*.parquet"):
            path.chmod(0o644)
            path.write_bytes(b"garbage")
        stray = f"{layout.staging(archives[1].pipeline(), 't/0', 0, 'attempt')}/0"
        home.store.put(stray, b"of a driver that is dead")
        home.delete("t", ["0-4"])
    done = tidelog("scribe", "--once", "--amended", "--grace", "0s", "--json")
    (turn,) = done.rows()
    assert [turn["scribe"], len(turn["errors"])] == ["turn", 1]
    with library.open() as home:
        assert find_event(home.context, archives[1], "t/0", 4).status == "erased"
        assert stray not in {info.key for info in home.store.list("staging/")}


@pytest.mark.parametrize("how", ["compact", "append"])
def test_remedy_for_a_table_that_another_program_wrote_to_ends_the_trace(
    tidelog: Run, tmp_path: Path, how: str
) -> None:
    """Follows what the proof prints, word by word."""
    assert tidelog("topic", "create", "t", "--partitions", "1").code == 0
    create = ("archive", "create", "daily", "--source", "topic:t", "--parser", "json:at")
    assert tidelog(*create, "--schema", "at long").code == 0
    for number in range(3):
        with library.open() as home:
            events = [(b"ann", f"gone-{number}"), (b"bob", f"kept-{number}")]
            value = b'{"at": 1794700800}'
            home.append("t", [Event(value, key=key, id=each) for key, each in events])
        assert tidelog("archive", "run", "daily", "--no-spark").code == 0
        assert tidelog("archive", "register", "daily", "--as", "delta").code == 0
    (folder,) = (each.parent for each in tmp_path.rglob("_delta_log"))
    objects = folder.parents[2]
    table = DeltaTable(str(folder))
    if how == "compact":
        table.optimize.compact()
        table.create_checkpoint()
    else:
        write_deltalake(str(folder), table.to_pyarrow_table().slice(0, 1), mode="append")
    done = tidelog("delete", "t", "--key", "ann", "--prove", "--yes", "--json")
    assert done.code == 1
    (trace,) = done.rows()[-1]["traces"]
    steps = re.fullmatch(
        r"delete the folder `([^`]+)`, then run `tidelog ([^`]+)`, which makes the table again of "
        r"the archive's own files, then delete this file; .*",
        trace["do"],
    )
    assert steps is not None, trace
    shutil.rmtree(objects / steps[1])
    assert tidelog(*steps[2].split()).code == 0
    (objects / trace["object"]).unlink()
    assert tidelog("verify", "t", "--erased-key", "ann").code == 0
    rows = DeltaTable(str(folder)).to_pyarrow_table()
    assert sorted(rows.column("id").to_pylist()) == ["kept-0", "kept-1", "kept-2"]
    verified = tidelog("archive", "verify", "daily")
    assert verified.code == 0
    assert re.search(r"^erased +3$", verified.out.decode(), re.MULTILINE)
    assert "others" not in verified.out.decode()  # generations, of which there is only one


def test_files_that_cannot_be_searched_are_named_and_fail_the_delete(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    with library.open() as home:
        drive(home, an_archive(home))
        home.trim("t", ToOffsets({0: 9, 1: 9}))
    monkeypatch.setattr(EventMatcher, "hidden", lambda *_: ["id"])
    done = tidelog("delete", "t", "0-4", "--prove", "--json")
    assert done.code == 1
    rows = done.rows()
    unseen = rows[0]["unseen"]
    assert unseen
    assert all("archives/daily/" in each for each in unseen)
    assert rows[-1]["erased"] is False
    assert {trace["object"] for trace in rows[-1]["traces"]} >= set(unseen)
    assert "has no ids or keys" in tidelog("delete", "t", "0-4").out.decode()


def test_proof_file_is_checked_before_anything_is_erased(tidelog: Run, tmp_path: Path) -> None:
    fill()
    taken = tmp_path / "taken.json"
    taken.write_text("another proof")
    for path, said in (
        (taken, "exists already"),
        (tmp_path / "none" / "q.json", "there is no folder"),
    ):
        for command in (
            ("delete", "t", "0-4", "--proof", str(path)),
            ("verify", "t", "--erased", "0-4", "--proof", str(path)),
            ("archive", "erase", "daily", "--id", "0-4", "--yes", "--proof", str(path)),
        ):
            assert said in tidelog(*command).err, command
    assert taken.read_text() == "another proof"
    assert tidelog("get", "t", "0-4").code == 0, "nothing was deleted"


def test_proof_file_is_written_before_the_proof_is_printed(
    tidelog: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    file = tmp_path / "proof.json"

    def no_reader(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tidelog.cli.commands.proof._show_proof", no_reader)
        assert tidelog("delete", "t", "0-4", "--proof", str(file)).code == 1
    proof = library.Proof.load(file)
    assert proof.deleted is not None
    assert (proof.verdict, proof.deleted.events) == ("erased", 1)


def test_file_has_the_hash_of_an_id_that_looks_like_a_hash(tidelog: Run, tmp_path: Path) -> None:
    file, event_id = tmp_path / "proof.json", f"sha256:{'0af5' * 16}"
    with library.open() as home:
        home.create_topic("t", 1)
        home.append("t", [Event(b"v", id=event_id)])
        assert home.erase("t", event_id).is_clean
        home.erase("t", event_id).save(file)
    assert event_id not in file.read_text()
    assert library.Proof.load(file).as_json() == file.read_bytes()
    assert event_id in tidelog("delete", "t", event_id, "--prove").out.decode()


def test_proof_is_printed_if_its_file_cannot_be_written(
    tidelog: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library.Proof, "save", full)
    done = tidelog("delete", "t", "0-4", "--proof", str(tmp_path / "p.json"))
    assert (done.code, done.out.startswith(b"ERASED")) == (1, True)
    assert "No space left on device: the proof is above" in done.err


def test_mixed_ids_do_not_claim_that_there_was_nothing_to_prove(tidelog: Run) -> None:
    fill()
    mixed = tidelog("delete", "t", "0-1", "0-2", "never-was", "--prove")
    assert mixed.code == 1
    assert mixed.out.startswith(b"NOT ALL PROVED: no object that was searched holds any of it")
    tidelog("delete", "t", "0-4")
    mistyped = tidelog("delete", "t", "never-was", "--prove")
    assert b"rewritten, for earlier deletes" in mistyped.out


def test_counts_in_text_add_up_to_those_in_json(tidelog: Run) -> None:
    fill()
    with library.open() as home:
        drive(home, an_archive(home))
        home.trim("t", ToOffsets({0: 9}))
    shown = tidelog("delete", "t", "0-4", "1-4", "--prove").out.decode()
    assert "2 events: 1 in the topic, 1 only in archives" in shown
    (proof,) = tidelog("delete", "t", "0-5", "1-5", "--prove", "--json").rows()
    assert (proof["deleted"], proof["archived"]) == (1, 1)


def test_what_is_left_in_a_copy_is_grouped_with_one_command(tidelog: Run) -> None:
    fill()
    with library.open() as home:
        home.create_topic("copy")
        for number in range(6):
            home.append("t", [Event(b"%d" % number, key=b"my key")])
            home.playback("t", start="earliest", to="topic:copy")
    shown = tidelog("delete", "t", "--key", "my key", "--prove", "--yes").out.decode()
    assert shown.startswith("NOT ERASED")
    assert shown.count("\nleft: topic `copy` (") == 1
    assert shown.count("to do: run `tidelog delete copy --key 'my key' --prove`") == 1
    assert "more (--json lists all)" in shown
    assert "readers still see it" in shown


def test_recorded_proof_of_another_home_names_the_option(tidelog: Run, tmp_path: Path) -> None:
    fill()
    file = tmp_path / "proof.json"
    tidelog("delete", "t", "0-4", "--proof", str(file))
    done = tidelog("--home", "memory:", "proof", "check", str(file), "--recorded")
    assert "topic `t`: is not in this home: name the home of the proof" in done.err
