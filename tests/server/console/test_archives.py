"""The console's pages of archives and pumps: how far, files, dead letters and their replay."""

from __future__ import annotations

import pytest

from tests.server.console.test_pages import eventually
from tests.support.serving import Served
from tests.support.visits import Browser, text_of
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, create_archive, find_archive, open_pipeline
from tidelog.coordination.jobs import Keeper, SupervisedPart, put_keeper
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.server.console import archives

ACT = "/console/archives/daily/act"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change shows after the next look, which would be seconds later."""
    monkeypatch.setattr(archives, "_BUSY_S", 0.2)
    monkeypatch.setattr(archives, "_IDLE_S", 0.2)


def fill_home(home: Home) -> None:
    home.create_topic("copy")
    context = home.context
    wanted = Archive(
        "daily",
        context.ids.new(),
        "topic:t",
        "partition",
        home.store.url,
        "archives/daily",
        context.clock.now_ms(),
        {1: ArchiveFormat(parser="iso8601:at")},
        dead_share_max=1.0,
    )
    create_archive(home.context, wanted)
    good = [Event(b'{"at": "2026-11-%02dT10:00:00Z"}' % day) for day in range(1, 21)]
    bad = [Event(b'{"made": "2026-11-15T10:00:00Z", "x": "<script>"}') for _ in range(5)]
    home.append("t", [*good, *bad])
    drive(home)
    pump = open_pump(home.context, PumpOptions("topic:t", "copy", "copying"), LocalWorkers())
    Driver(context, pump, DriverOptions()).run()


def drive(home: Home, accept_loss: bool = False) -> None:
    pipeline = open_pipeline(home.context, home.archives.get("daily").info, LocalWorkers())
    Driver(home.context, pipeline, DriverOptions(accept_loss=accept_loss)).run()


def test_archive_shows_what_became_of_every_offset(served: Served, browser: Browser) -> None:
    page = eventually(lambda: browser.get("/console/archives/daily"), "What became of every offset")
    # partition, begin, why, position, offsets, archived, dead, dropped, erased, never, gaps
    assert "t/0 0 earliest 25 25 20 5 0 0 0 0 yes" in text_of(page)
    assert "Gaps" not in text_of(page)
    home = served.home
    home.append("t", [Event(b'{"at": "2026-11-20T10:00:00Z"}') for _ in range(10)])
    home.trim("t", ToOffsets({0: 30}), past_readers=True)
    drive(home, accept_loss=True)
    row = "t/0 0 earliest 35 35 25 5 0 0 0 5 yes"
    page = eventually(lambda: browser.get("/console/archives/daily"), row)
    assert "t/0 25 30 5 retention" in text_of(page)  # partition, from, to, offsets, reason


def test_archives_and_pumps_are_listed(served: Served, browser: Browser) -> None:
    page = eventually(lambda: browser.get("/console/archives"), "daily", "copying")
    assert "topic:t" in page
    page = browser.get("/console/archives/daily")
    assert "t/0 25 25 0" in text_of(page)  # partition, position, end, lag
    assert "5 dead letters (limit 0)" in text_of(page)
    served.home.append("t", [Event(b"{}")])
    eventually(lambda: browser.get("/console/archives/daily"), "t/0 25 26 1")
    page = browser.get("/console/pumps/copying")
    assert "25" in text_of(page)
    browser.get("/console/archives/none", 404)
    browser.get("/console/pumps/none", 404)
    page = eventually(lambda: browser.get("/"), "dead letters")
    assert '<a href="/console/archives/daily">Open the archive</a>' in page


def test_files_are_a_tree_by_partition_names(served: Served, browser: Browser) -> None:
    path = "/console/archives/daily/files"
    page = browser.get(path)
    assert "under=t" in page
    days = browser.get(f"{path}?under=t")
    for day in range(1, 21):
        assert f"dt=2026-11-{day:02}" in days
    files = browser.get(f"{path}?under=t/dt=2026-11-03")
    archive = find_archive(served.home.context, "daily")
    (name,) = [
        file.target.rpartition("/")[2]
        for _, file in committed_files(served.home.context, archive)
        if "2026-11-03" in file.target
    ]
    assert name in files
    for wrong in ("../..", "t/../..", "./t"):
        browser.get(f"{path}?under={wrong}", 400)
    assert "Nothing is here yet" in browser.get(f"{path}?under=nothing")


def test_large_folders_come_in_parts(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.api.archive_view._ENTRIES_MAX", 7)
    seen: list[str] = []
    path = "/console/archives/daily/files?under=t"
    for _ in range(10):
        page = browser.get(path)
        seen += [f"{day:02}" for day in range(1, 21) if f"dt=2026-11-{day:02}</bdi>" in page]
        if 'rel="next"' not in page:
            break
        path = page.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    assert seen == [f"{day:02}" for day in range(1, 21)]


def test_dead_letters_with_their_reasons_and_their_replay(served: Served, browser: Browser) -> None:
    page = browser.get("/console/archives/daily/dead")
    said = text_of(page)
    assert "field at is missing or null" in said
    assert "t /0/20" in said
    assert "<script>" not in page.replace("<script src", "")
    asked = preview_replay(browser)
    assert "Parser iso8601:at accepts 0 of 5, and rejects 5." in text_of(asked)
    assert "field at is missing or null 5 5" in text_of(asked)
    assert "A replay would change nothing" in text_of(asked)
    assert served.home.jobs.list() == [], "it is only a preview"
    asked = preview_replay(browser, "iso8601:made")
    assert "Parser iso8601:made accepts 5 of 5, and rejects 0." in text_of(asked)
    assert "field at is missing or null 5 0" in text_of(asked)
    begun = browser.send(asked, ACT)
    assert begun.headers["location"] == "/console/jobs"
    done = "5 dead letters tried, 5 archived now, 0 still dead"
    eventually(lambda: browser.get("/console/jobs"), done)
    assert "There are none" in browser.get("/console/archives/daily/dead")
    archive = find_archive(served.home.context, "daily")
    assert sum(file.events for _, file in committed_files(served.home.context, archive)) == 25
    eventually(lambda: browser.get("/console/archives/daily"), "Dead letters 0")


def test_a_replay_from_a_page_runs_no_code_of_others(served: Served, browser: Browser) -> None:
    page = browser.get("/console/archives/daily/dead")
    for parser in ("os:system", "tests.some:Parser", "/etc/passwd", "json"):
        answer = browser.send(page, ACT, parser=parser, sure="1")
        assert answer.status_code == 400
    assert served.home.jobs.list() == []


def preview_replay(browser: Browser, parser: str = "") -> str:
    page = browser.get("/console/archives/daily/dead")
    answer = browser.send(page, ACT, parser=parser)
    assert answer.status_code == 200, text_of(answer.text)
    return answer.text


def test_what_is_kept_running_is_shown_on_the_overview(served: Served, browser: Browser) -> None:
    context = served.home.context
    now_ms = context.clock.now_ms()
    parts = (
        SupervisedPart("serve", "running", now_ms, pid=41),
        SupervisedPart("archive daily", "failed", now_ms, restarts=3, error="no <b>room</b>"),
    )
    put_keeper(context, Keeper("k", "here", 40, "", now_ms, now_ms, parts=parts))
    page = eventually(lambda: browser.get("/"), "Parts of tidelog up", "archive daily failed")
    assert "fails: no <b>room</b>" in text_of(page)
    assert "<b>room" not in page


def test_a_source_that_is_gone_is_told(served: Served, browser: Browser) -> None:
    eventually(lambda: browser.get("/console/archives/daily"), "t/0")
    served.home.delete_topic("t")
    eventually(lambda: browser.get("/console/archives/daily"), "was deleted: end the archive")
    eventually(lambda: browser.get("/console/pumps/copying"), "its source cannot be reached")
    assert "25" in text_of(browser.get("/console/archives/daily"))
