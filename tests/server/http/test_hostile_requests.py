"""Thousands of hostile requests against a real server: each gets an answer, and none gets a 5xx.

Every route of the interface and of the console, with wrong methods, paths, parameters, headers,
types and bodies, on an open server and on one that asks for tokens. One answer that takes a second
fails the test, without a second try. A control beside the requests measures that second, and leaves
out the time in which the machine itself stalls (``tests/support/machine_clock.py``).
"""

from __future__ import annotations

import random
import re
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.test_processes import running
from tests.support.machine_clock import MachineClock
from tidelog.coordination.tokens import create_token
from tidelog.home import create_home
from tidelog.model.token import SCOPES
from tidelog.server.app import OPERATIONS
from tidelog.server.console.site import PLACES
from tidelog.settings import Settings

SLOW_S = 1.0
METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"PATCH", b"OPTIONS", b"TRACE")
FILLED = {
    "topic": "t",
    "partition": "0",
    "offset": "0",
    "id": "1",
    "name": "x",
    "job": "x",
    "file": "console.css",
}
JUNK = (
    *("%00", "%0d%0a", "%ff", "..", "%2e%2e%2f", "A" * 300, "-1", "9" * 25, "1e9", "NaN", "%22"),
    *("<script>", "%E2%80%AE", "%1b[2J", "*", "'", "{}", "null", "", "0", "1", "latest", "-15m"),
    *("2020-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01", "1h%0d%0a", "1h", "8d"),
)
PARAMETERS = (
    *("offset", "limit", "start", "end", "cursor", "presign", "why", "partition", "from", "token"),
    *("id", "key", "t", "ack", "topic", "name", "q", "by", "where", "job", "minutes", "form_mark"),
)
TYPES = (
    *(b"application/json", b"application/x-ndjson", b"text/plain", b"application/octet-stream"),
    *(b"application/x-www-form-urlencoded", b"multipart/form-data", b"", b"x/y"),
)
BODIES = (
    *(b"", b"{", b"[]", b"[[]]", b'{"value":null}', b'{"value":"x","id":""}', b"\xff\xfe", b"null"),
    *(b'{"value":{"base64":"!!"}}', b'{"value":"x","timestamp":1e400}', b'"x"', b"1", b"[" * 3_000),
    *(b'{"value":"x","timestamp":-1}', b'{"value":"x","headers":[["a"]]}', b'{"value":"\\ud800"}'),
    *(b'{"value":"x"}\n{"value":', b"label=x&read=1&topics=%5B", b"token=x&next=//evil"),
    b"[" + b'{"value":"x"},' * 300 + b'{"value":"y"}]',
    b'{"value":"x","topic":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
)
HEADERS = (
    *(b"tidelog-id: \xff", b"tidelog-time: 99999999999999", b"tidelog-time: x", b"cookie: a"),
    *(b"idempotency-key: ", b"idempotency-key: k", b"tidelog-if-absent: true", b"origin: null"),
    *(b"content-encoding: gzip", b"content-encoding: zstd", b"content-encoding: br", b"te: x"),
    *(b"last-event-id: 0:1,", b"last-event-id: 0:999999999999999999", b"range: bytes=0-1"),
    *(b"accept: application/x-ndjson", b"cookie: tidelog_console=\xff; b", b"accept: \xff"),
    *(b"sec-fetch-site: cross-site", b"x-forwarded-for: 1.1.1.1", b"upgrade: h2c"),
    *(b"authorization: Bearer \xff", b"authorization: Basic x", b"connection: upgrade"),
)


def fill(path: str, source: random.Random) -> str:
    """A route with names that are there, or with junk in place of one."""

    def name(match: re.Match[str]) -> str:
        return FILLED[match[1]] if source.random() < 0.8 else source.choice(JUNK)

    return re.sub(r"\{(\w+)\}", name, path)


@dataclass
class Attacker:
    """Makes requests from one seed, and sends them one by one."""

    url: str
    texts: list[str]
    source: random.Random

    def request(self) -> bytes:
        choose, chance = self.source.choice, self.source.random
        own, route = choose(ROUTES)
        method = own.encode() if chance() < 0.8 else choose(METHODS)
        path = fill(route, self.source)
        if chance() < 0.1:
            path += f"/{choose(JUNK)}"
        query = [f"{choose(PARAMETERS)}={choose(JUNK)}" for _ in range(choose((0, 0, 1, 1, 2, 3)))]
        if "/tail" in path:
            query.append("partition=7")  # a stream would not end
        target = path + ("?" + "&".join(query) if query else "")
        body = choose(BODIES) if method in (b"POST", b"PUT", b"PATCH") else b""
        lines = [b"host: " + self.url.removeprefix("http://").encode(), b"connection: close"]
        if chance() < 0.7:
            lines.append(b"content-type: " + choose(TYPES))
        if self.texts and chance() < 0.8:
            lines.append(b"authorization: Bearer " + choose(self.texts).encode())
        if path.startswith("/console") and method == b"POST":
            lines += [b"origin: " + self.url.encode(), b"sec-fetch-site: same-origin"]
        lines += [choose(HEADERS) for _ in range(choose((0, 0, 1, 2)))]
        head = b"%s %s HTTP/1.1\r\n" % (method, target.encode()) + b"\r\n".join(lines)
        return head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def send(self, request: bytes) -> str:
        """The status; ``none`` where the connection ends without one."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        found = b""
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(request)
            while len(found) < 1_000 and (piece := raw.recv(65_536)):
                found += piece
        return found.split(b" ", 2)[1][:3].decode() if found.startswith(b"HTTP/") else "none"


ROUTES = sorted({(each.method, each.path) for each in (*OPERATIONS, *PLACES)})


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("guarded", [False, True], ids=["open", "tokens"])
def test_every_request_is_answered_and_none_breaks_the_server(
    tmp_path: Path, guarded: bool, count: int
) -> None:
    with create_home(Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite")))[0] as made:
        made.create_topic("t", 2)
        grants = SCOPES if guarded else ()
        texts = [create_token(made.context, [scope])[1] for scope in grants]
        home = made.config
    statuses: Counter[str] = Counter()
    slowest_s = 0.0
    with running(home) as (process, url), MachineClock(tmp_path) as clock:
        attacker = Attacker(url, texts, random.Random(4711))
        for _ in range(count):
            request = attacker.request()
            began_s = clock.now_s
            status = attacker.send(request)
            took_s = clock.now_s - began_s
            statuses[status] += 1
            assert status != "none", request
            assert not status.startswith("5"), (status, request)
            assert took_s < SLOW_S, request
            slowest_s = max(slowest_s, took_s)
        assert process.poll() is None
    print(f"{count} hostile requests, the slowest {slowest_s:.2f} s: {dict(statuses)}")
    assert statuses.total() == count
    assert len(statuses) > 4
