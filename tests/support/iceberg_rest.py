"""An Iceberg REST catalog over HTTP, as far as tests need one: namespaces, tables, commits.

A commit holds all its requirements against the table's metadata and applies its updates, one
commit at a time, by pyiceberg's own rules. ``python -m`` is not needed: a thread serves it, and
other processes reach it by its address.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import TypeAdapter
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import TableRequirement, TableUpdate, update_table_metadata

_REQUIREMENTS: TypeAdapter[Any] = TypeAdapter(tuple[TableRequirement, ...])
_UPDATES: TypeAdapter[Any] = TypeAdapter(tuple[TableUpdate, ...])


class IcebergRest(ThreadingHTTPServer):
    """The server, and the tables that it knows."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.tables: dict[tuple[str, str], TableMetadata] = {}
        self.commits = 0
        self.lost_replies = 0  # of the commits to come
        self.refusing = False  # every request, as a server does that is being repaired
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: IcebergRest

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def log_message(self, *_: Any) -> None:
        """Nothing on the tests' own output."""

    def _answer(self, work: Callable[[list[str]], tuple[int, dict[str, Any]]]) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")[1:]
        with self.server.lock:
            status, body = work(parts)
        if self.server.refusing:
            status, body = 500, _error("InternalServerError", 500)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _get(self, parts: list[str]) -> tuple[int, dict[str, Any]]:
        if parts == ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        if len(parts) == 2:
            known = parts[1] in self.server.namespaces
            return (200, {"namespace": [parts[1]]}) if known else _missing("NoSuchNamespace")
        found = self.server.tables.get((parts[1], parts[3]))
        return _missing("NoSuchTable") if found is None else (200, _shown(found))

    def _post(self, parts: list[str]) -> tuple[int, dict[str, Any]]:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if parts == ["namespaces"]:
            name = ".".join(body["namespace"])
            if name in self.server.namespaces:
                return 409, _error("NamespaceAlreadyExists", 409)
            self.server.namespaces.add(name)
            return 200, {"namespace": body["namespace"]}
        if len(parts) == 3:
            return self._create(parts[1], body)
        return self._commit((parts[1], parts[3]), body)

    def _create(self, namespace: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if (namespace, body["name"]) in self.server.tables:
            return 409, _error("TableAlreadyExists", 409)
        spec = body.get("partition-spec")
        made = new_table_metadata(
            location=body["location"],
            schema=Schema.model_validate(body["schema"]),
            partition_spec=PartitionSpec.model_validate(spec)
            if spec
            else UNPARTITIONED_PARTITION_SPEC,
            sort_order=UNSORTED_SORT_ORDER,
            properties=body.get("properties", {}),
            table_uuid=uuid.uuid4(),
        )
        if not body.get("stage-create"):
            self.server.tables[(namespace, body["name"])] = made
        return 200, _shown(made)

    def _commit(self, name: tuple[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        known = self.server.tables.get(name)
        updates = _UPDATES.validate_python(body["updates"])
        try:
            for requirement in _REQUIREMENTS.validate_python(body["requirements"]):
                requirement.validate(known)
        except CommitFailedException as exc:
            return 409, _error("CommitFailedException", 409, str(exc))
        if known is None:
            from pyiceberg.catalog import MetastoreCatalog

            base = MetastoreCatalog._empty_table_metadata()
            made = update_table_metadata(base, updates, enforce_validation=True)
        else:
            made = update_table_metadata(known, updates)
        self.server.tables[name] = made
        self.server.commits += 1
        if self.server.lost_replies:
            self.server.lost_replies -= 1
            return 504, _error("CommitStateUnknownException", 504)
        return 200, _shown(made)


def _shown(metadata: TableMetadata) -> dict[str, Any]:
    location = f"{metadata.location}/metadata/{uuid.uuid4()}.metadata.json"
    return {
        "metadata-location": location,
        "metadata": json.loads(metadata.model_dump_json()),
        "config": {},
    }


def _missing(kind: str) -> tuple[int, dict[str, Any]]:
    return 404, _error(f"{kind}Exception", 404)


def _error(kind: str, code: int, message: str = "") -> dict[str, Any]:
    return {"error": {"message": message or kind, "type": kind, "code": code}}


@contextmanager
def serving() -> Iterator[IcebergRest]:
    with IcebergRest() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
