"""A proof searches the rows of the catalog that may quote an event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.archive_look import a_home, an_archive
from tests.support.named_pipelines import create_pipeline
from tidelog import Event, Home
from tidelog.archive.archive import open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation, promote
from tidelog.connectors.source import SourcePartition
from tidelog.coordination.jobs import Keeper, SupervisedPart, put_keeper, remove_keeper
from tidelog.coordination.pipeline_rows import change_archive
from tidelog.erasure import proof_search as proof
from tidelog.erasure.proof import Trace
from tidelog.errors import InternalError, InvalidError, TidelogError
from tidelog.journal.listing import MovedError, covering
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.topic import Run
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.failures import PipelineFailures, read_failures
from tidelog.pipeline.tasks import LocalWorkers

KEY = b"customer-7"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b'{"at": "customer-7"}', key=KEY) for _ in range(200)])
        yield made


def prove(home: Home) -> list[Trace]:
    purge(home.context, home.topic("t"), grace_ms=0, wait_ms=0)
    return home.prove_erased("t", keys=[KEY]).traces


@pytest.mark.parametrize("times", [1, 1_000])
def test_proof_beside_compiles_reads_again_or_lists_what_it_could_not_see(
    home: Home, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    home.delete_key("t", KEY)
    purge(home.context, home.topic("t"), grace_ms=0)
    failures = iter([MovedError("no row holds offset 0")] * times)

    def move(*given: Any) -> Iterator[Run]:
        for error in failures:
            raise error
        return covering(*given)

    monkeypatch.setattr(proof, "covering", move)
    traces = home.prove_erased("t", keys=[KEY]).traces
    assert ["again and again" in trace.what for trace in traces] == [True] * (times > 1)


def test_error_of_a_failing_archive_that_quotes_an_event_is_a_trace(home: Home) -> None:
    an_archive(home, parser="json:at")
    few = msgspec.structs.replace(home.archives.get("daily").info, dead_share_max=0.1)
    archive = change_archive(home.context, "daily", lambda _: few)
    with pytest.raises(TidelogError, match="customer-7"):
        Driver(
            home.context, open_pipeline(home.context, archive, LocalWorkers(2)), DriverOptions()
        ).run()
    (failure,) = read_failures(home.context, archive.pipeline()).values()
    assert "customer-7" in failure.message
    home.delete_key("t", KEY)
    quoting = [each for each in prove(home) if each.what == "quotes one of them in an error"]
    assert [each.object for each in quoting] == [f"pipeline/{archive.pipeline()} · failure/t/0"]
    Driver(
        home.context, open_pipeline(home.context, archive, LocalWorkers(2)), DriverOptions()
    ).run()
    assert prove(home) == []


SECRET = b"4711-secret"


def run_into_dead_letters(home: Home, parser: str = "json:at") -> Archive:
    """Returns an archive whose driver stops at 200 dead letters, and says so in a row."""
    home.create_topic("s", 1)
    home.append("s", [Event(b'{"at": "%s"}' % SECRET, id=f"e{n}") for n in range(200)])
    wanted = msgspec.structs.replace(
        an_archive(home, "strict", source="topic:s", parser=parser), dead_share_max=0.1
    )
    archive = change_archive(home.context, "strict", lambda _: wanted)
    with pytest.raises(TidelogError, match=SECRET.decode()):
        drive(home, archive)
    return archive


def drive(home: Home, archive: Archive, generation: int | None = None) -> None:
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2), generation)
    Driver(home.context, pipeline, DriverOptions()).run()


def prove_id(home: Home, name: str) -> list[Trace]:
    purge(home.context, home.topic("s"), grace_ms=0, wait_ms=0)
    return home.prove_erased("s", ids=[name]).traces


def rows_with(home: Home, text: bytes, pipeline: str) -> list[str]:
    rows = home.catalog.scan(layout.pipeline_members(pipeline), "", "~")
    return [row.row for row in rows if text in row.value]


def test_value_that_an_error_quotes_is_a_trace_by_its_offset(home: Home) -> None:
    archive = run_into_dead_letters(home)
    where = f"pipeline/{archive.pipeline()} · failure/s/0"
    assert rows_with(home, SECRET, archive.pipeline()) == ["failure/s/0"]
    home.delete("s", ["e7"], why="test")
    assert where not in [each.object for each in prove_id(home, "e7")], "it quotes offset 0"
    home.delete("s", ["e0"], why="test")
    quoting = [each for each in prove_id(home, "e0") if each.object == where]
    assert [each.what for each in quoting] == ["may quote one of them in an error"]


def test_archive_that_was_ended_quotes_nothing(home: Home) -> None:
    archive = run_into_dead_letters(home)
    stalled = PipelineFailures(home.context, archive.pipeline())
    home.delete("s", ["e0"], why="test")
    home.archives.get("strict").delete()
    assert rows_with(home, SECRET, archive.pipeline()) == []
    stalled.add([(SourcePartition("s", "0"), InvalidError("late: 4711-secret", offset=0))])
    assert rows_with(home, SECRET, archive.pipeline()) == []
    assert prove_id(home, "e0") == []


def test_error_without_an_offset_may_quote_what_is_not_committed(home: Home) -> None:
    archive = an_archive(home)
    drive(home, archive)
    home.append("t", [Event(b"{}", id="later")])
    failures = PipelineFailures(home.context, archive.pipeline())
    failures.add([(SourcePartition("t", "0"), InternalError("t/0: unexpected ValueError: 4711"))])
    home.delete_key("t", KEY)  # all of these are committed
    assert prove(home) == []
    home.delete("t", ["later"], why="test")
    (trace,) = home.prove_erased("t", ids=["later"]).traces[-1:]
    assert trace.what == "may quote one of them in an error"


def test_keeper_of_a_failing_archive_may_quote_any_event(home: Home) -> None:
    an_archive(home)
    for name, state in (("archive daily", "failed"), ("archive other", "failed")):
        part = SupervisedPart(name, state, 0, error="not a time: 4711-secret: fix it")
        put_keeper(home.context, Keeper(name[-1], "host", 1, "", 0, 0, parts=(part,)))
    home.delete_key("t", KEY)
    assert [each.object for each in prove(home)] == ["keepers · keeper/y"]


def test_erasure_from_an_archive_deletes_errors_that_quote_the_events(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its range keeps failing.
    monkeypatch.setattr("tidelog.erasure.unfinished_ranges._WAIT_S", 0.0)
    home.create_topic("s", 1)
    home.append("s", [Event(b'{"at": "%s"}' % SECRET, id=f"e{n}") for n in range(200)])
    an_archive(home, "raw", source="topic:s", parser="timestamp")
    few = msgspec.structs.replace(home.archives.get("raw").info, dead_share_max=0.1)
    drive(home, change_archive(home.context, "raw", lambda _: few))
    built, generation = begin_backfill(home.context, "raw", ArchiveFormat(parser="json:at"))
    with pytest.raises(TidelogError, match=SECRET.decode()):
        drive(home, built, generation)
    home.delete_topic("s", past_readers=True)
    assert rows_with(home, SECRET, built.pipeline(generation)) == ["failure/s/0"]
    archive = home.archives.get("raw")
    archive.erase(ids=["e9"], prove=False)
    assert rows_with(home, SECRET, built.pipeline(generation)) == ["failure/s/0"], "of offset 0"
    archive.erase(ids=["e0"], prove=False)
    assert rows_with(home, SECRET, built.pipeline(generation)) == []


def test_error_of_a_kept_generation_is_a_trace_until_it_is_dropped(home: Home) -> None:
    archive = an_archive(home)
    Driver(
        home.context, open_pipeline(home.context, archive, LocalWorkers(2)), DriverOptions()
    ).run()
    built, generation = begin_backfill(home.context, "daily", ArchiveFormat())
    Driver(
        home.context,
        open_pipeline(home.context, built, LocalWorkers(2), generation),
        DriverOptions(),
    ).run()
    fail(home, archive.pipeline(1))
    promote(home.context, "daily")
    home.delete_key("t", KEY)
    (trace,) = prove(home)
    assert "tidelog archive drop" in trace.do
    drop_generation(home.context, "daily", 1)
    assert prove(home) == []


def fail(home: Home, pipeline: str) -> None:
    error = InvalidError("source partition `t/0`: field `at` is not a time: customer-7: fix it")
    PipelineFailures(home.context, pipeline).add([(SourcePartition("t", "0"), error)])


def test_error_of_a_pipeline_or_of_a_keeper_is_a_trace(home: Home) -> None:
    home.create_topic("copy", 1)
    named = create_pipeline(home.context, "pump", "topic:t", "topic:copy")
    fail(home, named.incarnation)
    part = SupervisedPart("archive daily", "failed", 0, error="not a time: customer-7: fix it")
    put_keeper(home.context, Keeper("k", "host", 1, "", 0, 0, parts=(part,)))
    home.delete_key("t", KEY)
    assert {each.object.partition("/")[0] for each in prove(home)} == {
        "pipeline",
        "keepers · keeper",
    }
    PipelineFailures(home.context, named.incarnation).remove([SourcePartition("t", "0")])
    remove_keeper(home.context, "k")
    assert prove(home) == []


@pytest.mark.parametrize("name", ["customer-8", "Ada (née B.)"])
def test_record_of_a_proof_does_not_bring_the_name_back(home: Home, name: str) -> None:
    home.append("t", [Event(b"x", id=name)])
    for why in (f"{name} asked", f"request of '{name}'", name):
        assert home.erase("t", ids=[name], why=why).verdict == "erased"
        assert not any(name in record.why for record in home.audit("t"))
        assert home.prove_erased("t", ids=[name]).traces == []
