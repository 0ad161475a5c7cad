"""Where events go: files, HTTP, standard output; what is kept, refused and repeated."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.playback_stage import T0, Stage
from tests.support.serving import serving as server_of_tidelog
from tidelog.codec.event_json import batch_lines
from tidelog.connectors.sink import (
    Lot,
    NullSink,
    SinkContext,
    StreamSink,
    check_playback_sink,
    lot_pieces,
    open_playback_sink,
)
from tidelog.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.model.event import Event
from tidelog.model.times import Backoff
from tidelog.playback.merge import play
from tidelog.testing.scheduler import FakeClock


def lots(stage: Stage | None = None, events: int = 4) -> list[Lot]:
    """Some events with all that an event may have, in lots."""
    if stage is None:
        stage = Stage()
        stage.stored(
            [
                Event(None, b"k", "i-1", T0, "gone", (("a", b"\xff"), ("a", b""))),
                Event(b"\x00\xff", None, None, T0 + 1),
                Event("ü\n".encode(), b"", "i-2", T0 + 2),
                *(Event(b"%d" % n, timestamp=T0 + n) for n in range(3, 10)),
            ]
        )
    (batch,) = play(stage.context, stage.main, stage.pin(T0, T0 + 1_000))
    firsts = range(0, batch.num_rows, events)
    return [Lot(first, batch.slice(first, events)) for first in firsts]


def setting(**more: Any) -> SinkContext:
    return SinkContext({}, "id", clock=FakeClock(), backoff=Backoff(attempts=3), **more)


def all_lines(some: list[Lot]) -> bytes:
    return b"".join(batch_lines(lot.batch) for lot in some)


# Files.


def test_a_file_gets_each_event_as_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = open_playback_sink(f"file:{path}", setting())
    for lot in lots():
        sink.put(lot)
    sink.close()
    sink.close()
    assert path.read_bytes() == all_lines(lots())
    first = json.loads(path.read_bytes().splitlines()[0])
    assert first == {
        "topic": "main",
        "partition": 0,
        "offset": 0,
        "timestamp": "2023-11-14T22:13:20.000Z",
        "id": "i-1",
        "key": "k",
        "value": None,
        "type": "gone",
        "headers": [["a", {"base64": "/w=="}], ["a", ""]],
    }


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("precious")
    for url in (f"file:{path}", f"file:{tmp_path}/mine.parquet"):
        (tmp_path / "mine.parquet").write_text("precious")
        with pytest.raises(AlreadyExistsError):
            open_playback_sink(url, setting())
    with pytest.raises(AlreadyExistsError):
        open_playback_sink(f"file:{path}", setting(name="p"))
    assert path.read_text() == "precious"
    (tmp_path / "empty").touch()
    open_playback_sink(f"file:{tmp_path}/empty", setting()).close()


def test_a_file_that_comes_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    sink = open_playback_sink(f"file:{path}", setting())
    sink.put(lots()[0])
    path.write_text("precious")
    with pytest.raises(AlreadyExistsError, match="came to be"):
        sink.close()
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["mine.parquet"]


def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = open_playback_sink(f"file:{tmp_path}/out.parquet", setting())
    sink.put(lots()[0])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match=r"No space left.*make room"):
        sink.close()
    assert os.listdir(tmp_path) == []


def test_a_file_is_continued_where_its_cursor_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second, third = lots()
    sink = open_playback_sink(f"file:{path}", setting(name="p"))
    sink.put(first)
    reached = sink.reached()
    sink.put(second)
    sink.close(failed=True)
    with path.open("ab") as file:
        file.write(b'{"topic": "ma')  # torn off by a crash
    sink = open_playback_sink(f"file:{path}", setting(name="p", resumed=True, reached=reached))
    sink.put(second)
    sink.put(third)
    sink.close()
    assert path.read_bytes() == all_lines(lots())
    with pytest.raises(CorruptError, match="had written"):
        open_playback_sink(f"file:{path}", setting(name="p", resumed=True, reached=10_000))


def test_a_file_that_a_stalled_player_has_open_is_not_written_by_another(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, *others = lots()
    stalled = open_playback_sink(f"file:{path}", setting(name="p"))
    with pytest.raises(UnavailableError, match="end that one"):  # took over its playback
        open_playback_sink(f"file:{path}", setting(name="p", resumed=True))
    stalled.put(first)  # the lot that it had begun
    stalled.close(failed=True)
    sink = open_playback_sink(f"file:{path}", setting(name="p", resumed=True))
    for lot in (first, *others):
        sink.put(lot)
    sink.close()
    assert path.read_bytes() == all_lines(lots())


def test_a_parquet_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    sink = open_playback_sink(f"file:{path}", setting())
    for lot in lots():
        sink.put(lot)
        assert not path.exists()
    sink.close()
    assert pq.read_table(path).column("offset").to_pylist() == list(range(10))
    assert os.listdir(tmp_path) == ["out.parquet"]
    other = open_playback_sink(f"file:{tmp_path}/other.parquet", setting())
    other.put(lots()[0])
    other.close(failed=True)
    assert os.listdir(tmp_path) == ["out.parquet"]
    with pytest.raises(InvalidError, match="cannot be continued"):
        check_playback_sink(f"file:{path}", named=True)


def test_a_device_will_do_and_a_folder_will_not(tmp_path: Path) -> None:
    sink = open_playback_sink("file:/dev/null", setting(name="p"))
    sink.put(lots()[0])
    assert sink.reached() == 0
    sink.close()
    paths = [tmp_path, f"{tmp_path}/no/out", f"{tmp_path}/", "a%00b", "\ud800", "x" * 70_000]
    for wrong in (f"file:{path}" for path in paths):
        with pytest.raises(InvalidError):
            open_playback_sink(wrong, setting())


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    sink = open_playback_sink("file:/dev/full", setting())
    with pytest.raises(UnavailableError, match="No space left"):
        sink.put(lots()[0])
    sink.close(failed=True)


# Standard output, and nothing.


def test_a_stream_that_takes_a_part_only_gets_all() -> None:
    class Narrow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:7]))

    stream = Narrow()
    sink = StreamSink(stream)
    for lot in lots():
        sink.put(lot)
    assert stream.getvalue() == all_lines(lots())
    NullSink().put(lots()[0])


def test_pieces_are_the_same_for_the_same_batch() -> None:
    stage = Stage()
    stage.stored([Event(b"x" * 5_000, timestamp=T0 + n) for n in range(900)])
    (lot,) = lots(stage, 1_000)
    pieces = list(lot_pieces(lot.batch))
    assert len(pieces) > 3
    assert max(piece.nbytes for piece in pieces) < 2 << 20
    assert [p.num_rows for p in pieces] == [p.num_rows for p in lot_pieces(lot.batch)]


# Addresses.


@pytest.mark.parametrize(
    "url",
    [
        "",
        "orders",
        "foo:x",
        "stdout:x",
        "null:x",
        "null:?a=b",
        "file:",
        "file://host/x",
        "file:x?y=z",
        "http:///x",
        "http://user:secret@host/",
        "http://host/ü",
        "topics:x",
    ],
)
def test_what_names_no_sink_is_refused(url: str) -> None:
    with pytest.raises(InvalidError) as caught:
        check_playback_sink(url, named=False)
    assert "secret" not in str(caught.value).replace("secrets", "")


def test_a_topic_must_be_there() -> None:
    stage = Stage()
    with pytest.raises(NotFoundError):
        open_playback_sink("topic:no", setting(context=stage.context))
    for wrong in ("topic:main?partition=x", "topic:main?a=b", "topic://main/x"):
        with pytest.raises(InvalidError):
            open_playback_sink(wrong, setting(context=stage.context))


def test_into_a_topic_partitions_are_kept_where_that_is_asked_for() -> None:
    stage = Stage(partitions=3)
    for partition in range(3):
        stage.stored([Event(b"v", b"k", timestamp=T0 + partition)], partition)
        stage.stored([Event(b"w", None, timestamp=T0 + partition)], partition)
    (lot,) = lots(stage, 100)
    same, keyed, few = stage.made("same", 3), stage.made("keyed", 2), stage.made("few", 2)
    for topic, option in ((same, "?partition=same"), (keyed, "")):
        sink = open_playback_sink(f"topic:{topic.name}{option}", setting(context=stage.context))
        sink.put(lot)
        sink.close()
    found = [(e.partition, e.value) for e in stage.events(same)]
    assert found == [(p, v) for p in range(3) for v in (b"v", b"w")]
    by_key = {e.partition for e in stage.events(keyed) if e.key is not None}
    keyless = [e.partition for e in stage.events(keyed) if e.key is None]
    assert len(by_key) == 1
    assert sorted(p or 0 for p in keyless) == [0, 0, 1]
    sink = open_playback_sink("topic:few?partition=same", setting(context=stage.context))
    with pytest.raises(InvalidError, match="has 2 partitions"):
        sink.put(lot)
    assert list(stage.events(few)) == []


# HTTP.


class Server:
    """Answers as it is told, and remembers what it was sent."""

    def __init__(self) -> None:
        self.statuses: list[int] = []  # of the next requests; then 200
        self.bodies: dict[str, bytes] = {}  # by idempotency key
        self.requests: list[dict[str, str]] = []
        self.url = ""


@contextmanager
def serving() -> Iterator[Server]:
    known = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known.requests.append({**dict(self.headers), "path": self.path})
            status = known.statuses.pop(0) if known.statuses else 200
            if status == 0:
                self.close_connection = True  # dies without an answer
                return
            if status < 300:
                known.bodies.setdefault(self.headers["Idempotency-Key"], body)
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known.url = f"http://127.0.0.1:{server.server_port}/topics/t/events?x=1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_http_gets_lines_with_keys_and_repeats_what_may_pass() -> None:
    with serving() as server:
        server.statuses = [503, 429, 200, 0, 200, 500]
        chosen = setting()
        sink = open_playback_sink(server.url, chosen)
        for lot in lots():
            sink.put(lot)
        sink.close()
        assert b"".join(server.bodies.values()) == all_lines(lots())
        assert [key.rsplit("-", 2)[0] for key in server.bodies] == ["id-0", "id-4", "id-8"]
        assert len(server.requests) == 7
        first = server.requests[0]
        assert first["path"] == "/topics/t/events?x=1"
        assert first["Content-Type"] == "application/x-ndjson"
        assert "Authorization" not in first
        assert chosen.clock.monotonic_s() - 1_000 >= 7, "as long as the server asked for"


def test_a_token_comes_from_the_environment() -> None:
    with serving() as server:
        sink = open_playback_sink(server.url, SinkContext({"TIDELOG_HTTP_TOKEN": "s3cret"}, "id"))
        sink.put(lots()[0])
        sink.close()
        assert server.requests[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413])
def test_what_a_server_refuses_for_good_ends_it(status: int) -> None:
    with serving() as server:
        server.statuses = [status]
        sink = open_playback_sink(server.url, setting())
        with pytest.raises(InvalidError, match=f"answered {status}") as caught:
            sink.put(lots()[0])
        assert "topics" not in str(caught.value), "a path may be a secret"
        assert ("set TIDELOG_HTTP_TOKEN" in str(caught.value)) == (status == 401)
        assert len(server.requests) == 1
        sink.close(failed=True)


@contextmanager
def refusing(head: bytes) -> Iterator[str]:
    """A server that answers each request after its head, and closes before it reads the body."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = listener.accept()
                connection.recv(16_384)
                connection.sendall(head + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                connection.close()  # what was not read makes it a reset

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def large_lot(events: int = 1) -> Lot:
    stage = Stage()
    stage.stored([Event(b"x" * (9_000_000 // events), timestamp=T0 + n) for n in range(events)])
    return lots(stage, 1_000)[0]


def test_an_answer_before_the_body_is_sent_is_read() -> None:
    with refusing(b"HTTP/1.1 413 Too Large") as url:
        sink = open_playback_sink(url, setting())
        with pytest.raises(InvalidError, match=r"event at `main/0` offset 0: .*answered 413"):
            sink.put(large_lot())
        with pytest.raises(InvalidError, match=r"events from `main/0` offset 0 on: .*413.*body"):
            sink.put(large_lot(90))
        sink.close(failed=True)
    with refusing(b"HTTP/1.1 400 Bad Request") as url:
        sink = open_playback_sink(url, setting())
        with pytest.raises(InvalidError, match="answered 400"):
            sink.put(large_lot())
        sink.close(failed=True)


def test_success_before_the_body_is_sent_is_none() -> None:
    with refusing(b"HTTP/1.1 200 OK") as url:
        sink = open_playback_sink(url, setting())
        with pytest.raises(UnavailableError, match=r"inside of a body|no answer"):
            sink.put(large_lot())
        sink.close(failed=True)


def test_uneven_sizes_reach_a_server_of_tidelog(tmp_path: Path) -> None:
    """Few large events and many empty ones, where the mean says that all fit into one body."""
    stage = Stage()
    large = [Event(b"x" * 500_000, timestamp=T0 + n) for n in range(30)]
    stage.stored([*large, *(Event(b"", timestamp=T0 + 30 + n) for n in range(900))])
    with server_of_tidelog(tmp_path) as served:
        sink = open_playback_sink(f"{served.url}/topics/t/events", setting())
        for lot in lots(stage, 5_000):
            sink.put(lot)
        sink.close()
        found = [len(value or b"") for value in served.values()]
    assert found == [500_000] * 30 + [0] * 900


def test_a_server_that_stays_away_is_told() -> None:
    with serving() as server:
        server.statuses = [503] * 9
        sink = open_playback_sink(server.url, setting())
        with pytest.raises(UnavailableError, match="answered 503"):
            sink.put(lots()[0])
        sink.close()
    with pytest.raises(UnavailableError, match="no answer"):
        sink.put(lots()[0])
    sink.close(failed=True)
