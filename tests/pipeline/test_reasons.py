"""An audit keeps its reasons, and an erasure takes the words out of them that are erased ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.catalog.test_deleted_rows import files_with
from tests.support.archive_look import a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.coordination.audit import (
    AuditedEvent,
    AuditRecord,
    Why,
    id_hash,
    put_record,
    read_audit,
)
from tidelog.erasure.delete import delete_events, delete_key
from tidelog.erasure.delete_archived import erase_archived
from tidelog.erasure.event_search import matcher_of
from tidelog.erasure.redaction import redact_reasons
from tidelog.errors import NotFoundError
from tidelog.journal import amend
from tidelog.maintenance.erase import purge

SIGNS = ("#4711", "(x)", ",", " ")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        ids = ("order-17", "order-170", "u@example.com", "Ada Low", "erased", *SIGNS)
        made.append("t", [Event(b"1", key=b"customer-7", id=each) for each in ids])
        drive(made, an_archive(made, "raw"))
        yield made


def reasons(home: Home) -> list[str]:
    """The reasons of a topic's records, in any order within a millisecond."""
    return [record.why for record in read_audit(home.context, home.topic("t"))]


@pytest.mark.parametrize(
    ("event_id", "given", "kept"),
    [
        ("order-17", "order-17, not order-170: twice", "[erased], not order-170: twice"),
        ("order-17", "see (order-17).", "see ([erased])."),
        ("u@example.com", "mail of u@example.com.", "mail of [erased]."),
        ("Ada Low", "Ada Low asked", "[erased] asked"),
        ("order-17", "request 17", "request 17"),
        ("erased", "erased by order-170", "[erased] by order-170"),
        ("u@example.com", "id=u@example.com", "id=[erased]"),
        ("u@example.com", "<mailto:u@example.com>", "<mailto:[erased]>"),
        ("u@example.com", "/users/u@example.com/mails", "/users/[erased]/mails"),
        ("u@example.com", "of_u@example.com's wish", "of_[erased]'s wish"),
        ("u@example.com", "not lou@example.com", "not lou@example.com"),
        ("#4711", "ticket#4711, not #47110", "ticket[erased], not #47110"),
        ("(x)", "f(x) and (x)", "f[erased] and [erased]"),
        ("Ada Low", "name=Ada Low;", "name=[erased];"),
        (",", "one, two , three", "one, two [erased] three"),
        (" ", "blanks are not quotes", "blanks are not quotes"),
    ],
)
def test_id_in_a_reason_is_replaced(home: Home, event_id: str, given: str, kept: str) -> None:
    delete_events(home.context, home.amender("t", Why("me", given)), [event_id])
    assert reasons(home) == [kept]
    purge(home.context, home.topic("t"), 0)
    assert home.prove_erased("t", ids=[event_id]).is_erased


@pytest.mark.parametrize("event_id", ["u@example.com", "#4711"])
def test_no_row_quotes_an_id_in_a_reason_or_as_an_author(
    home: Home, tmp_path: Path, event_id: str
) -> None:
    for given in ("id={}", "mailto:{}", "/u/{}/", "“{}”", "*{}*", "{}'s", "of_{}"):
        home.update("t", "order-17", b"2", why=given.format(event_id), who=f"by {event_id}")
    assert home.erase("t", ids=[event_id], why=f"id={event_id}", who=event_id).is_clean
    assert files_with(tmp_path, event_id.encode()) == []
    authors = {each.who for each in read_audit(home.context, home.topic("t"))}
    assert authors == {"[erased]", "by [erased]"}


def test_mark_in_a_reason_stays_as_it_is(home: Home) -> None:
    home.update("t", "order-17", b"2", why="[erased] was erased (erased)")
    home.delete("t", ["erased"])
    assert "[erased] was [erased] ([erased])" in reasons(home)


def test_reason_of_a_seek_is_replaced_by_an_erasure(home: Home, tmp_path: Path) -> None:
    home.archives.get("raw").seek(to="latest", why="wrong: of u@example.com")
    home.delete("t", ["u@example.com"])
    (trace,) = home.prove_erased("t", ids=["u@example.com"]).traces[-1:]
    assert trace.object.startswith("audit · ")
    assert trace.do.startswith("run `tidelog delete t ID --prove`")
    assert home.erase("t", ids=["u@example.com"]).is_clean
    (seek,) = [each for each in home.actions() if each.op == "archive seek"]
    assert seek.note.endswith(": wrong: of [erased]")
    assert files_with(tmp_path, b"u@example.com") == []


