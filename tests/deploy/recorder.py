"""A proxy between Tidelog and its servers that notes which rights each request needs on AWS.

Requests pass through unchanged, with their host header, so that signatures hold. It can lose a
reply: the server has done the work, and the client never learns of it.
"""

from __future__ import annotations

import http.client
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class Right(NamedTuple):
    """What a policy must allow for one request."""

    action: str
    resource: str  # bucket or bucket/key, table, or the ARN of a topic or function
    leading: str = ""  # the hash key, for items of DynamoDB


class Recorder:
    """The rights that were needed so far."""

    def __init__(self) -> None:
        self.rights: set[Right] = set()
        self.lose: list[str] = []  # prefixes of "METHOD path", each loses one reply

    def loses(self, request: str) -> bool:
        """Whether the reply to this one is to be lost; each prefix counts once."""
        for prefix in self.lose:
            if request.startswith(prefix):
                self.lose.remove(prefix)
                return True
        return False


@contextmanager
def recording(endpoint: str, recorder: Recorder) -> Iterator[str]:
    """A proxy's address in front of a server."""
    upstream = urlsplit(endpoint)

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("transfer-encoding"):
                raise AssertionError("a body of unknown length: teach the recorder")
            server = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            reply = server.getresponse()
            data = reply.read()
            recorder.rights |= rights_of(self.command, self.path, self.headers, body, reply.status)
            if recorder.loses(f"{self.command} {self.path}"):
                self.close_connection = True
                server.close()
                return
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = reply.getheader("content-length") if self.command == "HEAD" else None
            self.send_header("content-length", length or str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
            server.close()

        def log_message(self, *_: object) -> None:
            pass

    for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
        setattr(Proxy, f"do_{method}", Proxy.handle_any)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()


def rights_of(
    method: str, target: str, headers: http.client.HTTPMessage, body: bytes, status: int
) -> set[Right]:
    """What AWS would ask for before it does this."""
    if called := re.fullmatch(r"/2015-03-31/functions/(.*)/invocations", unquote(target)):
        return {Right("lambda:InvokeFunction", called[1])}
    if headers.get("x-amz-target", "").startswith("Kinesis_"):
        asked = json.loads(body)
        stream = str(asked.get("StreamARN") or asked.get("StreamName"))
        return {Right(f"kinesis:{headers['x-amz-target'].rpartition('.')[2]}", stream)}
    if "x-amz-target" in headers:
        return _dynamodb(headers["x-amz-target"].rpartition(".")[2], json.loads(body))
    if b"Action=" in body:
        form = parse_qs(body.decode())
        return {Right(f"sns:{form['Action'][0]}", form["TopicArn"][0])}
    if b"<Delete" in body:
        bucket = urlsplit(target).path.strip("/")
        keys = re.findall(rb"<Key>(.*?)</Key>", body)
        return {Right("s3:DeleteObject", f"{bucket}/{key.decode()}") for key in keys}
    return _s3(method, target, headers, status)


def _dynamodb(action: str, request: dict[str, object]) -> set[Right]:
    if action == "TransactWriteItems":
        found: set[Right] = set()
        verbs = {"Put": "PutItem", "Delete": "DeleteItem", "ConditionCheck": "ConditionCheckItem"}
        items = request["TransactItems"]
        assert isinstance(items, list)
        for item in items:
            [(verb, change)] = item.items()
            found |= _dynamodb(verbs[verb], change)
        return found
    table = str(request["TableName"])
    for name in ("Key", "Item"):
        if name in request:
            return {Right(f"dynamodb:{action}", table, request[name]["partition"]["S"])}  # type: ignore[index]
    if action == "Query":
        values = request["ExpressionAttributeValues"]
        return {Right("dynamodb:Query", table, values[":partition"]["S"])}  # type: ignore[index]
    return {Right(f"dynamodb:{action}", table)}


def _s3(method: str, target: str, headers: http.client.HTTPMessage, status: int) -> set[Right]:
    parts = urlsplit(target)
    path, query = unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)
    bucket, _, key = path.partition("/")
    if not key:
        if "uploads" in query:
            return {Right("s3:ListBucketMultipartUploads", bucket)}
        assert "list-type" in query, f"{method} {target}: teach the recorder"
        return {Right("s3:ListBucket", bucket)}
    needed = {Right({"PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}.get(method, ""), path)}
    if method in ("GET", "HEAD"):
        needed = {Right("s3:GetObject", path)}
        if status == 404:  # without this right AWS says 403 instead
            needed.add(Right("s3:ListBucket", bucket))
    if method == "DELETE" and "uploadId" in query:
        return {Right("s3:AbortMultipartUpload", path)}
    if method == "POST":  # of multipart uploads
        needed = {Right("s3:PutObject", path)}
    if "x-amz-copy-source" in headers:
        needed.add(Right("s3:GetObject", unquote(headers["x-amz-copy-source"]).strip("/")))
    return needed
