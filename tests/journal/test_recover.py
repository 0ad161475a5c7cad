"""Events of objects that the catalog has forgotten are appended again, once."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.log.maintenance.test_losses import Embedded
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.cli.main import cli
from tidelog.clock import SystemClock
from tidelog.errors import InvalidError, NotFoundError
from tidelog.journal import compile as compile_module
from tidelog.journal import recover as recover_module
from tidelog.journal.compile_steps import Swap
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport
from tidelog.log.maintenance.trim import ToOffsets


@pytest.fixture
def embedded(tmp_path: Path) -> Embedded:
    return Embedded(tmp_path)


def values(home: Home) -> list[str]:
    """Of all partitions, one after another."""
    found: list[str] = []
    for partition in range(home.topic("orders").partitions):
        start = home.partitions("orders", runs=False)[partition].start
        found += [(event.value or b"").decode() for event in home.read("orders", partition, start)]
    return found


def forget(embedded: Embedded) -> None:
    """A catalog that does not know the last two of three events."""
    embedded.append("kept")
    embedded.keep_copy()
    embedded.append("lost", "lost too")
    embedded.go_back()


def test_lost_events_are_appended_in_order_and_sweeps_resume(embedded: Embedded) -> None:
    forget(embedded)
    assert embedded.sweep().refused
    with embedded.open() as home:
        report = home.recover_topic("orders")
        assert (report.objects, report.events, report.appended) == (2, 2, 2)
        assert values(home) == ["kept", "lost", "lost too"]
        after = home.verify("orders")
        assert (after.errors, after.warnings) == (0, 0), after.findings
        assert home.sweep(0).refused == ()
        assert home.sweep(0).refused == ()
        assert values(home) == ["kept", "lost", "lost too"]
    assert len(embedded.segments()) == 3


def test_absent_id_that_met_a_conflict_is_recovered_once(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    find = Lookup.find
    with embedded.open() as home, embedded.open() as other:

        def find_slowly(self: Lookup, *args: Any, **kwargs: Any) -> Any:
            found = find(self, *args, **kwargs)
            monkeypatch.setattr(Lookup, "find", find)
            other.append("orders", [Event(b"other")], partition=0)
            return found

        monkeypatch.setattr(Lookup, "find", find_slowly)
        [position] = home.append("orders", [Event(b"mine", id="mine")], if_absent=True)
        assert position.offset == 2
    embedded.go_back()
    with embedded.open() as home:
        assert home.recover_topic("orders").appended == 2
        assert values(home) == ["kept", "other", "mine"]


def test_dry_run_changes_nothing(embedded: Embedded) -> None:
    forget(embedded)
    with embedded.open() as home:
        before = home.topic("orders")
        report = home.recover_topic("orders", dry_run=True)
        assert (report.dry_run, report.objects, report.appended) == (True, 2, 2)
        assert home.topic("orders") == before
        assert values(home) == ["kept"]


def test_second_call_doubles_nothing_also_after_a_trim(embedded: Embedded) -> None:
    forget(embedded)
    with embedded.open() as home:
        home.recover_topic("orders")
        assert home.recover_topic("orders") == RecoverReport("orders", False)
        home.trim("orders", ToOffsets({0: 3}))
        assert home.recover_topic("orders") == RecoverReport("orders", False)
        assert values(home) == []


def test_events_that_the_topic_has_by_id_are_left_out(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    with embedded.open() as home:
        home.append("orders", [Event(b"sent again", id="a"), Event(b"lost", id="b")])
    embedded.go_back()
    with embedded.open() as home:
        home.append("orders", [Event(b"sent again", id="a")])
        report = home.recover_topic("orders")
        assert (report.events, report.appended, report.present) == (2, 1, 1)
        assert values(home) == ["kept", "sent again", "lost"]


def test_journals_are_recovered_when_their_segments_were_deleted(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    embedded.append("lost", "lost too")
    with embedded.open() as home:
        home.compile("orders")
        home.sweep(0)
        home.sweep(0)
    embedded.go_back()
    with embedded.open() as home:  # the row of the kept event names a deleted segment
        home.trim("orders", ToOffsets({0: 1}))
        report = home.recover_topic("orders")
        assert (report.events, report.appended) == (3, 3)
        assert values(home) == ["kept", "lost", "lost too"]


def test_events_come_back_to_their_partitions(tmp_path: Path) -> None:
    embedded = Embedded(tmp_path)
    with embedded.open() as home:
        home.delete_topic("orders")
        home.create_topic("orders", 3)
    embedded.keep_copy()
    sent = [Event(str(number).encode(), key=str(number).encode()) for number in range(20)]
    with embedded.open() as home:
        home.append("orders", sent)
        before = values(home)
    embedded.go_back()
    with embedded.open() as home:
        report = home.recover_topic("orders")
        assert (report.objects, report.events, report.appended) == (1, 20, 20)
        assert values(home) == before
        assert home.recover_topic("orders").events == 0


def test_event_deleted_after_it_was_stored_stays_deleted(embedded: Embedded) -> None:
    embedded.keep_copy()
    with embedded.open() as home:
        home.append("orders", [Event(b"secret", id="a"), Event(b"lost", id="b")])
    embedded.go_back()
    with embedded.open() as home:
        home.append("orders", [Event(b"secret", id="a")])
        home.delete("orders", "a")
        report = home.recover_topic("orders")
        assert (report.appended, report.erased) == (1, 1)
        assert values(home) == ["lost"]


class DiedError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("lost", ["upload", "commit"])
def test_call_that_dies_is_completed_by_the_next_one(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    forget(embedded)
    kind = recover_module._UnitRecovery
    real = getattr(kind, "upload_as" if lost == "upload" else "commit")

    def dying(self: object, *given: object) -> None:
        real(self, *given)
        raise DiedError

    monkeypatch.setattr(kind, "upload_as" if lost == "upload" else "commit", dying)
    with embedded.open() as home, pytest.raises(DiedError):
        home.recover_topic("orders")
    monkeypatch.undo()
    with embedded.open() as home:
        home.recover_topic("orders")
        assert values(home) == ["kept", "lost", "lost too"]
        assert home.recover_topic("orders").events == 0
        assert home.sweep(0).refused == ()


def test_object_that_does_not_decode_is_named_and_left(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    before = embedded.segments()
    embedded.append("lost")
    embedded.go_back()
    [path] = embedded.segments() - before
    path.write_bytes(path.read_bytes()[:-20])
    with embedded.open() as home:
        report = home.recover_topic("orders")
        assert (report.appended, len(report.unreadable)) == (0, 1)
        assert report.unreadable[0].endswith(path.name)
    assert path.exists()


def test_journal_that_a_copy_of_the_catalog_planned_is_kept_and_recovered(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy was made while the compile ran: it lists the journal that came to be the truth."""
    embedded.append("a", "b")
    real = Swap.list_work

    def copied(self: Swap, work_id: str) -> int:
        epoch = real(self, work_id)
        with (
            closing(sqlite3.connect(embedded.path / "catalog.sqlite")) as source,
            closing(sqlite3.connect(embedded.copy)) as target,
        ):
            source.backup(target)
        return epoch

    monkeypatch.setattr(Swap, "list_work", copied)
    with embedded.open() as home:
        home.compile("orders")
    monkeypatch.undo()
    for _ in range(2):
        embedded.sweep()
    assert embedded.segments() == set()
    embedded.go_back()
    with embedded.open() as home:
        assert home.sweep(0).refused  # rows name deleted segments
        home.trim("orders", ToOffsets({0: 2}))
        for _ in range(2):
            home.sweep(0)
        assert home.verify("orders").possible_losses == 1
        asked = ["--home", str(embedded.path), "topic", "recover", "orders"]
    for dry in (["--dry-run"], []):
        refused = CliRunner().invoke(cli, [*asked, *dry])
        assert refused.exit_code == 1
        assert "2 events of lost objects were trimmed" in refused.output
        assert "add --include-trimmed" in refused.output
    with embedded.open() as home:
        assert home.verify("orders").possible_losses == 1
        assert home.recover_topic("orders", include=["trimmed"]).appended == 2
        assert home.recover_topic("orders", include=["trimmed"]).appended == 0
        assert values(home) == ["a", "b"]


