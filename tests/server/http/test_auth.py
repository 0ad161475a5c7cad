"""Who may do what: tokens, web pages, rates, and addresses that are not loopback."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Served, ask, error, serving, status
from tidelog import Home, InvalidError, NotFoundError, UnavailableError
from tidelog.clock import SystemClock
from tidelog.coordination.tokens import create_token, list_tokens, revoke_token
from tidelog.model.token import Scope
from tidelog.server.http import auth as gate
from tidelog.server.http import health
from tidelog.server.http.limits import Rates, client_of
from tidelog.server.options import ServeOptions

READS = ("/topics", "/topics/t", "/topics/t/partitions/0/events", "/metrics")
OPEN = ("/healthz", "/readyz", "/openapi.json")
OWN_PAGE = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "no-cors"}


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_home_with_tokens_asks_for_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_READY_S", 60.0)  # a stall is not what this is about
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.1)
    assert served.post({"value": "open"}).status_code == 201
    _, reads = create_token(served.home.context, ["read"], "reader")
    _, writes = create_token(served.home.context, ["append"])
    wait_until_closed(served)
    for path in READS:
        assert served.client.get(path).status_code == 401
        assert served.client.get(path, headers=bearer(reads)).status_code == 200
        denied = served.client.get(path, headers=bearer(writes))
        assert (denied.status_code, error(denied)["kind"]) == (403, "forbidden")
    for path in OPEN:
        assert served.client.get(path).status_code == 200
    refused = served.post({"value": "x"})
    assert (refused.status_code, error(refused)["kind"]) == (401, "unauthorized")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "`tidelog token create --append` creates one" in error(refused)["message"]
    assert "send `?token=TOKEN` or" in error(served.client.get("/track/t.gif"))["message"]
    assert "with `--append t`" in error(served.post({"value": "x"}, **bearer(reads)))["message"]
    assert served.post({"value": "x"}, **bearer(reads)).status_code == 403
    assert served.post({"value": "mine"}, **bearer(writes)).status_code == 201
    assert served.values() == [b"open", b"mine"]


def wait_until_closed(served: Served) -> None:
    deadline = time.monotonic() + gate.REFRESH_S + 60
    while served.client.get("/topics").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_tokens_are_hashed_new_ones_work_at_once_and_revoked_ones_soon_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_AT_MOST_EVERY_S", 0.0)
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.0)
    with serving(tmp_path) as served:
        first, text = create_token(served.home.context, ["read", "append"])
        rows = list(served.home.catalog.scan("registry"))
        secret = text.rpartition("_")[2]
        assert len(secret) == 64
        assert not any(secret.encode() in row.value for row in rows)
        wait_until_closed(served)
        second, other = create_token(served.home.context, ["read"])
        assert served.client.get("/topics", headers=bearer(other)).status_code == 200
        assert revoke_token(served.home.context, second.id) == second
        deadline = time.monotonic() + 60
        while served.client.get("/topics", headers=bearer(other)).status_code == 200:
            assert time.monotonic() < deadline
        assert served.client.get("/topics", headers=bearer(text)).status_code == 200
        assert list_tokens(served.home.context) == [first]
        with pytest.raises(NotFoundError):
            revoke_token(served.home.context, second.id)
        with pytest.raises(InvalidError, match="not the token"):
            revoke_token(served.home.context, text)


def test_what_is_no_token_is_401(tmp_path: Path) -> None:
    with serving(tmp_path, first=lambda home: home.tokens.create(["read"])) as served:
        for shown in ("Bearer", "Bearer x", "Basic dTpw", "bearer " + "x" * 10_000, "Bearer \xe4"):
            headers = {"authorization": shown.encode("latin-1")}
            assert served.client.get("/topics", headers=headers).status_code == 401


def test_where_no_header_can_be_sent_the_query_has_the_token(tmp_path: Path) -> None:
    tokens: dict[Scope, str] = {}

    def make(home: Home) -> None:
        home.create_topic("public")
        scopes: tuple[Scope, ...] = ("read", "append", "pixel")
        tokens.update({scope: home.tokens.create([scope])[1] for scope in scopes})

    with serving(tmp_path, public_pixels=("public",), first=make) as served:
        get = served.client.get
        assert get("/track/t.gif").status_code == 401
        assert get(f"/track/t.gif?token={tokens['read']}").status_code == 403
        assert get(f"/track/t.gif?token={tokens['append']}").status_code == 403, "it may do more"
        assert get(f"/track/t.gif?token={tokens['pixel']}&a=1").status_code == 200
        assert tokens["pixel"].encode() not in (served.values()[0] or b""), "no token is stored"
        assert get("/track/public.gif?a=1").status_code == 200
        assert get("/topics/public/tail").status_code == 401
        tail = f"/topics/public/tail?token={tokens['read']}"
        with served.client.stream("GET", tail) as answer:
            assert answer.status_code == 200
        assert get(f"/topics?token={tokens['read']}").status_code == 401, "only where it must be"
        assert served.client.post("/topics/public/events", json={"value": ""}).status_code == 401


def test_web_pages_reach_nothing_of_an_open_server(served: Served) -> None:
    page = {"origin": "https://evil.example"}
    led = {"host": "evil.example:8480"}
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    other_port = {**image, "sec-fetch-site": "same-site"}
    for headers in (page, led, image, other_port):
        refused = served.client.post("/topics/t/events", content=b"x", headers=headers)
        assert (refused.status_code, error(refused)["kind"]) == (403, "forbidden")
        assert served.client.get("/topics/t", headers=headers).status_code == 403
        assert served.client.get("/track/t.gif", headers=headers).status_code == 403
    for host in ("localhost", "127.0.0.1:99", "[::1]:1", "127.7.7.7"):
        assert served.client.get("/topics/t", headers={"host": host}).status_code == 200
    assert served.client.get("/track/t.gif?id=own", headers=OWN_PAGE).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    link["sec-fetch-dest"] = "document"
    assert served.client.get("/console/topics", headers=link).status_code == 200, "a link"
    assert served.client.get("/track/t.gif", headers=link).status_code == 403
    assert len(served.values()) == 1


def test_a_public_pixel_of_an_open_server_takes_pages_and_no_ids(tmp_path: Path) -> None:
    image = {"sec-fetch-site": "cross-site", "referer": "https://shop.example/"}
    with serving(tmp_path, public_pixels=("t",)) as served:
        assert served.client.get("/track/t.gif?a=1", headers=image).status_code == 200
        chosen = served.client.get("/track/t.gif?a=1&id=order-1", headers=image)
        assert (chosen.status_code, error(chosen)["kind"]) == (403, "forbidden")
        assert len(served.values()) == 1


def test_listening_elsewhere_without_tokens_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidError, match="tidelog token create"),
        serving(tmp_path, host="0.0.0.0"),
    ):
        pass
    with (
        pytest.raises(InvalidError, match="is not known"),
        serving(tmp_path / "b", host="no.such.host.invalid"),
    ):
        pass


def test_a_client_beyond_its_rate_gets_429_and_is_let_in_again(tmp_path: Path) -> None:
    with serving(tmp_path, rate=2.0) as served:
        answers = [served.client.get("/topics") for _ in range(30)]
        good = [answer for answer in answers if answer.status_code == 200]
        bad = [answer for answer in answers if answer.status_code == 429]
        assert len(good) + len(bad) == 30
        assert 3 <= len(good) < 25
        wait_s = int(bad[-1].headers["retry-after"])
        assert 1 <= wait_s <= 3
        assert error(bad[-1])["kind"] == "too_many_requests"
        assert served.client.get("/healthz").status_code == 200, "probes are not counted"
        time.sleep(wait_s)
        assert served.client.get("/topics").status_code == 200


def test_a_closed_server_has_a_rate_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open one has none, and neither has one that was started with 0."""
    monkeypatch.setattr("tidelog.server.http.auth.RATE", 2.0)
    made: list[str] = []

    def first(home: Home) -> None:
        made.append(home.tokens.create(["read"])[1])

    def statuses(served: Served) -> set[int]:
        headers = bearer(made[0]) if made else {}
        return {served.client.get("/topics", headers=headers).status_code for _ in range(30)}

    with serving(tmp_path / "a") as served:
        assert statuses(served) == {200}
    with serving(tmp_path / "b", first=first) as served:
        assert statuses(served) == {200, 429}
        metrics = {served.client.get("/healthz").status_code for _ in range(30)}
        assert metrics == {200}
        with serving(tmp_path / "c", home=served.home, rate=0.0) as other:
            assert statuses(other) == {200}


