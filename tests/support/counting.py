"""Counts what a home holds, by code that shares nothing with the product's readers.

Rows are decoded as plain MessagePack, segments as plain Arrow, journals as plain Parquet. Only the
documented names of rows and fields are known here (docs/reference/layout.md).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.catalog.base import Catalog
from tidelog.store.base import Store


def stored_events(catalog: Catalog, store: Store, topic: str) -> dict[tuple[int, int], bytes]:
    """Every event of a topic that counts, by partition and offset; without deleted ones."""
    row = catalog.get("registry", f"topic/{topic}")
    assert row is not None, f"topic {topic} is not registered"
    registered = _fields(row.value)
    found: dict[tuple[int, int], bytes] = {}
    for partition in range(registered["partitions"]):
        where = f"topic/{registered['incarnation']}/{partition}"
        rows = {each.row: each.value for each in catalog.scan(where)}
        found |= {(partition, offset): value for offset, value in _partition(rows, store).items()}
    return found


def _partition(rows: dict[str, bytes], store: Store) -> dict[int, bytes]:
    head = _fields(rows["head"])
    journaled, start = head.get("journaled", 0), head.get("start", 0)
    events: dict[int, bytes] = {}
    for name in sorted(rows):
        run = _fields(rows[name]) if name.startswith(("run/", "journal/")) else {}
        if name.startswith("journal/"):
            table = pq.read_table(pa.BufferReader(store.get(run["object"])))
            events |= dict(
                zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)
            )
        elif name.startswith("run/") and run["base"] >= journaled:
            events |= dict(enumerate(_segment(store, run), run["base"]))
    for name in sorted(rows):
        if name.startswith("amend/") and _fields(rows[name])["kind"] == "delete":
            events.pop(int(name.removeprefix("amend/")), None)
    assert all(offset < head["next"] for offset in events)
    return {offset: value for offset, value in events.items() if offset >= start}


def _segment(store: Store, run: dict[str, Any]) -> list[bytes]:
    data = store.get(run["object"])
    schema = pa.ipc.open_file(pa.py_buffer(data)).schema.serialize().to_pybytes()
    piece = data[run["byte_start"] : run["byte_end"]]
    values: list[bytes] = pa.ipc.open_stream(schema + piece).read_all()["value"].to_pylist()
    assert len(values) == run["count"], f"{run['object']} holds {len(values)} events"
    return values


def _fields(value: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(value[:-4])  # a checksum is behind it
    return found