def test_command_appends_and_says_what_it_did(embedded: Embedded) -> None:
    forget(embedded)
    run = CliRunner()
    asked = ["--home", str(embedded.path), "topic", "recover", "orders", "--json"]
    tried = run.invoke(cli, [*asked, "--dry-run"])
    assert (tried.exit_code, json.loads(tried.stdout)["appended"]) == (0, 2), tried.output
    done = run.invoke(cli, asked)
    assert (done.exit_code, json.loads(done.stdout)["appended"]) == (0, 2), done.output
    again = run.invoke(cli, asked)
    assert (again.exit_code, json.loads(again.stdout)["appended"]) == (0, 0), again.output


def test_scribe_for_cron_fails_where_its_sweep_refuses(embedded: Embedded) -> None:
    forget(embedded)
    asked = ["--home", str(embedded.path), "scribe", "--once", "--grace", "0s", "--json"]
    refused = CliRunner().invoke(cli, asked)
    assert refused.exit_code == 1, refused.output
    with embedded.open() as home:
        home.recover_topic("orders")
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output


def test_advice_about_lost_commits_names_recovery_before_deletion(embedded: Embedded) -> None:
    forget(embedded)
    with embedded.open() as home:
        told = [finding.what for finding in home.verify("orders").findings if "los" in finding.what]
        told += [str(each.error) for each in home.sweep(0).refused]
    told.append(CliRunner().invoke(cli, ["sweep", "--help"]).output)
    assert len(told) >= 3
    for text in told:
        plain = " ".join(text.split())
        assert -1 < plain.find("tidelog topic recover") < plain.rfind("--accept-loss"), text


