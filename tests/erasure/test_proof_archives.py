"""Events that no topic has are erased from archives with a proof, and nothing of them is left."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner

from tests.archive.test_erased_events import write_events
from tests.archive.test_names import Shell
from tests.erasure.test_delete_archived import _stalled, _Waiting
from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home, Proof
from tidelog.cli.main import cli
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.audit import AuditRecord, put_record
from tidelog.erasure.proof import Trace
from tidelog.errors import InvalidError
from tidelog.maintenance import erase as whole_erasure
from tidelog.pipeline.failures import PipelineFailures, remove_failures
from tidelog.testing.scheduler import Crash

GONE = "e3-gone"
LATE = "2040-01-01T00:00:00Z"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        yield made


def fill(home: Home, topic: str = "t") -> None:
    """Creates a topic of six events; ids, keys and values name one of them."""
    home.create_topic(topic, 1)
    names = [GONE if n == 3 else f"e{n}" for n in range(6)]
    values = [json.dumps({"at": FIRST_S, "who": each}).encode() for each in names]
    home.append(
        topic,
        [
            Event(value, key=each.encode(), id=each)
            for value, each in zip(values, names, strict=True)
        ],
    )


def of_a_deleted_topic(home: Home, _: Path) -> None:
    fill(home)
    drive(home, an_archive(home, parser="json:at"))
    home.delete_topic("t", past_readers=True)


def of_files(home: Home, folder: Path) -> None:
    events = [(GONE if n == 3 else f"e{n}", n, "2025-01-01T00:00:00Z") for n in range(6)]
    drive(home, an_archive(home, source=write_events(folder / "src", "a.jsonl", events)))


def erase(home: Home, *ids: str, name: str = "daily") -> Proof:
    return home.archives.get(name).erase(ids=ids or [GONE], prove=True)


def prove(home: Home, name: str = "daily") -> list[Trace]:
    return home.archives.get(name).prove_erased(ids=[GONE]).traces


def contents(path: Path) -> str:
    """Returns everything in a file, as another reader of Parquet decodes it."""
    if path.suffix != ".parquet":
        return path.read_bytes().decode(errors="replace")
    rows = duckdb.sql(f"select * from read_parquet('{path}')").fetchall()
    return str(rows) + path.read_bytes().decode(errors="replace")


def holding(folder: Path, text: str) -> list[Path]:
    """Returns the files of a home whose bytes, decoded values or names hold a text."""
    files = [each for part in ("o", "c.sqlite*") for each in folder.glob(part)]
    every = [each for found in files for each in (found, *found.rglob("*")) if each.is_file()]
    assert every
    return [each for each in every if text in str(each) or text in contents(each)]


@pytest.mark.parametrize("make", [of_a_deleted_topic, of_files])
def test_proved_event_is_in_no_byte_of_the_home(
    home: Home, tmp_path: Path, make: Callable[[Home, Path], None]
) -> None:
    make(home, tmp_path)
    daily = home.archives.get("daily")
    daily.tables.register("delta")
    daily.backfill()
    daily.promote()  # the first generation is kept
    drive(home, an_archive(home, "copy", source="archive:daily"))
    assert holding(tmp_path, GONE)
    assert erase(home, "unknown").verdict == "nothing to prove"
    proof = daily.erase(ids=[GONE], why=f"{GONE} asked", prove=True)
    assert (proof.verdict, proof.archive, proof.topic, proof.traces) == ("erased", "daily", "", [])
    assert proof.deleted is not None
    assert (proof.deleted.archived, proof.deleted.missing) == (1, ())
    assert holding(tmp_path, GONE) == []
    proof.save(tmp_path / "proof.json")
    assert home.has_proof(Proof.load(tmp_path / "proof.json"))
    assert [each.proof.verdict for each in daily.audit(GONE) if each.proof] == ["erased"]
    held = {each.object.split("/t/")[0] for each in daily.prove_erased(ids=["e1"]).traces}
    parts = {each.rpartition("/src")[0] or each for each in held}
    assert parts == {"archives/daily/g1", "archives/daily/g2", "archives/copy/g1"}
    of_copy = home.archives.get("copy").prove_erased(ids=[GONE])
    assert of_copy.verdict == "erased", "the record of an archive counts for its copies"


def test_leftover_in_any_place_is_named(home: Home, tmp_path: Path) -> None:
    fill(home)
    incarnation = home.topic("t").incarnation
    segment = next(home.store.list(f"topics/{incarnation}/segments/")).key
    daily = an_archive(home, parser="json:at")
    drive(home, daily)
    drive(home, an_archive(home, "copy", source="archive:daily"))
    (file,) = [each.key for each in home.store.list("archives/daily/g1/")]
    old, events = home.store.get(file), home.store.get(segment)
    home.delete_topic("t", past_readers=True)
    assert erase(home).traces == []
    delta = {"add": {"path": "x", "stats": json.dumps({"minValues": {"id": GONE}})}}
    iceberg = json.dumps({"properties": {"note": GONE}})
    places = {
        f"staging/{daily.pipeline()}/t%2F0/1/x/0/0": (old, "tidelog sweep"),
        "archives/daily/_aside/1/x.parquet": (old, "tidelog archive erase daily --id ID --prove"),
        "archives/daily/g1/t/stray.parquet": (old, "look at it, then delete it"),
        "archives/daily/g7/t/x.parquet": (old, "tidelog sweep"),
        f"archives/daily/g1/t/{GONE}/_x": (b"", "look at it, then delete it"),
        "archives/daily/g1/_delta_log/00000000000000000000.json": (
            json.dumps(delta).encode(),
            "tidelog archive backfill",
        ),
        "archives/daily/_iceberg/l.d/metadata/0.metadata.json": (
            iceberg.encode(),
            "drop the table in its catalog if it is still there, then delete the folder",
        ),
        "archives/copy/g1/t/stray.parquet": (old, "look at it, then delete it"),
        f"topics/{incarnation}/segments/late": (events, "tidelog sweep"),
        "somewhere/else.parquet": (old, "look at it, then delete it"),
    }
    for key, (data, do) in places.items():
        home.store.put(key, data)
        found = [each for each in prove(home) if each.object == key]
        assert found, key
        assert all(do in each.do for each in found), found
        home.store.delete([key])
    assert prove(home) == []


def test_objects_of_a_topic_that_is_being_deleted_are_searched(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home)
    folder = f"topics/{home.topic('t').incarnation}/"
    drive(home, an_archive(home))

    def die(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("tidelog.log.topics._remove_objects", die)
        with pytest.raises(Crash):
            home.delete_topic("t", past_readers=True)
    assert any(each.object.startswith(folder) for each in prove(home))


def test_rows_that_quote_an_event_are_named(home: Home, tmp_path: Path) -> None:
    of_files(home, tmp_path)
    drive(home, an_archive(home, "copy", source="archive:daily"))
    assert erase(home).traces == []
    daily, copy = (home.archives.get(each).info for each in ("daily", "copy"))
    (line,) = home.archives.get("daily").status().partitions
    partition = SourcePartition.named(line.partition)
    for archive in (daily, copy):
        failures = PipelineFailures(home.context, archive.pipeline())
        failures.add([(partition, InvalidError("refused: a secret", offset=3))])
        (trace,) = prove(home)
        assert trace.what == "may quote one of them in an error"
        remove_failures(home.context, archive.pipeline(), [partition.text])
        failures.add([(partition, InvalidError("refused: another", offset=4))])
        assert prove(home) == [], "it quotes another event"
    record = AuditRecord("1", "delete", "me", 5, f"{GONE} asked", (), state="done")
    put_record(home.context, copy, record)
    (trace,) = prove(home)
    assert trace.what == "quotes one of them in its reason"
    assert "tidelog archive erase copy --id ID" in trace.do
    erase(home)
    assert prove(home) == [], "erasing again replaces it"


def test_names_that_events_gave_to_folders_are_left_until_files_are_made_again(home: Home) -> None:
    fill(home)
    drive(home, an_archive(home, parser="split:who|json:at"))
    home.delete_topic("t", past_readers=True)
    left = erase(home).traces
    assert {each.object.partition("/")[0] for each in left} == {"archives", "pipelines"}
    assert all("tidelog archive backfill" in each.do or "sweep" in each.do for each in left)
    daily = home.archives.get("daily")
    daily.backfill()
    daily.promote()
    daily.drop(1)
    assert erase(home).verdict == "erased"


def test_archives_that_hold_the_same_event_are_named(home: Home, tmp_path: Path) -> None:
    fill(home)
    for name, source in (("first", "topic:t"), ("copy", "archive:first"), ("raw", "topic:t")):
        drive(home, an_archive(home, name, source=source))
    home.delete_topic("t", past_readers=True)
    fill(home)  # another topic of this name, with other events
    drive(home, an_archive(home, "other"))
    for name, holders in (("copy", ["first", "raw"]), ("first", ["raw"]), ("raw", [])):
        proof = erase(home, name=name)
        assert [each.object.split("/")[1] for each in proof.traces] == holders
        for each, holder in zip(proof.traces, holders, strict=True):
            assert each.what == "holds 1 of them"
            assert f"tidelog archive erase {holder} --id ID --prove" in each.do
    assert prove(home, "copy") == []
    assert any(GONE in contents(each) for each in tmp_path.glob("o/archives/other/**/*.parquet"))


def test_archives_of_the_same_files_are_searched_too(home: Home, tmp_path: Path) -> None:
    of_files(home, tmp_path)
    source = f"file:{tmp_path}/src?mode=events"
    drive(home, an_archive(home, "again", source=source))
    drive(home, an_archive(home, "far", source="archive:again"))
    write_events(tmp_path / "elsewhere" / "src", "a.jsonl", [(GONE, 0, "2025-01-01T00:00:00Z")])
    other = f"file:{tmp_path}/elsewhere/src?mode=events"
    drive(home, an_archive(home, "other", source=other))
    proof = erase(home)
    assert [each.object.split("/")[1] for each in proof.traces] == ["again", "far"]
    where = f"source `{source}`: was not searched: delete these events there too"
    assert where in proof.out_of_reach
    erase(home, name="again")
    assert prove(home) == []


def test_event_that_is_archived_after_the_erasure_is_another_one(
    home: Home, tmp_path: Path
) -> None:
    of_files(home, tmp_path)
    assert erase(home).is_clean
    for time, left in (("2025-01-01T00:00:00Z", 0), (LATE, 1)):
        write_events(tmp_path / "src", "more", [(GONE, 0, time)])
        more = (tmp_path / "src" / "more").read_text()
        (tmp_path / "src" / "more").unlink()
        with (tmp_path / "src" / "a.jsonl").open("a") as file:
            file.write(more)
        drive(home, home.archives.get("daily").info)
        assert len(holding(tmp_path, GONE)) == left, "drivers leave out what is older"
    assert [each.suffix for each in holding(tmp_path, GONE)] == [".parquet"]
    assert home.archives.get("daily").prove_erased(ids=[GONE]).verdict == "erased"
    assert erase(home).deleted.archived == 1  # type: ignore[union-attr]
    assert holding(tmp_path, GONE) == []


def test_copies_in_topics_are_searched(home: Home) -> None:
    of_a_deleted_topic(home, Path())
    home.create_topic("back", 1)
    home.archives.get("daily").restore("topic:back")
    (trace,) = erase(home).traces
    assert "topic `back` (pipeline `" in trace.copy
    assert trace.do == "run `tidelog delete back ID --prove`"
    assert home.erase("back", ids=[GONE]).is_erased
    assert prove(home) == []


def test_range_under_way_may_hold_an_event_that_no_file_has(home: Home) -> None:
    home.create_topic("t", 1)
    home.append("t", [Event(b"%d" % n, key=b"ada", id=f"e{n}") for n in range(3)])
    archive = an_archive(home)
    _stalled(home, archive)
    home.delete_topic("t", past_readers=True)
    clock = _Waiting(home.context.clock, lambda: None)
    home.context = dataclasses.replace(home.context, clock=clock)
    daily = home.archives.get("daily")
    proof = daily.erase(key=b"ada", prove=True)
    assert proof.deleted is not None
    assert (proof.verdict, proof.deleted.archived) == ("not erased", 1)
    assert any("a range of archive `daily` is under way" in each.what for each in proof.traces)
    with pytest.raises(KeyError):
        drive(home, archive)  # commits what was decided; its topic is gone
    assert [each.what for each in daily.prove_erased(keys=[b"ada"]).traces] == ["holds 2 of them"]
    assert daily.erase(key=b"ada", prove=True).verdict == "erased"


def test_call_that_dies_before_its_proof_is_repeated(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_files(home, tmp_path)
    for name in ("_repair_and_sweep", "prove_erased_from_archive"):

        def die(*_: object) -> None:
            raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(whole_erasure, name, die)
            with pytest.raises(Crash):
                erase(home)
    proof = erase(home)
    assert proof.deleted is not None
    assert (proof.verdict, proof.deleted.archived, proof.deleted.missing) == ("erased", 0, (GONE,))
    assert holding(tmp_path, GONE) == []


def test_command_prints_the_verdict_and_writes_the_proof(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    of_files(shell.made, tmp_path)
    file = str(tmp_path / "proof.json")

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["--home", shell.home, *words])
        return done.exit_code, done.output

    code, said = run("archive", "erase", "daily", "--id", "unknown", "--prove", "--yes")
    assert (code, said.split(":")[0]) == (1, "NOTHING TO PROVE")
    code, said = run("archive", "erase", "daily", "--key", "k", "--proof", file, "--yes")
    assert (code, said.splitlines()[0]) == (
        0,
        "ERASED: no object that was searched holds any of it.",
    )
    assert "archive" in said.splitlines()[2]
    assert "6 events" in said
    assert run("proof", "check", file, "--key", "k", "--recorded")[0] == 0
    shell.made.store.put("x.txt", b'"k"')
    code, said = run("archive", "erase", "daily", "--key", "k", "--prove", "--json", "--yes")
    values = json.loads(said)
    assert (code, values["archive"], values["verdict"]) == (1, "daily", "not erased")
