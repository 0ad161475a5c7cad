"""The server beside a bare Starlette route that only answers: requests a second, one process each.

``wrk`` sends, or ``ab`` where there is no wrk (Debian: ``apt-get install wrk apache2-utils``), from
the same machine. The bare route runs on the same uvicorn, uvloop and httptools, and reads no body.
What Tidelog answers is durable: written, fsynced and committed in a local home.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measure import scratch
from bench.rates import Rate, against
from tidelog.home import create_home
from tidelog.settings import Settings

CONNECTIONS = 256  # what is durable takes a disk's time, so there must be some at once
SECONDS = 4
ROUNDS = 5
GOAL = 0.334  # a third
BODY = b'{"key":"Claps-7f-a0","value":"{\\"MemberId\\":\\"7f\\",\\"PostId\\":\\"a0\\"}"}'
PIXEL = "track/t.gif?type=Claps&member=7f&post=a0"
BARE = """
import socket, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

async def answer(request):
    return Response(b"ok")

app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, loop="uvloop", http="httptools", ws="none", lifespan="off",
                        access_log=False, log_level="critical")
uvicorn.Server(config).run(sockets=[listener])
"""
SERVE = "from tidelog.cli.main import run; run()"


@dataclass(frozen=True)
class Measured:
    """What one run of the sender has found."""

    per_s: float
    p50_ms: float
    p99_ms: float
    failed: int


def run() -> list[Rate]:
    """Both kinds of requests, each beside the bare route, in alternating rounds."""
    with scratch() as folder:
        settings = Settings(f"{folder}/objects", f"{folder}/catalog.sqlite")
        with create_home(settings)[0] as home:
            home.create_topic("t", 1)
            config = home.config
        body = Path(folder) / "body"
        body.write_bytes(BODY)
        serve = ["-c", SERVE, "--home", config, "serve", "--port", "0", "--json"]
        with process(["-c", BARE]) as bare, process(serve) as line:
            url = json.loads(line)["url"]
            return [
                *beside("pixel", f"{bare}/", f"{url}/{PIXEL}", None),
                *beside("single-event POST", f"{bare}/", f"{url}/topics/t/events", body),
            ]


def beside(what: str, bare: str, own: str, body: Path | None) -> list[Rate]:
    """One kind of request: the bare route and ours, in turns."""
    names = {f"{what}, durable": own, f"bare route for {what}": bare}
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(ROUNDS + 1):
        for name, url in names.items():
            measured = send(url, body)
            if measured.failed:
                raise RuntimeError(f"{name}: {measured.failed} requests failed")
            if number:
                found[name].append(measured)
    rates = []
    for name, runs in found.items():
        p50 = statistics.median(each.p50_ms for each in runs)
        p99 = statistics.median(each.p99_ms for each in runs)
        note = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {CONNECTIONS} connections"
        rates.append(Rate(name, [each.per_s for each in runs], "requests/s", note=note))
    against(rates[0], rates[1], GOAL)
    return rates


@contextlib.contextmanager
def process(args: list[str]) -> Iterator[str]:
    """A server that prints one line when it listens."""
    with subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE) as started:
        try:
            yield (started.stdout.readline() if started.stdout else b"").decode().strip()
        finally:
            started.terminate()


def send(url: str, body: Path | None) -> Measured:
    """Requests for some seconds, by whichever sender there is."""
    time.sleep(0.5)  # for what the last one has left behind
    if shutil.which("wrk"):
        return by_wrk(url, body)
    if shutil.which("ab"):
        return by_ab(url, body)
    raise RuntimeError("bench serve: needs wrk or ab: apt-get install wrk apache2-utils")


def by_wrk(url: str, body: Path | None) -> Measured:
    script = Path(tempfile.gettempdir()) / "tidelog-bench-post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = [[{BODY.decode()}]]\n"
        "wrk.headers['content-type'] = 'application/json'\n"
    )
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "--timeout", "30s", "--latency"]
    out = output([*command, *([] if body is None else ["-s", str(script)]), url])
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    return Measured(
        float(number(r"Requests/sec:\s+([\d.]+)", out)),
        milliseconds(number(r"^\s+50%\s+(\S+)", out)),
        milliseconds(number(r"^\s+99%\s+(\S+)", out)),
        int(bad[1]) if bad else 0,
    )


def by_ab(url: str, body: Path | None) -> Measured:
    command = ["ab", "-q", "-k", "-c", str(CONNECTIONS), "-t", str(SECONDS), "-n", "10000000"]
    post = [] if body is None else ["-p", str(body), "-T", "application/json"]
    out = output([*command, *post, url])
    bad = re.search(r"Non-2xx responses:\s+(\d+)", out)
    return Measured(
        float(number(r"Requests per second:\s+([\d.]+)", out)),
        float(number(r"^\s+50%\s+(\d+)", out)),
        float(number(r"^\s+99%\s+(\d+)", out)),
        int(bad[1]) if bad else 0,
    )


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"bench serve: no {pattern} in {text}")
    return found[1]


def milliseconds(text: str) -> float:
    """Of ``1.23ms``, ``456.00us`` or ``1.20s``."""
    found = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text)
    if found is None:
        raise RuntimeError(f"bench serve: `{text}` is no time")
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1_000.0, "m": 60_000.0}[found[2]]