def test_what_anybody_may_have_counts_for_the_address(tmp_path: Path) -> None:
    pages = ("/docs", "/openapi.json", "/none", "/sql", "/console/static/console.css", "/console/x")
    with serving(tmp_path, rate=1.0) as served:
        for path in pages:
            assert 429 in {served.client.get(path).status_code for _ in range(20)}, path
        twice = b"GET /topics HTTP/1.1\r\nhost: localhost\r\norigin: a\r\norigin: b\r\n\r\n"
        assert 429 in {status(ask(served.address, twice)) for _ in range(20)}
        assert served.client.get("/healthz").status_code == 200


def test_rates_are_those_of_each_token_or_address(tmp_path: Path) -> None:
    made: list[str] = []

    def first(home: Home) -> None:
        made.extend(home.tokens.create(["read"])[1] for _ in range(2))

    with serving(tmp_path, rate=1.0, behind_proxy=True, first=first) as served:

        def get(address: str) -> int:
            headers = {"x-forwarded-for": f"9.9.9.9, {address}"}
            return served.client.get("/topics", headers=headers).status_code

        # Some more than the two that a second or two allow, as a slow machine takes its time.
        assert 429 in (get("1.1.1.1") for _ in range(200))
        assert get("2.2.2.2") == 401
        assert 429 in (get(f"3.3.3.3:{n}") for n in range(200)), "as proxies that add ports"
        assert 429 in (get(f"[2001:db8::{n}]:{n}") for n in range(200)), "one network, one client"
        assert get("2001:db8:1::1") == 401
        for text in made:
            shown = [served.client.get("/topics", headers=bearer(text)) for _ in range(200)]
            assert shown[0].status_code == 200
            assert 429 in [answer.status_code for answer in shown]


