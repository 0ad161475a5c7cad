"""The console's pages of journals: amendments, the audit, and erasing somebody with its proof."""

from __future__ import annotations

from pathlib import Path

from tests.server.console.test_pages import eventually
from tests.support.serving import Served
from tests.support.visits import Browser, text_of
from tidelog import Event, Home, Proof
from tidelog.archive.archive import create_archive, open_pipeline
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment
from tidelog.log.producer.append import Appender
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.server.console.format import url

SECRET = b"the person's own words"


def fill_home(home: Home) -> None:
    home.create_topic("people", 2)
    events = [
        Event(SECRET + b" %d" % n, key=b"person-%d" % (n % 4), id=f"note {n}", timestamp=1_000 * n)
        for n in range(40)
    ]
    home.append("people", events)
    context = home.context
    wanted = Archive(
        "kept",
        context.ids.new(),
        "topic:people",
        "backup",
        home.store.url,
        "archives/kept",
        context.clock.now_ms(),
        {1: ArchiveFormat()},
    )
    create_archive(home.context, wanted)
    pipeline = open_pipeline(home.context, home.archives.get("kept").info, LocalWorkers())
    Driver(context, pipeline, DriverOptions()).run()


ERASE = "/console/topics/people/erase"


def test_what_was_amended_is_marked_and_told(served: Served, browser: Browser) -> None:
    where = served.home.get("people", "note 5").position
    gone = served.home.get("people", "note 6").position
    served.home.update("people", "note 5", b"corrected", why="a <b>typo</b>", who="ann")
    served.home.delete("people", "note 6", why="asked for")
    page = browser.get(f"/console/topics/people/events?partition={where.partition}&offset=0")
    assert f"{where.partition}/{where.offset} amended" in text_of(page)
    page = browser.get(f"/console/topics/people/events?partition={gone.partition}&offset=0")
    said = text_of(page)
    assert f"{gone.partition}/{gone.offset} deleted 1 event was deleted" in said
    assert "waits to be compiled out" in said
    path = f"/console/topics/people/events/{where.partition}/{where.offset}"
    assert "amended" in text_of(browser.get(path))
    missing = browser.get(f"/console/topics/people/events/{gone.partition}/{gone.offset}", 404)
    assert "was deleted" in text_of(missing)
    said = text_of(browser.get("/console/topics/people/journals"))
    assert f"{where.partition}/{where.offset} update" in said
    assert f"{gone.partition}/{gone.offset} delete" in said
    assert "ann a <b>typo</b> 1 done" in said
    eventually(lambda: browser.get("/console/journals"), "people 40 0 2 to be compiled")
    served.home.compile("people")
    assert "Nothing: every update" in text_of(browser.get("/console/topics/people/journals"))
    page = browser.get(f"/console/topics/people/events?partition={gone.partition}&offset=0")
    assert f"{gone.partition}/{gone.offset} deleted" in text_of(page)
    eventually(lambda: browser.get("/console/topics/people"), "39 in 2 partitions")
    assert "corrected" in browser.get(path)


