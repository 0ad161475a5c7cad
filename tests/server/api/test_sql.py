"""``POST /sql`` and the console's page: what a token may read, one query of a client at a time."""

from __future__ import annotations

import html
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.support.serving import Served, serving
from tests.support.waiting import until
from tidelog import Event, Grant, Home
from tidelog.api.sql_process import SqlLimits, SqlResult
from tidelog.errors import UnavailableError
from tidelog.server.api.sql import QueryEnd, SqlRunner
from tidelog.server.http.errors import BusyError

ENDLESS = "select count(*) from range(10000000000) a, range(1000000) b"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, str]]]:
    """A closed server, and tokens by what they may."""
    tokens: dict[str, str] = {}

    def first(home: Home) -> None:
        home.append("t", [Event(b'{"n": %d}' % n, id=str(n), type="x") for n in range(3)])
        home.create_topic("secret")
        for name, grant in (("all", Grant("read")), ("own", Grant("read", "t"))):
            tokens[name] = home.tokens.create([grant])[1]

    with serving(tmp_path_factory.mktemp("sql"), first=first) as served:
        yield served, tokens


def ask(world: tuple[Served, dict[str, str]], token: str, body: Any) -> httpx.Response:
    served, tokens = world
    headers = {"authorization": f"Bearer {tokens[token]}"}
    return served.client.post("/sql", json=body, headers=headers, timeout=120)


def test_a_token_queries_its_topics_and_no_others(world: tuple[Served, dict[str, str]]) -> None:
    query = "select id, (as_json(value)->>'n')::int as n from t where id <> ? order by id"
    answer = ask(world, "own", {"query": query, "values": ["1"]})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "columns": [{"name": "id", "type": "string"}, {"name": "n", "type": "int32"}],
        "is_whole": True,
        "rows": [{"id": "0", "n": 0}, {"id": "2", "n": 2}],
    }
    assert answer.headers["cache-control"] == "no-store"
    query = "select table_name from information_schema.tables where table_schema = 'topic'"
    assert ask(world, "own", {"query": query}).json()["rows"] == [{"table_name": "t"}]
    refused = ask(world, "own", {"query": "select * from secret"})
    assert refused.status_code == 400
    assert "topic or archive `secret` not found" in refused.json()["error"]["message"]


def test_bodies_that_are_not_a_query_are_refused(world: tuple[Served, dict[str, str]]) -> None:
    served, tokens = world
    for body, says in (
        ({}, "query"),
        ({"query": 1}, "query"),
        ({"query": "select 1", "limit": 1}, "unknown field `limit`: send {"),
        ([], "object"),
        ({"query": "select 1" + " " * 30_000}, "20000 characters"),
    ):
        refused = ask(world, "all", body)
        assert (refused.status_code, says in refused.text) == (400, True), refused.text
    headers = {"authorization": f"Bearer {tokens['all']}", "content-type": "text/plain"}
    assert served.client.post("/sql", content=b"select 1", headers=headers).status_code == 415
    assert served.client.get("/sql", headers=headers).status_code == 405


def test_the_page_runs_a_query_and_shows_why_one_is_refused(
    world: tuple[Served, dict[str, str]],
) -> None:
    served, tokens = world
    origin = {"origin": served.url}
    with httpx.Client(base_url=served.url, timeout=120, follow_redirects=True) as browser:
        assert browser.get("/console/sql").status_code == 401
        sent = {"token": tokens["all"], "next": "/console/sql"}
        page = browser.post("/console/login", data=sent, headers=origin)
        mark = re.search(r'name="form_mark" value="([0-9a-f]+)"', page.text)
        assert mark is not None, page.text
        form = {"form_mark": mark[1], "q": "select id, null as nothing from t where id = '2'"}
        shown = browser.post("/console/sql", data=form, headers=origin)
        assert shown.status_code == 200
        assert "1 row" in shown.text
        assert "where id = '2'</textarea>" in html.unescape(shown.text)
        form["q"] = "select '<script>' as x from nothing"
        refused = browser.post("/console/sql", data=form, headers=origin)
        assert refused.status_code == 400
        assert "topic or archive <code>nothing</code> not found" in refused.text
        assert "<script>'" not in refused.text
        assert (
            browser.post("/console/sql", data={"q": "select 1"}, headers=origin).status_code == 403
        )
        given = browser.get("/console/sql", params={"q": "select 42 as asked"})
        assert "select 42 as asked</textarea>" in given.text, "a link fills in, and runs nothing"
        assert "1 row" not in given.text


def test_one_query_of_a_client_runs_at_a_time_and_a_stop_ends_it(
    world: tuple[Served, dict[str, str]],
) -> None:
    runner = SqlRunner(world[0].home)
    began = threading.Event()

    def run(client: str) -> SqlResult:
        began.set()
        bounds = SqlLimits(seconds=300.0, cpu_seconds=300.0)
        return runner.run(ENDLESS, None, client, QueryEnd(), bounds=bounds)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run, "one"), pool.submit(run, "two")
        until(lambda: len(runner._running) == 2 and None not in runner._running.values())
        with pytest.raises(BusyError, match="your last query"):
            runner.run("select 1", None, "one", QueryEnd())
        with pytest.raises(BusyError, match="other queries"):
            runner.run("select 1", None, "three", QueryEnd())
        runner.stop()
        for running in (first, second):
            with pytest.raises(UnavailableError, match="the server stops"):
                running.result(timeout=60)
    assert runner._running == {}


def test_query_ends_when_its_client_disconnects(
    world: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, tokens = world
    began, ended = threading.Event(), threading.Event()

    def run(self: SqlRunner, query: str, *args: Any, **more: Any) -> SqlResult:
        began.set()
        assert ended.wait(60)
        raise UnavailableError("ended")

    monkeypatch.setattr(SqlRunner, "run", run)
    monkeypatch.setattr(QueryEnd, "end", lambda self: ended.set())
    with httpx.Client(base_url=served.url, timeout=120, follow_redirects=True) as browser:
        origin, sent = {"origin": served.url}, {"token": tokens["all"], "next": "/console/sql"}
        page = browser.post("/console/login", data=sent, headers=origin).text
        cookie = f"tidelog_console={browser.cookies['tidelog_console']}"
    mark = page.partition('name="form_mark" value="')[2].partition('"')[0]
    form = urlencode({"form_mark": mark, "q": "select 1"})
    host = served.url.removeprefix("http://")
    for asked, body in (
        (f"POST /sql HTTP/1.1\r\nAuthorization: Bearer {tokens['own']}", '{"query":"select 1"}'),
        (f"POST /console/sql HTTP/1.1\r\nOrigin: {served.url}\r\nCookie: {cookie}", form),
    ):
        kind = "json" if body.startswith("{") else "x-www-form-urlencoded"
        head = f"{asked}\r\nHost: {host}\r\nContent-Type: application/{kind}"
        with socket.create_connection(served.address, timeout=60) as raw:
            raw.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            assert began.wait(60)
        assert ended.wait(30), asked
        began.clear()
        ended.clear()


def test_ended_query_has_no_process(world: tuple[Served, dict[str, str]]) -> None:
    runner, end = SqlRunner(world[0].home), QueryEnd()
    end.end()
    with pytest.raises(UnavailableError, match="was ended"):
        runner.run(ENDLESS, None, "one", end, bounds=SqlLimits(seconds=300.0, cpu_seconds=300.0))