def test_visitors_with_one_pixel_token_have_a_rate_each(tmp_path: Path) -> None:
    """The token is in the source of a page: one visitor must not use up the rate of all."""
    made: list[str] = []

    def first(home: Home) -> None:
        made.append(home.tokens.create(["pixel"])[1])

    with serving(tmp_path, rate=1.0, behind_proxy=True, first=first) as served:

        def get(address: str) -> int:
            headers = {"x-forwarded-for": address}
            return served.client.get(f"/track/t.gif?token={made[0]}", headers=headers).status_code

        assert 429 in (get("1.1.1.1") for _ in range(200))
        assert get("2.2.2.2") == 200


def test_rates_know_a_bounded_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.http.limits._CLIENTS_MAX", 100)
    rates = Rates(1.0, SystemClock())
    for number in range(1_000):
        assert rates.take(str(number)) == 0
    assert len(rates._due_s) <= 100
    assert Rates(0.0, SystemClock()).take("x") == 0


def test_addresses_are_clients() -> None:
    assert client_of("1.2.3.4") == "1.2.3.4"
    assert client_of("::ffff:1.2.3.4") == "1.2.3.4"
    assert client_of("2001:db8:0:1:2::3") == client_of("2001:db8:0:1::9") == "2001:db8:0:1::/64"
    assert client_of("not:an:address") == "not:an:address"
    assert ServeOptions(host="::1").is_loopback
    assert ServeOptions(host="localhost").is_loopback
    assert not ServeOptions(host="example.com").is_loopback


@pytest.mark.parametrize(
    "given",
    [
        {"host": ""},
        {"port": -1},
        {"port": 65_536},
        {"rate": -1.0},
        {"body_bytes_max": 0},
        {"topic_default": "../x"},
        {"public_pixels": ("",)},
    ],
    ids=str,
)
def test_bad_options_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidError):
        ServeOptions(**given)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_told(served: Served, tmp_path: Path) -> None:
    with (
        pytest.raises(UnavailableError, match="choose another --port"),
        serving(tmp_path / "b", port=served.address[1]),
    ):
        pass
    assert httpx.get(f"{served.url}/healthz", timeout=60).status_code == 200
