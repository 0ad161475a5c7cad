"""What the home knows of its clients: last use of tokens, its audit, and its guard."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.support.serving import Served, serving
from tests.support.visits import Browser, forms_of
from tests.support.waiting import until
from tidelog import Event, Home, UnavailableError
from tidelog.catalog.base import Put
from tidelog.coordination.audit import ACTIONS_KEPT_MS, Action, forget_actions, record_action
from tidelog.coordination.tokens import revoke_token
from tidelog.home import create_home, open_home
from tidelog.model import layout
from tidelog.model.token import Token
from tidelog.model.topic import encode_row
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def actions(home: Home, op: str) -> list[Action]:
    return [action for action in home.actions() if action.op == op]


def test_last_use_of_a_token_is_stored_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Token, str]] = []
    noted: list[dict[str, int]] = []

    def first(home: Home) -> None:
        made.extend(home.tokens.create(["read"]) for _ in range(3))

    import tidelog.server.http.usage as usage

    real = usage.note_uses

    def note(context: object, uses: dict[str, int]) -> None:
        if uses:
            noted.append(dict(uses))
        real(context, uses)  # type: ignore[arg-type]

    monkeypatch.setattr(usage, "note_uses", note)
    monkeypatch.setattr("tidelog.server.app.USAGE_S", 0.2)
    monkeypatch.setattr("tidelog.server.app._TICK_S", 0.05)
    with serving(tmp_path, first=first) as served:
        (used, text), (gone, other), (never, _) = made
        before_ms = served.home.context.clock.now_ms()
        for _ in range(50):
            assert served.client.get("/topics", headers=bearer(text)).status_code == 200
            assert served.client.get("/topics", headers=bearer(other)).status_code == 200
        until(lambda: len(served.home.tokens.last_used()) == 2)
        assert served.home.tokens.last_used()[used.id] >= before_ms
        assert len(noted) < 25, "one write for many requests"
        revoke_token(served.home.context, gone.id)
        assert gone.id not in served.home.tokens.last_used()
        served.client.get("/topics", headers=bearer(text))
    assert never.id not in noted[-1]
    assert len(noted) < 26


def test_the_home_records_who_changed_tokens_logged_in_and_moved_cursors(tmp_path: Path) -> None:
    made: list[tuple[Token, str]] = []

    def first(home: Home) -> None:
        home.create_topic("copy")
        home.append("t", [Event(b"v", id="1")])
        with home.consumer("t", "c") as consumer:
            consumer.poll()
            consumer.commit()
        made.append(home.tokens.create(["admin"], label="ops", who="me"))

    with serving(tmp_path, first=first) as served, Browser(served, made[0][1]) as browser:
        home, by = served.home, f"token {made[0][0].id}"
        mark = {"form_mark": forms_of(browser.get("/console/tokens"))[-1].fields["form_mark"]}
        browser.post("/console/tokens", {"read": "1", "label": "new", **mark})
        new = next(token for token in home.tokens.list() if token.label == "new")
        browser.post("/console/tokens/revoke", {"id": new.id, "sure": "1", **mark})
        home.consumers("t").get("c").seek("earliest")
        home.playback("t", start="2020-01-01", to="topic:copy")
        assert [(each.who, each.what) for each in actions(home, "login")] == [
            (by, "console from 127.0.0.1")
        ]
        first_one, second = actions(home, "token create")
        assert (first_one.who, first_one.note) == ("me", "admin (ops)")
        assert (second.who, second.what) == (by, f"token {new.id}")
        assert [(each.who, each.what) for each in actions(home, "token revoke")] == [
            (by, f"token {new.id}")
        ]
        assert [each.what for each in actions(home, "cursor move")] == ["consumer c of t/0"]
        assert [each.what for each in actions(home, "playback")] == ["topic t"]
        assert actions(home, "read") == []
        browser.post("/console/topics/t/erase", {"ids": "1", "why": "asked", "sure": "1", **mark})
        until(lambda: [record.who for record in home.audit("t")] == [by])
        text = "".join(map(str, home.actions()))
        assert made[0][1] not in text


def test_reads_are_counted_on_request(tmp_path: Path) -> None:
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, audit_reads=True, first=lambda home: keep(home, made)) as served:
        token, text = made[0]
        for _ in range(7):
            served.client.get("/topics/t/partitions/0/events", headers=bearer(text))
        served.client.get("/topics", headers=bearer(text))
        assert served.client.get("/topics/none", headers=bearer(text)).status_code == 404
        served.home.archives.create("a", source="topic:t")
        with Browser(served, text) as browser:
            browser.get("/console/topics/t/events")
            browser.get("/console/archives/a")
        config = served.home.config
    with open_home(config) as home:
        found = {(each.who, each.what, each.note) for each in actions(home, "read")}
    by = f"token {token.id}"
    assert (by, "topic t", "events, 7 requests") in found
    assert (by, "topic t", "console events, 1 request") in found
    assert (by, "home", "topics, 1 request") in found
    assert (by, "archive a", "console archive, 1 request") in found
    assert "none" not in str(found), "each name of a topic would be a record"


def test_usage_that_the_catalog_refuses_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Token, str]] = []
    refused: list[str] = []

    def refuse(context: object, *given: object) -> None:
        refused.append(str(given))
        raise UnavailableError("catalog: is out of reach")

    monkeypatch.setattr("tidelog.server.app.USAGE_S", 0.1)
    monkeypatch.setattr("tidelog.server.app._TICK_S", 0.05)
    with serving(tmp_path, audit_reads=True, first=lambda home: keep(home, made)) as served:
        token, text = made[0]
        with monkeypatch.context() as broken:
            for name in ("note_uses", "record_action"):
                broken.setattr(f"tidelog.server.http.usage.{name}", refuse)
            for _ in range(7):
                served.client.get("/topics/t", headers=bearer(text))
            until(lambda: sum(token.id in each for each in refused) > 1)
        until(lambda: len(actions(served.home, "read")) > 0)
        assert token.id in served.home.tokens.last_used()
        notes = [each.note for each in actions(served.home, "read")]
        assert sum(int(note.split()[1]) for note in notes) == 7


def test_logins_of_one_token_have_a_bound(tmp_path: Path) -> None:
    made: list[tuple[Token, str]] = []
    with serving(tmp_path, first=lambda home: keep(home, made)) as served:
        statuses = []
        for _ in range(40):
            with Browser(served) as browser:
                statuses.append(browser.login(made[0][1]).status_code)
        assert statuses.count(429) == 10
        assert len(actions(served.home, "login")) == 30


def keep(home: Home, made: list[tuple[Token, str]]) -> None:
    made.append(home.tokens.create(["read"]))


def test_old_actions_are_swept(served: Served) -> None:
    home = served.home
    record_action(home.context, "login", "x")
    at_ms = home.context.clock.now_ms() - ACTIONS_KEPT_MS - 60_000
    old = Action(home.context.ids.new(), at_ms, "me", "login", "old")
    row = Put(layout.audit_row(at_ms, old.id), encode_row(old))
    home.catalog.write(layout.HOME_AUDIT, row, write_id=home.context.ids.new())
    assert [each.what for each in actions(home, "login")] == ["old", "x"]
    home.sweep()
    assert [each.what for each in actions(home, "login")] == ["x"]


def test_clock_that_is_ahead_deletes_no_action(served: Served) -> None:
    home = served.home
    record_action(home.context, "login", "x")
    clock = FakeClock(home.context.clock.now_ms() + 2 * ACTIONS_KEPT_MS)
    assert forget_actions(dataclasses.replace(home.context, clock=clock)) == 0
    assert [each.what for each in actions(home, "login")] == ["x"]


def test_name_that_is_not_utf8_is_recorded(served: Served) -> None:
    context = dataclasses.replace(served.home.context, environ={"USER": "a\udcffb"})
    record_action(context, "login", "\udcfe")
    [found] = actions(served.home, "login")
    assert found.who.startswith("a\\udcffb@")
    assert found.what == "\\udcfe"


def test_a_catalog_from_before_the_first_token_opens_nothing(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("t", 1)
        config = home.config
    shutil.copy(tmp_path / "c.sqlite", tmp_path / "backup")
    with open_home(config) as home:
        home.tokens.create(["read"])
    for name in ("c.sqlite-wal", "c.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup", tmp_path / "c.sqlite")
    with open_home(config) as home, serving(tmp_path, home=home) as served:
        assert home.tokens.list() == []
        assert served.client.get("/topics").status_code == 401
        assert served.post({"value": "x"}).status_code == 401
        _, text = home.tokens.create(["read"])
        assert served.client.get("/topics", headers=bearer(text)).status_code == 200


def test_a_server_marks_the_store_of_a_home_that_had_a_token_before(served: Served) -> None:
    home = served.home
    home.tokens.create(["read"])
    home.store.delete([layout.GUARD_OBJECT])
    with serving(Path(), home=home) as again:
        assert again.client.get("/topics").status_code == 401
        home.store.head(layout.GUARD_OBJECT)
