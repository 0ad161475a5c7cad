"""A proof searches the rows of the catalog that may quote an event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.pipeline.looking import a_home, an_archive
from tidelog import Event, Home
from tidelog.errors import InvalidError, TidelogError
from tidelog.log.archives import change_archive
from tidelog.log.keepers import Keeper, Part, put_keeper, remove_keeper
from tidelog.model.archive import Making
from tidelog.pipeline.archive import find_archive, open_pipeline
from tidelog.pipeline.driver import Driver, Driving
from tidelog.pipeline.erasure import carry_out
from tidelog.pipeline.failures import Failures, read_failures
from tidelog.pipeline.generations import begin_backfill, drop_generation, promote
from tidelog.pipeline.proof import Trace, prove_erased
from tidelog.pipeline.registry import create_pipeline
from tidelog.pipeline.workers import LocalWorkers
from tidelog.sources.base import SourcePartition

KEY = b"customer-7"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b'{"at": "customer-7"}', key=KEY) for _ in range(200)])
        yield made


def prove(home: Home) -> list[Trace]:
    carry_out(home, home.topic("t"), grace_ms=0, wait_ms=0)
    return prove_erased(home, home.topic("t"), (), [KEY]).traces


def test_error_of_a_failing_archive_that_quotes_an_event_is_a_trace(home: Home) -> None:
    an_archive(home, parser="json:at")
    few = msgspec.structs.replace(find_archive(home, "daily"), dead_share_max=0.1)
    archive = change_archive(home.log, "daily", lambda _: few)
    with pytest.raises(TidelogError, match="customer-7"):
        Driver(home.log, open_pipeline(home, archive, LocalWorkers(2)), Driving()).run()
    (failure,) = read_failures(home.log, archive.pipeline()).values()
    assert "customer-7" in failure.message
    home.delete_key("t", KEY)
    quoting = [each for each in prove(home) if each.what == "quotes one of them in an error"]
    assert [each.object for each in quoting] == [f"pipeline/{archive.pipeline()} · failure/t/0"]
    Driver(home.log, open_pipeline(home, archive, LocalWorkers(2)), Driving()).run()
    assert prove(home) == []


def test_error_of_a_kept_generation_is_a_trace_until_it_is_dropped(home: Home) -> None:
    archive = an_archive(home)
    Driver(home.log, open_pipeline(home, archive, LocalWorkers(2)), Driving()).run()
    built, generation = begin_backfill(home, "daily", Making())
    Driver(home.log, open_pipeline(home, built, LocalWorkers(2), generation), Driving()).run()
    fail(home, archive.pipeline(1))
    promote(home, "daily")
    home.delete_key("t", KEY)
    (trace,) = prove(home)
    assert "tidelog archive drop" in trace.do
    drop_generation(home, "daily", 1)
    assert prove(home) == []


def fail(home: Home, pipeline: str) -> None:
    error = InvalidError("source partition `t/0`: field `at` is not a time: customer-7: fix it")
    Failures(home.log, pipeline).add([(SourcePartition("t", "0"), error)])


def test_error_of_a_pipeline_or_of_a_keeper_is_a_trace(home: Home) -> None:
    home.create_topic("copy", 1)
    named = create_pipeline(home, "pump", "topic:t", "topic:copy")
    fail(home, named.incarnation)
    part = Part("archive daily", "failed", 0, error="not a time: customer-7: fix it")
    put_keeper(home.log, Keeper("k", "host", 1, "", 0, 0, parts=(part,)))
    home.delete_key("t", KEY)
    assert {each.object.partition("/")[0] for each in prove(home)} == {
        "pipeline",
        "keepers · keeper",
    }
    Failures(home.log, named.incarnation).remove([SourcePartition("t", "0")])
    remove_keeper(home.log, "k")
    assert prove(home) == []
