"""What a person does to an archive from its page, each action after a look at what it would do."""

from __future__ import annotations

import pytest

from tests.server.console.test_pages import eventually
from tests.support.serving import Served
from tests.support.visits import Browser, forms_of, text_of
from tidelog import Event, Home
from tidelog.server.console import archives

ACT = "/console/archives/daily/act"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_BUSY_S", 0.2)
    monkeypatch.setattr(archives, "_IDLE_S", 0.2)


def fill_home(home: Home) -> None:
    made = home.archives.create("daily", source="topic:t", parser="iso8601:at", dead_share=1.0)
    home.append("t", [Event(b'{"at": "2026-11-%02dT10:00:00Z"}' % day) for day in range(1, 11)])
    made.run()


def do(browser: Browser, action: str, **fields: str) -> str:
    """Shows what an action would do, starts it, and returns what the page said."""
    preview = show(browser, action, **fields)
    start(browser, preview)
    return text_of(preview)


def show(browser: Browser, action: str, **fields: str) -> str:
    """Returns the page that says what an action would do."""
    page = browser.get("/console/archives/daily")
    forms = [form for form in forms_of(page) if form.fields.get("do") == action]
    asked = browser.post(ACT, {**forms[0].fields, **fields})
    assert asked.status_code == 200, text_of(asked.text)
    return asked.text


def start(browser: Browser, preview: str) -> None:
    """Starts what a page announces."""
    begun = browser.send(preview, ACT)
    assert begun.headers["location"] == "/console/jobs"


def test_an_archive_is_run_backfilled_promoted_and_rolled_back(
    served: Served, browser: Browser
) -> None:
    archive = served.home.archives.get("daily")
    served.home.append("t", [Event(b'{"at": "2026-11-11T10:00:00Z"}')])
    assert "1 event waiting in the source" in do(browser, "run")
    eventually(
        lambda: browser.get("/console/jobs"), "1 event read, 0 dead letters, wrote 1 data file"
    )
    said = do(browser, "backfill", granularity="hour")
    assert "Generation 2 is built beside generation 1" in said
    assert "granularity hour instead of day" in said
    eventually(lambda: browser.get("/console/jobs"), "generation 2 has 11 more events")
    assert archive.reload().generation == 1
    said = do(browser, "promote")
    assert "11 events, where generation 1 has 11" in said
    eventually(lambda: browser.get("/console/jobs"), "generation 2 is the live one")
    page = browser.get("/console/archives/daily")
    assert "1 kept parquet" in text_of(page)
    assert "2 live parquet, parser iso8601:at , by hour" in text_of(page)
    assert "Roll daily back to generation 1?" in do(browser, "rollback")
    eventually(lambda: browser.get("/console/jobs"), "generation 1 is the live one")
    assert archive.reload().generation == 1
    audited = [(each.op, each.what) for each in served.home.actions()]
    actions = ("run", "backfill", "promote", "rollback")
    assert audited[2:] == [(f"archive {each}", "archive daily") for each in actions]


def test_a_part_is_written_again_after_its_cost_is_shown_and_dropped(
    served: Served, browser: Browser
) -> None:
    archive = served.home.archives.get("daily")
    said = do(browser, "redo", dates="2026-11-02, 2026-11-03", parser="timestamp")
    assert "Writes 2 events of 2 files again, with parser timestamp." in said
    assert "Copies 8 other files (" in said
    assert "which on S3 costs about 48 requests." in said
    done = "generation 2 has 10 events, copied or written again"
    eventually(lambda: browser.get("/console/jobs"), done)
    page = browser.get("/console/archives/daily")
    assert "Resume the redo" in page
    assert 'value="2026-11-02, 2026-11-03"' in page
    assert "Resume the backfill" not in page, "it would be refused"
    assert archive.reload().generation == 1
    said = do(browser, "drop")
    assert "Deletes its files: 9 written so far (" in said
    eventually(lambda: browser.get("/console/jobs"), "generation 2 and its files are deleted")
    assert sorted(archive.reload().formats) == [1]


def test_folders_are_marked_and_a_table_is_kept_up_to_date(
    served: Served, browser: Browser
) -> None:
    archive = served.home.archives.get("daily")
    preview = show(browser, "finalize", delay="0s")
    assert "date folders will have a _SUCCESS file" in text_of(preview)
    assert archive.reload().watermark_ms is None, "not yet"
    start(browser, preview)
    eventually(lambda: browser.get("/console/jobs"), "date folders marked, complete up to")
    assert archive.reload().watermark_ms is not None
    assert "Creates table delta" in do(browser, "register")
    eventually(lambda: browser.get("/console/jobs"), "delta: 10 data files with 10 events added")
    page = eventually(lambda: browser.get("/console/archives/daily"), "delta yes up to date")
    assert archive.reload().kept == ("delta",)
    asked = browser.post(ACT, {**forms_of(page)[0].fields, "do": "register", "table": "delta"})
    assert "0 data files with 0 events to add" in text_of(asked.text)