def test_reason_of_an_earlier_update_is_replaced_too(home: Home, tmp_path: Path) -> None:
    home.update("t", "order-17", b"2", why="customer-7 paid order-17")
    delete_key(home.context, home.amender("t", Why("me", "customer-7 asked")), b"customer-7")
    assert sorted(reasons(home)) == ["[erased] asked", "[erased] paid order-17"]
    purge(home.context, home.topic("t"), 0)
    assert home.prove_erased("t", keys=[b"customer-7"]).is_erased
    assert files_with(tmp_path, b"customer-7") == []


def test_proof_names_a_reason_that_quotes_the_event(home: Home) -> None:
    home.amender("t", Why("me", "order-17 was wrong")).delete(["order-17"])
    purge(home.context, home.topic("t"), 0)
    (trace,) = home.prove_erased("t", ids=["order-17"]).traces
    assert trace.object.startswith("audit/")
    assert trace.what == "quotes one of them in its reason"
    delete_events(home.context, home.amender("t", Why("me", "again")), ["order-17"])
    assert reasons(home) == ["[erased] was wrong"]
    assert home.prove_erased("t", ids=["order-17"]).is_erased


def test_reason_of_a_delete_that_died_is_replaced(home: Home) -> None:
    topic = home.topic("t")
    events = (AuditedEvent(id_hash("order-17"), 0, 0),)
    for why in ("customer-7 asked", "order-17"):
        record = AuditRecord(home.context.ids.new(), "delete", "me", 1, why, events)
        put_record(home.context, topic, record)
    assert home.erase("t", key=b"customer-7").is_clean
    states = [(record.why, record.state) for record in read_audit(home.context, topic)]
    assert ("[erased] asked", "begun") in states
    home.delete("t", ["order-17"])
    assert not any("order-17" in why for why in reasons(home))


def test_delete_at_work_keeps_what_another_has_replaced_in_its_reason(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another delete comes after each write to the audit, and copies make the record grow."""
    topic = home.topic("t")
    sought = matcher_of(["order-170"], None).deletions
    real, written = amend.put_record, list[str]()

    def put(*given: Any) -> Any:
        stored = real(*given)
        redact_reasons(home.context, [topic], sought)
        written.append(given[2].state)
        return stored

    def announced(*given: Any) -> Any:
        if written == ["begun"]:
            written.append("copied")
            home.append("t", [Event(b"copy", id="order-17")])
        return announce(*given)

    announce = amend.announce_erasure
    monkeypatch.setattr(amend, "put_record", put)
    monkeypatch.setattr(amend, "announce_erasure", announced)
    amender = home.amender("t", Why("me", "order-170 was order-17"))
    assert amender.delete(["order-17"]).events == 2
    assert written == ["begun", "copied", "begun", "done"]
    (record,) = read_audit(home.context, topic)
    assert (record.why, record.state, len(record.events)) == ("[erased] was order-17", "done", 2)


def test_lost_reply_of_a_record_that_another_has_changed_is_settled(home: Home) -> None:
    """The write has landed, and a repeat of it meets what another process made of the record."""
    topic = home.topic("t")
    record = AuditRecord(home.context.ids.new(), "delete", "me", 1, "order-17", ())
    _, version = put_record(home.context, topic, record)
    done = msgspec.structs.replace(record, state="done")
    put_record(home.context, topic, done, version)
    redact_reasons(home.context, [topic], matcher_of(["order-17"], None).deletions)
    stored, _ = put_record(home.context, topic, done, version)
    assert (stored.state, stored.why) == ("done", "[erased]")
    with pytest.raises(NotFoundError):
        put_record(home.context, topic, msgspec.structs.replace(done, id="gone"), version)


def test_audit_of_an_archive_keeps_no_id_either(home: Home, tmp_path: Path) -> None:
    home.delete("t", ["order-170"], why="unlike u@example.com")
    home.delete_topic("t", past_readers=True)
    archive = home.archives.get("raw").info
    erase_archived(home.context, archive, Why("me", "u@example.com asked"), ["u@example.com"])
    assert [each.why for each in read_audit(home.context, archive)] == [
        "unlike [erased]",
        "[erased] asked",
    ]
    home.sweep(0)
    assert files_with(tmp_path, b"u@example.com") == []
