"""A place that takes asynchronous calls of Lambda functions, as its API is documented.

It answers 202 and then calls the function, one call after the other; statuses that a test gives are
answered first, without a call.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

FUNCTION = "arn:aws:lambda:us-east-1:123456789012:function:billing"


@dataclass
class LambdaEndpoint:
    """What was asked for, and what calls returned."""

    url: str
    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # path, type, payload
    statuses: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)  # of calls, or the errors that they raised

    @property
    def target(self) -> str:
        return f"lambda:{FUNCTION}?endpoint={self.url}"


@contextmanager
def lambda_endpoint(handler: Callable[[Any, Any], Any] | None = None) -> Iterator[LambdaEndpoint]:
    """Serves until the block ends; then no call is under way any more."""
    calls: queue.Queue[Any] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            payload = json.loads(body)
            kind = self.headers["X-Amz-Invocation-Type"]
            found.requests.append((unquote(self.path), kind, payload))
            status = found.statuses.pop(0) if found.statuses else 202
            self.send_response(status)
            if status != 202:
                self.send_header("x-amzn-ErrorType", "TestException")
            self.send_header("Content-Length", "0")
            self.end_headers()
            if status == 202 and handler is not None:
                calls.put(payload)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    def work() -> None:
        while (payload := calls.get()) is not None:
            try:
                found.results.append(handler(payload, None) if handler else None)
            except Exception as exc:  # noqa: BLE001 - a test looks at it
                found.results.append(exc)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = LambdaEndpoint(f"http://127.0.0.1:{server.server_port}")
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield found
        finally:
            server.shutdown()
            calls.put(None)
            worker.join(60)