def test_a_person_is_erased_with_a_proof(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/people/journals")
    asked = browser.send(page, ERASE, key="person-3", why="request 2026-118")
    said = text_of(asked.text)
    assert "All events with the key person-3 will be erased" in said
    assert "10 events" in said
    assert "request 2026-118" in said
    assert served.home.get("people", "note 3")  # nothing is done by looking
    begun = browser.send(asked.text, ERASE)
    assert begun.status_code == 303
    proof = begun.headers["location"]
    page = eventually(lambda: browser.get(proof), "Erased: nothing is left")
    said = text_of(page)
    assert "Events deleted 10" in said
    assert "Left 0 traces" in said
    folder = Path(served.home.store.url.removeprefix("file://"))
    held = [e.key for p in range(2) for e in served.home.read("people", p)]
    assert held.count(b"person-3") == 0
    assert len(held) == 30
    assert not any(b"person-3" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    file = browser.client.get(f"{proof}?download=1")
    saved = folder.parent / "proof.json"
    saved.write_bytes(file.content)
    loaded = Proof.load(saved)
    assert (loaded.verdict, loaded.is_about(key=b"person-3")) == ("erased", True)
    assert served.home.has_proof(loaded)
    assert loaded.sha256 in said
    audit = text_of(browser.get("/console/topics/people/journals"))
    assert "delete by key" in audit
    assert "request 2026-118" in audit
    assert "person-3" not in audit.replace("customer-7", "")
    assert f"by {served.home.reason().who}" in text_of(browser.get("/console/jobs"))


def test_events_are_erased_by_ids_with_blanks_in_them(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/people/journals?id=note+7")
    asked = browser.send(page, ERASE, why="entered twice")
    assert "The event with the id note 7 will be erased: 1 event ." in text_of(asked.text)
    begun = browser.send(asked.text, ERASE)
    eventually(lambda: browser.get(begun.headers["location"]), "Erased: nothing is left")
    assert len([e for p in range(2) for e in served.home.read("people", p)]) == 39
    asked = browser.send(page, ERASE, ids="note 8\r\nnot there\r\n\r\nnote 9", why="two")
    assert "3 ids" in text_of(asked.text)
    begun = browser.send(asked.text, ERASE)
    said = eventually(lambda: browser.get(begun.headers["location"]), "Nothing is left, but")
    assert "1 id not found" in text_of(said)
    assert "was never deleted here" in text_of(said)
    assert len([e for p in range(2) for e in served.home.read("people", p)]) == 37


def test_id_that_only_an_object_without_a_row_has_counts_as_found(
    served: Served, browser: Browser
) -> None:
    """A producer died between its upload and its commit; a recovery would append the event."""
    context, topic = served.home.context, served.home.topic("people")
    appender = Appender(context, topic, f"~{context.ids.new()}")
    event = Event(b"never committed", id="stray", timestamp=context.clock.now_ms())
    parts = [(0, table_of([event], context.clock.now_ms()))]
    appender.upload(encode_segment(parts, appender.known([0])))
    page = browser.get("/console/topics/people/journals")
    asked = browser.send(page, ERASE, ids="stray\r\nnowhere", why="request 2026-119")
    begun = browser.send(asked.text, ERASE)
    said = text_of(eventually(lambda: browser.get(begun.headers["location"]), "Searched at"))
    assert "Events deleted 1 1 id not found" in said


def test_all_events_of_an_id_or_key_are_counted_before_an_erasure(
    served: Served, browser: Browser
) -> None:
    for partition in (0, 1):
        twice = [Event(b"again", id="note 7", key=b"person-3")]
        served.home.append("people", twice, partition=partition)
    page = browser.get("/console/topics/people/journals")
    asked = browser.send(page, ERASE, ids="note 7", why="entered twice")
    assert "All events with the id note 7 will be erased: 3 events ." in text_of(asked.text)
    asked = browser.send(page, ERASE, key="person-3", why="request 2026-118")
    assert "will be erased: 12 events ." in text_of(asked.text)
    assert "The first 10 of them:" in text_of(asked.text)


def test_an_erasure_says_whose_and_why(served: Served, browser: Browser) -> None:
    page = browser.get("/console/topics/people/journals")
    for wrong in (
        {"why": "x"},
        {"key": "k", "ids": "i", "why": "x"},
        {"key": "person-1"},
        {"ids": "\n".join(map(str, range(2_000))), "why": "x"},
        {"ids": "note 1", "why": "x" * 3_000},
    ):
        fields = {"ids": "", "key": "", "why": "", **wrong}
        assert browser.send(page, ERASE, **fields).status_code == 400, wrong
    assert len([e for p in range(2) for e in served.home.read("people", p)]) == 40
    browser.get("/console/proofs/none", 404)


def test_a_form_erases_exactly_what_it_names(served: Served, browser: Browser) -> None:
    home = served.home
    home.create_topic("odd", 1)
    ids = ["a", "a\r", "a\n", "a\u2028b", "a\x0cb", "b", " ", '"a"']
    home.append("odd", [Event(each.encode(), id=each) for each in ids])
    home.append("odd", [Event(b"key", key=each) for each in (b"u", b"u ", b"u\n")])
    action = "/console/topics/odd/erase"

    def erase(**query: str) -> None:
        page = browser.get(url("/console/topics", "odd", "journals", **query))
        asked = browser.send(page, action, why="asked for")
        begun = browser.send(asked.text, action)
        eventually(lambda: browser.get(begun.headers["location"]), "Erased: nothing is left")

    erase(key="u ")
    assert [e.key for e in home.read("odd") if e.key] == [b"u", b"u\n"]
    erase(key="u\n")
    assert [e.key for e in home.read("odd") if e.key] == [b"u"]
    for each in ["a\r", "a\n", "a\u2028b", "a\x0cb", " ", '"a"']:
        erase(id=each)
        ids.remove(each)
        assert [e.id for e in home.read("odd") if e.id] == ids
