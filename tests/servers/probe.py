"""Ask a server something small in its own protocol, to know whether it is really up.

No client library: one import of boto3 or of Cassandra's driver costs more than a whole probe, and
these run before a test has asked for a client. Straight to the loopback, so no proxy is in between.
"""

import socket
from collections.abc import Mapping
from http.client import HTTPConnection

from tests.servers.base import HOST

ANSWER_SECONDS_MAX = 2.0


def http(
    port: int,
    path: str = "/",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
) -> tuple[int, bytes]:
    """Status and body of one HTTP request; OSError or HTTPException when nobody answers."""
    connection = HTTPConnection(HOST, port, timeout=ANSWER_SECONDS_MAX)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def exchange(port: int, request: bytes, answer_bytes: int) -> bytes:
    """Send bytes and return the first bytes of the answer; OSError when nobody answers."""
    with socket.create_connection((HOST, port), timeout=ANSWER_SECONDS_MAX) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as stream:
            answer = stream.read(answer_bytes)
    if len(answer) < answer_bytes:
        raise ConnectionError(f"port {port}: closed after {len(answer)} of {answer_bytes} bytes")
    return answer
