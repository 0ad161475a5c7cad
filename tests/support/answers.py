"""A server that gives scripted answers, for what no real server can be made to say."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """One HTTP reply. ``length`` is what its header says, if not the body's own."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass
class AskedRequest:
    """One HTTP request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]


class AnsweringServer:
    """Answers every request by a function, and keeps what was asked."""

    def __init__(self, answer: Callable[[AskedRequest], Answer]) -> None:
        self.answer = answer
        self.asked: list[AskedRequest] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = AskedRequest(self.command, self.path, headers)
                outer.asked.append(asked)
                reply = outer.answer(asked)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                length = len(reply.body) if reply.length is None else reply.length
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)
                self.close_connection = length != len(reply.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815 - its names

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def answering(answer: Callable[[AskedRequest], Answer]) -> Iterator[AnsweringServer]:
    """Such a server for the length of a block."""
    server = AnsweringServer(answer)
    try:
        yield server
    finally:
        server.close()


def s3_error(status: int, code: str) -> Answer:
    """An error as S3 writes it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said S3</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})
