"""The writer of sinks that append to a log: ranges become segments, staged in the store.

A segment holds the events of a range for all partitions of the target, in order. Events do not
change: id, key, value, type, headers and time are what was read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.clock import RandomIds
from tidelog.codec.event_batch import STORED_SCHEMA, check_events, stored_columns
from tidelog.codec.partitioner import split
from tidelog.codec.segment import encode_staged, read_piece
from tidelog.connectors.sink import RangeWriter, RecordRefusedError, WriterResult
from tidelog.errors import InvalidError
from tidelog.log.producer.staged import Collector
from tidelog.model.address import Address
from tidelog.model.limits import EVENT_BYTES_CEILING, TIMESTAMP_MS_END
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.store.base import Store, put_fresh

__all__ = [
    "COPIES",
    "EventLimit",
    "Partitioner",
    "SegmentTarget",
    "SegmentWriter",
    "check_numbers",
    "check_records",
    "check_rows",
    "keeps_partition",
    "keyless_partition",
    "same_places",
    "staged_events",
]

Partitioner = Callable[
    [pa.RecordBatch], npt.NDArray[np.int32]
]  # the target's partition of each event


@dataclass(frozen=True, slots=True)
class EventLimit:
    """How large events may be."""

    event_bytes_max: int
    own: bool = False  # whether Tidelog added something to them, which has room on top


# Events that the home accepted before, in a topic or an archive. Neither Tidelog's own additions
# nor a lower event_bytes_max since then refuses them.
COPIES = EventLimit(EVENT_BYTES_CEILING, own=True)


@dataclass(frozen=True, slots=True)
class SegmentTarget:
    """What segments are for."""

    url: str
    limit: EventLimit = COPIES
    mark: str = ""  # prefix of the names of staged objects
    writer: str = ""  # the producer that will commit to a topic, if its row is permanent


class SegmentWriter:
    """Stages the segments of one range."""

    def __init__(
        self, store: Store, staging: str, target: SegmentTarget, place: Partitioner
    ) -> None:
        self._store = store
        own = f"{target.mark}{RandomIds().new()}"  # a repeated task gets its own names
        self._staging = f"{staging}/{own}"
        self._target = target
        self._place = place
        self._collector = Collector()
        self._files: list[FileEntry] = []

    def write(self, batch: pa.RecordBatch) -> None:
        table = stored_columns(batch.select(STORED_SCHEMA.names), 0)
        check_records(batch, table, self._target.limit)
        numbered = table.append_column("offset", batch.column("offset"))
        for joined, places in self._collector.add(numbered, self._place(batch)):
            self._stage(joined, places)

    def close(self) -> WriterResult:
        for joined, places in self._collector.rest():
            self._stage(joined, places)
        return WriterResult(tuple(self._files), sum(file.events for file in self._files))

    def _stage(self, table: pa.Table, places: npt.NDArray[np.int32] | None) -> None:
        if places is None:
            places = np.zeros(table.num_rows, np.int32)
        offsets = pc.min_max(table.column("offset")).as_py()
        parts = split(table.drop_columns(["offset"]), places)
        tables = [(partition, part) for partition, part, _ in parts]
        segment = encode_staged(tables, writer=self._target.writer)
        staged = f"{self._staging}/{len(self._files)}"
        put_fresh(self._store, staged, segment.data)
        self._files.append(
            FileEntry(
                staged=staged,
                target=self._target.url,
                size=len(segment.data),
                crc=crc32c.crc32c(segment.data),
                events=table.num_rows,
                first_offset=offsets["min"],
                last_offset=offsets["max"],
                first_ms=min(piece.first_ms for piece in segment.pieces),
                last_ms=max(piece.last_ms for piece in segment.pieces),
                kind="segment",
                pieces=segment.pieces,
            )
        )


def keeps_partition(address: Address) -> bool:
    """Returns whether the address says ``partition=same``; otherwise by key."""
    wanted = address.options.get("partition", "key")
    if wanted not in ("key", "same"):
        raise InvalidError(f"sink `{address.text}`: partition `{wanted}`: give key or same")
    return wanted == "same"


def same_places(batch: pa.RecordBatch, partitions: int, target: str) -> npt.NDArray[np.int32]:
    """Returns the old partition of each event. Raises ``InvalidError`` if the target lacks it.

    ``target`` is the name for messages.
    """
    column = batch.column("partition")
    highest = pc.max(column).as_py()
    if highest is not None and highest >= partitions:
        raise _too_few(target, partitions, highest)
    places: npt.NDArray[np.int32] = column.to_numpy(zero_copy_only=False).astype(np.int32)
    return places


def check_numbers(target: str, partitions: int, sources: Sequence[str]) -> None:
    """Raises ``InvalidError`` if a source partition has a number that the target lacks."""
    names = [each.rpartition("/")[2] for each in sources]
    highest = max((int(name) for name in names if _is_number(name)), default=-1)
    if highest >= partitions:
        raise _too_few(target, partitions, highest)


def check_records(
    batch: pa.RecordBatch, events: pa.Table | pa.RecordBatch, limit: EventLimit
) -> None:
    """Raises ``RecordRefusedError`` for the first record that is not a valid event.

    ``batch`` comes from a source, and ``events`` has the same rows in stored columns.
    """
    late = _first_wrong_time(events.slice(0, _first_error(batch)))
    row = _first_error(batch) if late is None else late
    try:
        check_events(events.slice(0, row), limit.event_bytes_max, own=limit.own)
    except InvalidError as exc:
        raise _refusal(batch, exc) from exc
    if late is not None:
        time_ms = events.column("timestamp")[late].value
        said = f"event: its time {time_ms} ms is outside of the years 1970 to 9999: fix it"
        raise _refusal(batch, InvalidError(said, row=late))
    check_rows(batch)


def check_rows(batch: pa.RecordBatch) -> None:
    """Raises ``RecordRefusedError`` for the first row of a source that is not a valid event."""
    row = _first_error(batch)
    if row is not None:
        raise _refusal(batch, InvalidError(f"{batch.column('error')[row]}: fix it", row=row))


def _first_error(batch: pa.RecordBatch) -> int | None:
    if "error" not in batch.schema.names:
        return None
    found = pc.index(pc.is_valid(batch.column("error")), True).as_py()
    return None if found < 0 else int(found)


def _first_wrong_time(events: pa.Table | pa.RecordBatch) -> int | None:
    times = events.column("timestamp").cast(pa.int64())
    wrong = pc.or_(pc.less(times, 0), pc.greater_equal(times, TIMESTAMP_MS_END))
    found = pc.index(wrong, True).as_py()
    return None if found < 0 else int(found)


def _refusal(batch: pa.RecordBatch, error: InvalidError) -> RecordRefusedError:
    row = error.context["row"]
    names = [name for name in ("topic", "partition") if name in batch.schema.names]
    place = "/".join(str(batch.column(name)[row].as_py()) for name in names)
    offset = batch.column("offset")[row].as_py()
    time_ms = batch.column("timestamp")[row].value if "timestamp" in batch.schema.names else 0
    said = str(error).removeprefix(f"row {row}: ")
    return RecordRefusedError(
        f"source partition `{place}`, offset {offset}: {said}; everything before this offset is "
        "copied, and nothing from it on until then. A pump with --transform can leave the record "
        "out",
        **{**error.context, "partition": place, "offset": offset, "time_ms": time_ms},
    )


def _too_few(target: str, partitions: int, needed: int) -> InvalidError:
    has = "1 partition" if partitions == 1 else f"{partitions} partitions"
    return InvalidError(
        f"{target}: has {has}, and there are events of partition {needed}: create it with "
        f"{needed + 1} or more, or place events by key (`--partition key`; in an address, "
        "`?partition=key`)"
    )


def keyless_partition(source_partition: str, partitions: int) -> int:
    """Returns the partition of events without a key: one per source partition, to keep order."""
    name = source_partition.rpartition("/")[2]
    return (int(name) if _is_number(name) else zlib.crc32(name.encode())) % partitions


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


_: type[RangeWriter] = SegmentWriter


def staged_events(
    store: Store, manifest: Manifest, skip: int = 0
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields the events staged as segments after the first ``skip``, each with its partition.

    Raises ``NotFoundError`` if a segment is missing.
    """
    for file in manifest.files:
        for piece in file.pieces:
            if skip >= piece.count:
                skip -= piece.count
                continue
            what = f"object `{file.staged}`, bytes {piece.byte_start} to {piece.byte_end}"
            data = store.get(file.staged, piece.byte_start, piece.byte_end)
            for batch in read_piece(data, piece.crc, piece.count, what):
                part = batch.slice(min(skip, batch.num_rows))
                skip -= batch.num_rows - part.num_rows
                if part.num_rows:
                    yield part, piece.partition