def test_forms_of_an_archive_keep_what_was_typed_when_they_fail(
    served: Served, browser: Browser
) -> None:
    typed = {
        "backfill": {"parser": "nonsense:at", "granularity": "hour", "format": "orc", "start": "1"},
        "redo": {"dates": "someday", "topics": "t", "parser": "timestamp"},
        "finalize": {"delay": "soon"},
    }
    for action, fields in typed.items():
        page = browser.get("/console/archives/daily")
        (form,) = [form for form in forms_of(page) if form.fields.get("do") == action]
        failed = browser.post(ACT, {**form.fields, **fields})
        assert failed.status_code == 400, action
        assert 'role="alert"' in failed.text
        (form,) = [form for form in forms_of(failed.text) if form.fields.get("do") == action]
        assert {name: form.fields.get(name) for name in fields} == fields
    asked = {**form.fields, "do": "replay", "parser": "nonsense"}
    failed = browser.post(ACT, asked)
    assert failed.status_code == 400
    assert "daily" in text_of(failed.text)


def test_tables_that_were_not_looked_at_yet_are_listed(served: Served, browser: Browser) -> None:
    served.home.archives.get("daily").tables.register("delta")
    page = browser.get("/console/archives/daily")  # before the next look at archives
    assert "delta no" in text_of(page)


def test_the_history_shows_when_events_were_archived(served: Served, browser: Browser) -> None:
    page = browser.get("/console/archives/daily")
    assert 'aria-label="Events archived from' in page
    assert 'class="bar"' in page
    history = served.home.archives.get("daily").history(bars=5)
    assert sum(bar.events for bar in history.bars) == 10
    assert len(history.bars) <= 5
    assert [(each.partition, each.start, each.end) for each in history.ranges] == [
        ("t/0", "0", "10")
    ]
    assert history.is_whole


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("", {}),
        ("delete", {}),
        ("promote", {}),  # nothing is built
        ("rollback", {"generation": "1"}),  # is live
        ("rollback", {"generation": "9"}),
        ("finalize", {"delay": "soon"}),
        ("register", {"table": "iceberg:http://elsewhere#a.b"}),
        ("register", {"table": "glue:a.b"}),
        ("backfill", {"parser": "os:system"}),
        ("backfill", {"parser": "first:json:at||os:system"}),
        ("backfill", {"parser": "first:json:at|| avro:at?schema=/etc/passwd"}),
        ("backfill", {"format": "exe"}),
        ("redo", {}),  # no part
        ("redo", {"dates": "yesterday"}),
        ("redo", {"dates": "2026-11-02", "parser": "os:system"}),
        ("drop", {"generation": "1"}),  # is live
        ("drop", {"generation": "9"}),
        ("replay", {}),  # no dead letters
    ],
)
def test_what_cannot_be_done_is_refused_before_it_begins(
    served: Served, browser: Browser, action: str, fields: dict[str, str]
) -> None:
    page = browser.get("/console/archives/daily")
    form = next(form for form in forms_of(page) if form.action == ACT)
    sent = {**form.fields, "do": action, **fields, "sure": "1"}
    assert browser.post(ACT, sent).status_code == 400
    assert served.home.jobs.list() == []


def test_preview_of_a_backfill_refuses_a_parser_that_cannot_work(browser: Browser) -> None:
    page = browser.get("/console/archives/daily")
    (form,) = (each for each in forms_of(page) if each.fields.get("do") == "backfill")
    asked = browser.post(ACT, {**form.fields, "parser": "json:"})
    assert asked.status_code == 400
    assert "names no field: give json:field" in text_of(asked.text)
    assert 'value="json:"' in asked.text, "what was typed is kept"
    page = text_of(browser.get("/console/archives/daily"))
    assert "at 200 MB, or after" in page, "a limit is shown as it was given"


def test_promote_of_another_generation_than_was_shown_is_refused(
    served: Served, browser: Browser
) -> None:
    archive = served.home.archives.get("daily")
    archive.backfill(granularity="hour")
    shown = show(browser, "promote")
    archive.drop(2)
    archive.backfill(codec="gzip")
    refused = browser.send(shown, ACT)
    assert refused.status_code == 409
    assert "has changed: look at it again" in text_of(refused.text)
    assert archive.reload().generation == 1