def test_advice_about_a_possible_loss_names_recovery_before_deletion(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    embedded.append("lost")
    embedded.go_back()
    with embedded.open() as home:
        (finding,) = [each for each in home.verify("orders").findings if each.severity != "note"]
    assert finding.severity == "warning"
    assert -1 < finding.what.find("topic recover orders") < finding.what.find("--accept-loss")


def test_scribe_for_cron_fails_where_a_topic_cannot_be_compiled(embedded: Embedded) -> None:
    embedded.append("kept", "damaged")
    max(embedded.segments()).write_bytes(b"x")
    asked = [
        "--home",
        str(embedded.path),
        "scribe",
        "--once",
        "--no-sweep",
        "--min-events",
        "1",
        "--json",
    ]
    failed = CliRunner().invoke(cli, asked)
    assert json.loads(failed.stdout.splitlines()[-1])["errors"], failed.output
    assert failed.exit_code == 1


def test_events_that_share_an_id_are_all_appended(embedded: Embedded) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    with embedded.open() as home:
        for value in (b"v1", b"v2", b"v2"):
            home.append("orders", [Event(value, id="x")])
    embedded.go_back()
    with embedded.open() as home:
        assert home.recover_topic("orders", dry_run=True).appended == 3
        report = home.recover_topic("orders")
        assert (report.appended, report.present) == (3, 0)
        home.sweep(0)
        home.sweep(0)
        assert values(home) == ["kept", "v1", "v2", "v2"]
        assert home.get("orders", "x").value == b"v2"


def test_newer_version_of_an_event_that_the_topic_has_is_appended(embedded: Embedded) -> None:
    with embedded.open() as home:
        home.append("orders", [Event(b"v1", id="x")])
    embedded.keep_copy()
    with embedded.open() as home:
        home.append("orders", [Event(b"v2", id="x"), Event(b"v1", key=b"k", id="x")])
    embedded.go_back()
    with embedded.open() as home:
        report = home.recover_topic("orders")
        assert (report.appended, report.present) == (2, 0)
        assert values(home) == ["v1", "v2", "v1"]


def test_event_whose_id_was_updated_is_left_in_its_object(embedded: Embedded) -> None:
    embedded.keep_copy()
    with embedded.open() as home:
        home.append("orders", [Event(b"sent again", id="x"), Event(b"lost", id="y")])
    embedded.go_back()
    with embedded.open() as home:
        home.append("orders", [Event(b"sent again", id="x")])
        home.update("orders", "x", b"updated")
        home.compile("orders")
        stray = set(embedded.segments())
        for _ in range(2):
            report = home.recover_topic("orders")
            assert report.doubted == 1
            assert values(home) == ["updated", "lost"], "the update is not undone"
            home.sweep(0)
        assert len(stray & set(embedded.segments())) == 1, "it may hold another event of that id"
        home.sweep(0, accept_loss=["orders"])
        assert not stray & set(embedded.segments())


def forget_a_secret(embedded: Embedded) -> None:
    """A catalog that knows one of two events of a key."""
    with embedded.open() as home:
        home.append("orders", [Event(b"kept", key=b"u7", id="k")])
    embedded.keep_copy()
    with embedded.open() as home:
        home.append("orders", [Event(b"secret", key=b"u7", id="x")])
    embedded.go_back()


def test_event_deleted_after_a_restore_stays_deleted_when_objects_get_new_dates(
    embedded: Embedded,
) -> None:
    forget_a_secret(embedded)
    with embedded.open() as home:
        home.delete_key("orders", b"u7")
    later_s = time.time() + 3600
    for file in embedded.path.rglob("*"):  # as a copy of the store has them
        os.utime(file, (later_s, later_s))
    with embedded.open() as home:
        assert home.recover_topic("orders", dry_run=True).erased == 1
        report = home.recover_topic("orders")
        assert (report.appended, report.erased) == (0, 1)
        assert values(home) == []


class BehindClock(SystemClock):
    """Five minutes behind that of the store."""

    def now_ms(self) -> int:
        return super().now_ms() - 300_000


def test_event_deleted_by_a_machine_whose_clock_is_behind_the_stores_stays_deleted(
    embedded: Embedded,
) -> None:
    forget_a_secret(embedded)
    with embedded.open() as home:
        object.__setattr__(home.context, "clock", BehindClock())
        home.delete_key("orders", b"u7")
    with embedded.open() as home:
        assert home.recover_topic("orders").erased == 1
        assert values(home) == []


def test_event_deleted_while_a_compile_stalls_does_not_come_back(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No catalog was restored: the journal was uploaded after the delete, and is newer than it."""
    with embedded.open() as home:
        home.append("orders", [Event(b"secret", id="x", key=b"u7"), Event(b"plain", id="y")])
        home.append("orders", [Event(b"later", id="z")])
    real = compile_module.make_journals

    def stalls(*given: Any) -> object:
        *others, pages, pool = given
        known = pages(given[2].group.base)  # amendments are read, and then it stalls
        with embedded.open() as other:
            other.delete("orders", "x")
        until(lambda: time.time() * 1000 > other_ms() + 1)
        real(*others, lambda _: known, pool)
        raise DiedError

    def other_ms() -> int:
        with embedded.open() as home:
            return max(record.at_ms for record in home.audit("orders"))

    monkeypatch.setattr(compile_module, "make_journals", stalls)
    with pytest.raises(DiedError), embedded.open() as home:
        home.compile("orders")
    monkeypatch.undo()
    with embedded.open() as home:
        home.trim("orders", ToOffsets({0: 2}))
        home.sweep(0)
        home.sweep(0)
        assert home.recover_topic("orders").trimmed == 2
        assert "secret" not in values(home)
        report = home.recover_topic("orders", include=["trimmed"])
        assert report.erased == 1
        assert "secret" not in values(home)
        with pytest.raises(InvalidError, match="give writers or trimmed"):
            home.recover_topic("orders", include=["all"])
        with pytest.raises(NotFoundError):
            home.get("orders", "x")


def test_event_of_a_deleted_key_that_came_after_the_delete_is_recovered(
    embedded: Embedded,
) -> None:
    with embedded.open() as home:
        home.append("orders", [Event(b"old", key=b"u7", id="a")])
        home.delete_key("orders", b"u7")
    embedded.keep_copy()
    with embedded.open() as home:
        until_ms = int(time.time() * 1000) + 60_000
        home.append("orders", [Event(b"new", key=b"u7", id="b", timestamp=until_ms)])
    embedded.go_back()
    with embedded.open() as home:
        assert home.recover_topic("orders").appended == 1
        assert values(home) == ["new"]


@pytest.mark.parametrize("wanted", [{"ids": ["a", "never"]}, {"key": b"k"}], ids=["id", "key"])
def test_deleted_event_that_only_lost_objects_hold_stays_deleted(
    embedded: Embedded, wanted: dict[str, Any]
) -> None:
    embedded.append("kept")
    embedded.keep_copy()
    later_ms = SystemClock().now_ms() + 3_600_000
    with embedded.open() as home:
        secret = Event(b"secret", id="a", key=b"k", timestamp=later_ms)
        home.append("orders", [secret, Event(b"lost", id="b", key=b"m")])
    embedded.go_back()
    with embedded.open() as home:
        proof = home.erase("orders", **wanted)
        assert (proof.verdict, len(proof.traces)) == ("not erased", 1)
        assert proof.deleted is not None
        assert (proof.deleted.events, proof.deleted.strays) == (0, 1)
        assert set(proof.deleted.missing) == set(wanted.get("ids", [])) - {"a"}
        report = home.recover_topic("orders")
        assert (report.events, report.appended, report.erased) == (2, 1, 1)
        assert values(home) == ["kept", "lost"]
        home.sweep(0)
        found = home.prove_erased("orders", ids=["a"], keys=[b"k"] if "key" in wanted else [])
        assert found.verdict == "erased"
