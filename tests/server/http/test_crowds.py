"""Many clients, and one that takes more than its share: the others are still served."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_processes import running
from tests.support.machine_clock import MachineClock
from tests.support.serving import Served, ask, read_answer, serving, status
from tests.support.waiting import until
from tidelog.coordination.tokens import create_token
from tidelog.home import Home, create_home
from tidelog.server.api import ingest
from tidelog.server.http import limits, request
from tidelog.server.http.errors import BusyError
from tidelog.settings import Settings

GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\n"


@pytest.fixture
def home(tmp_path: Path) -> str:
    with create_home(Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite")))[0] as made:
        made.create_topic("t", 2)
        return made.config


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def ask_from(source: str, address: tuple[str, int], path: bytes) -> int:
    with socket.create_connection(address, timeout=30, source_address=(source, 0)) as raw:
        raw.sendall(GET % path)
        return status(read_answer(raw))


def test_large_bodies_of_tiny_events_stall_no_other_request(home: str, tmp_path: Path) -> None:
    body = b"\n".join([b'{"value":""}'] * 250_000)
    with (
        running(home) as (_, url),
        httpx.Client(base_url=url, timeout=120) as client,
        MachineClock(tmp_path) as clock,
    ):
        client.post("/topics/t/events", json={"value": "warm"})
        typed = {"content-type": "application/x-ndjson"}
        answers: list[int] = []

        def post() -> None:
            answer = httpx.post(f"{url}/topics/t/events", content=body, headers=typed, timeout=120)
            answers.append(answer.status_code)

        threads = [threading.Thread(target=post) for _ in range(4)]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            began = clock.now_s
            assert client.get("/healthz").status_code == 200
            waits.append(clock.now_s - began)
            time.sleep(0.005)
        assert 201 in answers
        assert set(answers) <= {201, 503}
        assert max(waits) < 0.6, f"{max(waits):.2f} s, {answers}"


def test_large_bodies_of_any_shape_stall_no_other_request(home: str, tmp_path: Path) -> None:
    size = 8_000_000
    shapes = {
        "array": b"[" + b"0," * (size // 2) + b"0]",
        "headers": b'{"value":"","headers":[' + b'["",""],' * (size // 8) + b'["",""]]}',
        "fields": b'{"value":"",' + b'"a":0,' * (size // 6) + b'"b":0}',
        "nested": b'{"value":[' + (b"[" * 60 + b"]" * 60 + b",") * (size // 121) + b"0]}",
    }
    with (
        running(home) as (process, url),
        httpx.Client(base_url=url, timeout=120) as client,
        MachineClock(tmp_path) as clock,
    ):
        client.post("/topics/t/events", json={"value": "warm"})
        typed = {"content-type": "application/json"}
        before = peak_bytes(process.pid)
        for name, body in shapes.items():
            answers: list[int] = []

            def post(body: bytes = body, answers: list[int] = answers) -> None:
                posted = httpx.post(
                    f"{url}/topics/t/events", content=body, headers=typed, timeout=120
                )
                answers.append(posted.status_code)

            threads = [threading.Thread(target=post) for _ in range(4)]
            for thread in threads:
                thread.start()
            waits = []
            while any(thread.is_alive() for thread in threads):
                began = clock.now_s
                assert client.get("/healthz").status_code == 200
                waits.append(clock.now_s - began)
                time.sleep(0.005)
            assert set(answers) <= {400, 413, 503}, name
            assert max(waits) < 0.6, f"{name}: {max(waits):.2f} s"
        grown = (peak_bytes(process.pid) - before) >> 20
        assert grown < 256, f"{grown} MiB"


def peak_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def test_bytes_of_all_bodies_have_one_bound_until_they_are_stored(home: str) -> None:
    body = json.dumps([{"value": "x" * 1_000_000}] * 8).encode()
    with running(home) as (process, url):
        httpx.post(f"{url}/topics/t/events", json={"value": "warm"}, timeout=60)
        before = peak_bytes(process.pid)
        answers: list[int] = []

        def post() -> None:
            answer = httpx.post(
                f"{url}/topics/t/events",
                content=body,
                headers={"content-type": "application/json"},
                timeout=120,
            )
            answers.append(answer.status_code)

        threads = [threading.Thread(target=post) for _ in range(70)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 70
        assert set(answers) <= {201, 503}
        assert 201 in answers
        grown = (peak_bytes(process.pid) - before) >> 20
        assert grown < 2.5 * (request.BODIES_BYTES_MAX >> 20), f"{grown} MiB"


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
def test_headers_of_a_large_body_count_for_the_bound(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    event = json.dumps({"value": "", "headers": [["", None]] * 10_000}).encode()
    body = b"[%s,%s]" % (event, event) if kind == "application/json" else event + b"\n" + event
    real, has_room = request.TransferBudget.take, False
    taken: list[int] = []

    def take(bodies: request.TransferBudget, buffer: request.BodyBuffer, size: int) -> None:
        taken.append(size)
        if size == request.HEADER_BYTES * 20_000 and not has_room:
            raise BusyError("server: holds as many bytes as it may: try again", retry_after_s=1)
        real(bodies, buffer, size)

    def post() -> int:
        headers = {"content-type": kind}
        return served.client.post("/topics/t/events", content=body, headers=headers).status_code

    monkeypatch.setattr(request.TransferBudget, "take", take)
    assert post() == 503
    assert served.values() == []
    has_room = True
    taken.clear()
    assert post() == 201
    assert served.values() == [b"", b""]
    counted = len(body) + 2 * request.EVENT_BYTES + 20_000 * request.HEADER_BYTES
    assert sum(taken) >= len(body) + counted


@contextlib.contextmanager
def uploads(address: tuple[str, int], count: int, sent: int) -> Iterator[list[socket.socket]]:
    """Bodies of 8 MiB that stop before their end."""
    with contextlib.ExitStack() as stack:
        raws = []
        for _ in range(count):
            raw = stack.enter_context(socket.create_connection(address, timeout=30))
            head = POST % b"text/plain" + b"content-length: %d\r\n\r\n" % (8 << 20)
            with contextlib.suppress(OSError):
                raw.sendall(head + b"x" * sent)
            raws.append(raw)
        yield raws


@pytest.mark.parametrize("sent", [1, (8 << 20) - 1])
def test_idle_uploads_lose_their_place(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr(request, "BODIES_BYTES_MAX", 20 << 20)
    with uploads(served.address, 40, sent) as raws:
        time.sleep(2.5)
        began = time.monotonic()
        for _ in range(3):
            body = json.dumps([{"value": "x" * 900_000}] * 4)
            typed = {"content-type": "application/json"}
            answer = served.client.post("/topics/t/events", content=body, headers=typed)
            assert answer.status_code == 201
        assert time.monotonic() - began < 20
        if sent > 1:
            lost = [status(read_answer(raw)) for raw in raws[:1]]
            assert lost[0] in (408, 503)
    assert len(served.values()) == 12


def test_the_bound_is_free_again_after_every_kind_of_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[request.TransferBudget] = []
    real = request.TransferBudget.take

    def take(self: request.TransferBudget, buffer: request.BodyBuffer, size: int) -> None:
        held.append(self)
        real(self, buffer, size)

    monkeypatch.setattr(request.TransferBudget, "take", take)
    typed = {"content-type": "application/json"}
    assert served.post({"value": "x"}).status_code == 201
    assert served.client.post("/topics/t/events", content=b"{", headers=typed).status_code == 400
    assert served.client.post("/topics/none/events", content=b"x" * 99_999).status_code == 404
    with uploads(served.address, 3, 1_000_000):
        pass
    until(lambda: not any(each.held or each._clients or each._transfers for each in held))


def test_one_address_cannot_take_all_connections(home: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4_096:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
    try:
        with running(home) as (_, url), contextlib.ExitStack() as stack:
            for _ in range(2_100):
                raw = socket.create_connection(address_of(url), timeout=30)
                stack.enter_context(raw)
                with contextlib.suppress(OSError):
                    raw.sendall(b"GET /hea")
            assert ask_from("127.0.0.2", address_of(url), b"/topics") == 200
            assert ask_from("127.0.0.2", address_of(url), b"/healthz") == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_address_with_its_whole_share_still_gets_health_checks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 40)
    monkeypatch.setattr(limits, "LINGER_S", 60.0)
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # of a share of 10
            stack.enter_context(socket.create_connection(served.address, timeout=60))
        sent = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert status(ask(served.address, sent)) == 200
        assert status(ask(served.address, sent.replace(b"/healthz", b"/topics"))) == 503
        for _ in range(40):
            stack.enter_context(socket.create_connection(served.address, timeout=60))
        assert status(ask(served.address, sent)) == 503, "these are closed at once"


def test_few_open_files_are_kept_for_others_and_for_the_store(home: str) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    with running(home, first=few) as (_, url), contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(address_of(url), timeout=30))
        assert ask_from("127.0.0.2", address_of(url), b"/healthz") == 200
        source = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=source, base_url=url, timeout=30) as client:
            assert client.post("/topics/t/events", json={"value": "x"}).status_code == 201


def test_a_full_server_answers_health_checks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 5)
    monkeypatch.setattr(limits, "CLIENT_SHARE", 0.1)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(served.address, timeout=30))
        assert status(ask(served.address, GET % b"/healthz")) == 200
        assert status(ask(served.address, GET % b"/readyz")) == 200
        assert status(ask(served.address, GET % b"/topics")) == 503


def test_too_few_open_files_are_refused() -> None:
    with pytest.raises(Exception, match="ulimit -n"):
        limits.ConnectionCounts(100, True)


def test_one_client_has_a_share_of_all_tails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tidelog.server.api.read.TAILS_MAX", 8)
    texts: list[str] = []

    def first(home: Any) -> None:
        texts.extend(home.tokens.create(["read"])[1] for _ in range(2))

    with serving(tmp_path, first=first) as served, contextlib.ExitStack() as stack:
        greedy, other = ({"authorization": f"Bearer {text}"} for text in texts)
        kept = []
        for _ in range(2):
            tail = served.client.stream("GET", "/topics/t/tail", headers=greedy)
            kept.append(stack.enter_context(tail).iter_lines())
            next(kept[-1])
        assert served.client.get("/topics/t/tail", headers=greedy).status_code == 503
        with served.client.stream("GET", "/topics/t/tail", headers=other) as answer:
            assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/topics/t/partitions/0/events", "/topics/t/tail?from=earliest"])
def test_answers_that_clients_do_not_take_have_one_bound(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(request, "BODIES_BYTES_MAX", 10_000_000)
    held: list[tuple[request.TransferBudget, int]] = []
    real = request.TransferBudget.take

    def take(self: request.TransferBudget, buffer: request.BodyBuffer, size: int) -> None:
        real(self, buffer, size)
        held.append((self, self.held))

    monkeypatch.setattr(request.TransferBudget, "take", take)
    for _ in range(4):
        assert served.client.post("/topics/t/events", content=b"x" * 900_000).status_code == 201
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            raw.connect(served.address)
            raw.sendall(GET % path.encode())
        time.sleep(2.5)
        page = "/topics/t/partitions/0/events"
        until(lambda: served.client.get(page).status_code == 200)
        assert len(served.events()["events"]) == 4, "slow ones lose their place"
    assert 3_600_000 < max(size for _, size in held) <= 10_000_000
    until(lambda: not any(each.held or each._clients or each._transfers for each, _ in held))


def test_a_tail_whose_client_reads_nothing_frees_its_place_when_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "BODIES_BYTES_MAX", 8_000_000)
    ask_for = b"GET /topics/t/tail?from=earliest HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(tmp_path) as served, contextlib.ExitStack() as stack:
        for _ in range(16):
            served.client.post("/topics/t/events", content=b"x" * 1_000_000)

        def metric(name: str) -> float:
            text = "\n" + served.client.get("/metrics").text
            return float(text.partition(f"\n{name} ")[2].split("\n")[0] or 0)

        gc.disable()  # it would free them as well, but not soon
        stack.callback(gc.enable)
        clients = []
        for _ in range(8):
            raw = stack.enter_context(socket.create_connection(served.address, timeout=30))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            raw.sendall(ask_for)
            clients.append(raw)
        until(lambda: metric('tidelog_requests_total{operation="tail",status="499"}') > 0)
        for each in clients:
            each.close()
        until(lambda: metric("tidelog_waiting") == 0)


def test_clients_take_turns_at_threads() -> None:
    done: list[str] = []

    async def work() -> None:
        threads = limits.ServerThreads()
        gate = threading.Event()

        async def one(client: str) -> None:
            limits.CLIENT.set(client)
            await threads.run(gate.wait if client == "first" else lambda: done.append(client))

        async with asyncio.TaskGroup() as group:
            for client in ["first"] * 16 + ["many"] * 100 + ["few"] * 2 + ["gone"]:
                task = group.create_task(one(client))
            await asyncio.sleep(0)
            task.cancel()
            gate.set()
        threads.close()

    asyncio.run(work())
    assert sorted(done) == ["few"] * 2 + ["many"] * 100
    assert "few" in done[:20], "it does not wait for all of the others"


def test_idempotent_appends_of_one_client_do_not_keep_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    begun: list[str] = []
    turn = threading.Semaphore(0)
    real = ingest.append_once

    def append_once(context: Any, topic: Any, key: str, events: Any) -> Any:
        begun.append(key)
        assert turn.acquire(timeout=60)
        return real(context, topic, key, events)

    def first(home: Home) -> None:
        texts.extend(home.tokens.create(["admin"])[1] for _ in range(2))

    def in_flight(served: Served) -> float:
        page = served.client.get("/metrics", headers={"authorization": f"Bearer {texts[1]}"}).text
        [line] = [each for each in page.splitlines() if each.startswith("tidelog_requests_in_f")]
        return float(line.split()[1])

    monkeypatch.setattr(ingest, "append_once", append_once)
    with serving(tmp_path, first=first) as served, contextlib.ExitStack() as stack:
        post = b"POST /topics/t/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
        post += b"idempotency-key: %d\r\ncontent-length: 1\r\n\r\nx"
        for number in range(40):
            raw = stack.enter_context(socket.create_connection(served.address, timeout=60))
            raw.sendall(post % (texts[0].encode(), number))
        until(lambda: len(begun) == 16 and in_flight(served) == 41)
        raw = stack.enter_context(socket.create_connection(served.address, timeout=60))
        get = b"GET /topics/t HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"
        raw.sendall(get % texts[1].encode())
        until(lambda: in_flight(served) == 42)
        try:
            for _ in range(2):
                turn.release()
            assert status(read_answer(raw)) == 200, "though 38 appends wait"
            assert len(begun) < 20
        finally:
            turn.release(40)


def test_idle_tails_share_one_look_at_the_catalog(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = served.home.context.catalog
    real, looks = catalog.get, []

    def get(partition: str, row: str) -> Any:
        if partition.startswith("topic/") and row == "head":
            looks.append(threading.current_thread().name)
        return real(partition, row)

    with contextlib.ExitStack() as stack:
        kept = []
        for _ in range(60):
            tail = served.client.stream("GET", "/topics/t/tail")
            kept.append(stack.enter_context(tail).iter_lines())
            assert next(kept[-1]).startswith("retry")
        time.sleep(1.5)
        began = time.monotonic()
        monkeypatch.setattr(catalog, "get", get)
        time.sleep(3.0)
        idle = [name for name in looks if "sample" not in name]
        took_s = time.monotonic() - began
        assert 3 * len(idle) < 20 * took_s, f"{len(idle)} looks in {took_s:.1f} s for 60 tails"
        assert served.post({"value": "news"}).status_code == 201
        for lines in kept:
            assert any("news" in line for line in iter(lambda it=lines: next(it), None) if line)
            break


def test_tokens_are_read_while_all_threads_hang(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.1)
    catalog = served.home.context.catalog
    real, release = catalog.get, threading.Event()

    def hang(partition: str, row: str) -> Any:
        if partition == "registry" and row.startswith("topic/"):
            assert release.wait(60)
        return real(partition, row)

    _, text = create_token(served.home.context, ["read"])
    shown = {"authorization": f"Bearer {text}"}
    until(lambda: served.client.get("/metrics").status_code == 401)
    monkeypatch.setattr(catalog, "get", hang)
    asking = [
        threading.Thread(target=lambda: httpx.get(f"{served.url}/topics/t", headers=shown))
        for _ in range(20)
    ]
    for thread in asking:
        thread.start()
    try:
        time.sleep(0.5)
        _, new = create_token(served.home.context, ["read"])
        answer = served.client.get("/metrics", headers={"authorization": f"Bearer {new}"})
        assert answer.status_code == 200
    finally:
        release.set()
        for thread in asking:
            thread.join()


def test_tails_of_a_topic_share_their_reads(served: Served, monkeypatch: Any) -> None:
    import tidelog.server.api.tail as tail

    tails, events, pages = 40, 25, [0]
    read = tail.read_page

    def counted(*given: Any) -> Any:
        pages[0] += 1
        return read(*given)

    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(tails):
            answer = stack.enter_context(served.client.stream("GET", "/topics/t/tail"))
            streams.append(line for line in answer.iter_lines() if line.startswith("data"))
        monkeypatch.setattr(tail, "read_page", counted)
        for number in range(events):
            assert served.post({"value": str(number)}).status_code == 201
        for lines in streams:
            values = [json.loads(next(lines)[5:])["value"] for _ in range(events)]
            assert values == [str(number) for number in range(events)]
    assert pages[0] < tails * events / 4, "each tail has read for itself"


def test_large_pages_of_tails_are_written_in_threads(served: Served, monkeypatch: Any) -> None:
    import tidelog.server.api.tail as tail

    makers: list[str] = []
    make = tail._frames_of

    def noted(*given: Any) -> Any:
        makers.append(threading.current_thread().name)
        return make(*given)

    monkeypatch.setattr(tail, "_frames_of", noted)
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(10):
            answer = stack.enter_context(served.client.stream("GET", "/topics/t/tail"))
            streams.append(line for line in answer.iter_lines() if line.startswith("data"))
        for letter in "ab":
            assert served.post({"value": letter * 200_000}).status_code == 201
        for lines in streams:
            values = [json.loads(next(lines)[5:])["value"] for _ in range(2)]
            assert values == ["a" * 200_000, "b" * 200_000]
    assert makers
    assert all(name.startswith("tidelog-serve") for name in makers), "it would hold the loop"
