"""Lists what the bare substrates hold, by code that shares nothing with the product's readers.

Rows are decoded as plain MessagePack, segments as plain Arrow IPC files. Only the names of fields
and the layout of rows, which docs/reference/layout.md documents, are known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crc32c
import msgspec
import pyarrow as pa

from tests.sim.audit import AuditedCatalog
from tests.sim.base import CountingStore

__all__ = ["Bare", "fields"]


def fields(value: bytes) -> dict[str, Any]:
    """A row's fields by name."""
    found = msgspec.msgpack.decode(value)
    assert isinstance(found, dict)
    return found


class Bare:
    """The rows and objects of a world, as they are."""

    def __init__(self, rows: AuditedCatalog, objects: CountingStore) -> None:
        self._rows = rows
        self._objects = objects
        self._pieces: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def row(self, partition: str, row: str) -> dict[str, Any] | None:
        found = self._rows.bare(partition).get(row)
        return None if found is None else fields(found.value)

    def topics(self) -> dict[str, dict[str, Any]]:
        """The registered topics, by name."""
        rows = self._rows.bare("registry").values()
        found = [fields(row.value) for row in rows if row.row.startswith("topic/")]
        return {each["name"]: each for each in found}

    def head(self, incarnation: str, partition: int) -> dict[str, Any] | None:
        return self.row(f"topic/{incarnation}/{partition}", "head")

    def runs(self, incarnation: str, partition: int) -> Iterator[dict[str, Any]]:
        """The rows of runs, in order of their offsets."""
        rows = self._rows.bare(f"topic/{incarnation}/{partition}")
        for name in sorted(name for name in rows if name.startswith("run/")):
            run = fields(rows[name].value)
            assert int(name[4:]) == run["base"], f"row {name} says base {run['base']}"
            yield run

    def events(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a run, read from its segment."""
        place = (run["object"], run["byte_start"])
        if place not in self._pieces:
            self._pieces[place] = self._decode(run)
        return self._pieces[place]

    def _decode(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        data = self._objects.data(run["object"])
        piece = data[run["byte_start"] : run["byte_end"]]
        assert crc32c.crc32c(piece) == run["crc"], f"checksum of {run['object']}"
        schema = pa.ipc.open_file(pa.py_buffer(data)).schema.serialize().to_pybytes()
        options = pa.ipc.IpcReadOptions(use_threads=False)  # these are small, and there are many
        table = pa.ipc.open_stream(pa.py_buffer(schema + piece), options=options).read_all()
        assert table.num_rows == run["count"], f"{run['object']} holds {table.num_rows} events"
        return [dict(each) for each in table.to_pylist()]
