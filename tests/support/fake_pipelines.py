"""A source and a sink in memory, for pipelines in simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import crc32c
import msgspec
import pyarrow as pa

from tidelog.codec.event_batch import table_of, with_position
from tidelog.connectors.archive.staging import discard_files, publish_files
from tidelog.connectors.sink import WriterResult
from tidelog.connectors.source import (
    Bounds,
    Chunk,
    DirectReader,
    SourcePartition,
    SourceRange,
    check_incarnation,
    even_cuts,
)
from tidelog.errors import NotFoundError
from tidelog.model.event import Event
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store.base import Store

DATES = ("2026-11-13", "2026-11-14", "2026-11-15")


class ListSource:
    """Events in lists; positions are offsets, some of which hold no event."""

    url = "list:"

    def __init__(self, partitions: int, count: int) -> None:
        self.events = {
            SourcePartition("t", str(p)): {n: f"{p}:{n}" for n in range(count) if n % 7 != 3}
            for p in range(partitions)
        }
        self.ends = dict.fromkeys(self.events, count)
        self.firsts = dict.fromkeys(self.events, 0)
        self.incarnation = ""

    def partitions(self) -> list[SourcePartition]:
        return sorted(self.events)

    def bounds(self, partitions: Sequence[SourcePartition]) -> dict[SourcePartition, Bounds]:
        return {
            p: Bounds(str(self.firsts[p]), str(self.ends[p]), self.incarnation) for p in partitions
        }

    def read(self, range: SourceRange) -> Iterator[Chunk]:
        start, limit = int(range.start), int(range.limit)
        if start < self.firsts[range.partition]:
            raise NotFoundError(f"{range.partition.text}: {start} is gone")
        held = self.events[range.partition]
        for offset in sorted(n for n in held if start <= n < limit):
            table = table_of([Event(held[offset].encode())], 0)
            batch = with_position(table.to_batches()[0], "t", int(range.partition.name), offset)
            yield Chunk(batch, str(offset + 1))
        check_incarnation(range, self.incarnation)
        yield Chunk(pa.RecordBatch.from_pylist([], table_of([], 0).schema), str(limit))

    def reader(self, range: SourceRange) -> DirectReader:
        return DirectReader(self, range)

    def cut(self, start: str, end: str, events: int) -> str:
        return str(min(int(end), int(start) + events))

    def divide(self, range: SourceRange, parts: int) -> tuple[str, ...]:
        return even_cuts(range, parts)

    def before(self, one: str, other: str) -> bool:
        return int(one) < int(other)

    def count(self, start: str, end: str) -> int:
        return int(end) - int(start)


class LinesWriter:
    """Stages a file of JSON lines for each date."""

    def __init__(self, store: Store, partition: str, staging: str) -> None:
        self._store = store
        self._partition = partition
        self._staging = staging
        self._rows: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def write(self, batch: pa.RecordBatch) -> None:
        for offset, value in zip(
            batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True
        ):
            self._rows[DATES[offset % len(DATES)]].append((offset, value.decode()))

    def close(self) -> WriterResult:
        files = []
        for number, (date, rows) in enumerate(sorted(self._rows.items())):
            data = msgspec.json.encode(rows)
            staged = f"{self._staging}/{number}"
            self._store.put(staged, data)
            name = f"1_{self._partition.rpartition('/')[2]}_{rows[0][0]:020}.json"
            files.append(
                FileEntry(
                    staged=staged,
                    target=f"archives/a/g1/t/dt={date}/{name}",
                    size=len(data),
                    crc=crc32c.crc32c(data),
                    events=len(rows),
                    first_offset=rows[0][0],
                    last_offset=rows[-1][0],
                    first_ms=0,
                    last_ms=0,
                )
            )
        return WriterResult(tuple(files), sum(file.events for file in files))


class LinesSink:
    """Files of JSON lines by date, in a store that is given."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def writer(self, partition: str, staging: str) -> LinesWriter:
        return LinesWriter(self._store, partition, staging)

    def publish(self, manifest: Manifest) -> int:
        publish_files(self._store, manifest.files)
        return 0

    def discard(self, manifest: Manifest) -> None:
        discard_files(self._store, manifest.files)


def listed(store: Store) -> list[str]:
    """Every event that a plain recursive listing of the archive finds."""
    found: list[str] = []
    for info in store.list("archives/a/g1/"):
        rows = msgspec.json.decode(store.get(info.key))
        assert info.key.endswith(f"_{rows[0][0]:020}.json")
        found += [value for _, value in rows]
    return found
