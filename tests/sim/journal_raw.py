"""What a topic's events are, decoded from the bare rows and objects, after every single write.

Nothing here calls the product's readers: rows are plain MessagePack, segments plain Arrow, journals
plain Parquet. So a reader that goes wrong is compared with code that cannot go wrong the same way.

``tick`` counts the writes to the catalog. Each event has a history: what it was from which tick on.
A history never goes back: an event that was deleted stays deleted, and no value comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import crc32c
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.sim.audit import AuditedCatalog
from tests.sim.base import CountingStore
from tidelog.catalog.base import Change
from tidelog.clock import Clock

__all__ = [
    "CLOSED",
    "DELETED",
    "TRIMMED",
    "Gone",
    "Place",
    "Raw",
    "State",
    "Truth",
    "WatchedCatalog",
    "WatchedStore",
    "parquet_table",
    "traces",
]

Place = tuple[str, int, int]  # incarnation, partition, offset
Row = dict[str, Any]

_FRAME = b"\x28\xb5\x2f\xfd"  # how a frame of Zstandard begins


@dataclass(frozen=True)
class Raw:
    """One event as it was appended; only its value may change."""

    id: str | None
    key: bytes | None
    time_ms: int
    type: str | None
    value: bytes | None


class Gone:
    """Why an event cannot be read."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return self.why


DELETED: Final = Gone("deleted")
TRIMMED: Final = Gone("trimmed")
ABSENT: Final = Gone("not there yet")
CLOSED: Final = Gone("in a topic that is being deleted")

State = bytes | None | Gone


class WatchedCatalog(AuditedCatalog):
    """Reports every write that landed."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: Truth | None = None
        # Called after each write, with the rows of the partition before it and after it.
        self.on_rows: Callable[[str, dict[str, bytes], dict[str, bytes]], None] | None = None

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        before = self.values(partition) if self.on_rows is not None else {}
        super().write(partition, *changes, write_id=write_id)
        if self.on_rows is not None:
            self.on_rows(partition, before, self.values(partition))
        if self.truth is not None:
            self.truth.written(partition)

    def values(self, partition: str) -> dict[str, bytes]:
        """What the rows of a partition hold."""
        return {name: row.value for name, row in self.bare(partition).items()}

    def everything(self) -> Iterator[tuple[str, str, bytes]]:
        """Every row there is, with its partition and its name."""
        for partition, rows in self._partitions.items():
            for name, row in rows.items():
                yield partition, name, row.value


class WatchedStore(CountingStore):
    """Refuses to lose an object that a row names. Counts changes in the folders of archives."""

    changes = 0

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.truth: Truth | None = None

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        if self.truth is not None:
            self.truth.deleting(wanted)
        self.changes += any(key.startswith(("archives/", "dead/")) for key in wanted)
        super().delete(wanted)

    def _store(self, key: str, data: bytes) -> str:
        self.changes += key.startswith(("archives/", "dead/"))
        return super()._store(key, data)

    def find(self, key: str) -> bytes | None:
        """The bytes of an object, if it is there."""
        return self.data(key) if self.holds(key) else None


@dataclass
class Truth:
    """The histories of all events of all topics."""

    rows: WatchedCatalog
    objects: WatchedStore
    tick: int = 0
    events: dict[Place, Raw] = field(default_factory=dict)
    history: dict[Place, list[tuple[int, State]]] = field(default_factory=dict)
    by_id: dict[str, list[Place]] = field(default_factory=dict)
    audit: dict[str, Row] = field(default_factory=dict)  # by the record's id
    targets: set[str] = field(default_factory=set)  # incarnations left out of ``by_id``
    ready: list[tuple[int, bool]] = field(default_factory=list)  # whether there is a topic `t`
    touched: list[str] = field(default_factory=list)  # ids of events that have changed
    _heads: dict[str, Row] = field(default_factory=dict)
    _decoded: dict[bytes, Row] = field(default_factory=dict)
    _contents: dict[tuple[str, int], dict[int, Raw]] = field(default_factory=dict)
    _values: dict[str, bytes] = field(default_factory=dict)
    _needed: dict[str, set[str]] = field(default_factory=dict)

    def written(self, partition: str) -> None:
        """A write has landed in a catalog partition."""
        self.tick += 1
        kind, *rest = partition.split("/")
        if kind == "topic" and len(rest) == 2:
            self._look(partition, rest[0], int(rest[1]))
        elif partition == "registry":
            row = self.rows.values(partition).get("topic/t", b"")
            self.ready.append((self.tick, b"ready" in row))
        elif kind == "audit" and rest:  # of a topic or an archive
            self._look_at_audit(partition)

    def deleting(self, keys: Iterable[str]) -> None:
        """Objects are about to be deleted."""
        needed = set().union(*self._needed.values())
        lost = [key for key in keys if key in needed]
        assert not lost, f"objects {lost} are deleted, but rows name them"

    def states(self, place: Place, begin: int, end: int | None = None) -> list[State]:
        """What an event was at a tick, and what it became until another."""
        last = self.tick if end is None else end
        found: list[State] = [ABSENT]
        for tick, state in self.history.get(place, ()):
            if tick <= begin:
                found = [state]
            elif tick <= last:
                found.append(state)
        return found

    def was_ready(self, begin: int) -> bool:
        """Whether the topic was there all the time since a tick."""
        before = [is_ready for tick, is_ready in self.ready if tick <= begin][-1:]
        return all(before) and all(is_ready for tick, is_ready in self.ready if tick > begin)

    def now(self, place: Place) -> State:
        """What an event is."""
        return self.states(place, self.tick)[-1]

    def alive(self) -> Iterator[tuple[Place, Raw]]:
        """Events that can be read."""
        for place, raw in self.events.items():
            if not isinstance(self.now(place), Gone):
                yield place, raw

    def alive_with(self, event_id: str, tick: int | None = None) -> list[Place]:
        """Events that had an id at a tick; by default now."""
        at = self.tick if tick is None else tick
        places = self.by_id.get(event_id, ())
        return [each for each in places if not isinstance(self.states(each, at, at)[0], Gone)]

    def by_id_in(self, event_id: str, incarnation: str) -> list[Place]:
        """Events with an id that one topic has or had."""
        return [place for place in self.by_id.get(event_id, ()) if place[0] == incarnation]

    def end(self, incarnation: str, partition: int) -> int:
        """The offset that the next event of a partition gets."""
        return int(self._heads.get(f"topic/{incarnation}/{partition}", {"next": 0})["next"])

    def start(self, incarnation: str, partition: int) -> int:
        """The first offset of a partition that can be read."""
        return int(self._heads.get(f"topic/{incarnation}/{partition}", {"start": 0})["start"])

    # Inside.

    def _look(self, where: str, incarnation: str, partition: int) -> None:
        rows = self.rows.values(where)
        if "head" not in rows:
            self._needed.pop(where, None)
            self._close(incarnation, partition)
            return
        head = self._decode(rows["head"])
        if head["closed"]:
            self._needed.pop(where, None)
            self._close(incarnation, partition)
            return
        before = self._heads.get(where, {})
        for name in ("next", "start", "floor", "journaled", "compiled", "amendments"):
            assert before.get(name, 0) <= head[name], f"{name} of {where} went back"
        self._heads[where] = head
        runs, amendments = self._parse(rows)
        needed: set[str] = set()
        at = head["start"]
        for run in self._counted(runs, head):
            assert run["base"] <= at < run["base"] + run["count"], f"{where}: rows do not tile"
            needed.add(run["object"])
            contents = self._content(run)
            for offset in range(max(at, run["base"]), run["base"] + run["count"]):
                amendment = amendments.get(offset)
                if amendment is not None and amendment["sequence"] > _applied(run):
                    first, last = head["amended"] or (0, -1)
                    assert first <= offset <= last, f"no reader sees the amendment of {offset}"
                state = self._state(contents.get(offset), run, amendment, needed)
                self._record((incarnation, partition, offset), contents.get(offset), state)
            at = run["base"] + run["count"]
        assert at == head["next"], f"{where}: rows end at {at}, the head at {head['next']}"
        self._needed[where] = needed
        for offset in range(before.get("start", 0), head["start"]):
            place = (incarnation, partition, offset)
            if self.now(place) is not TRIMMED:
                self.history.setdefault(place, []).append((self.tick, TRIMMED))

    def _close(self, incarnation: str, partition: int) -> None:
        for place, history in self.history.items():
            if place[:2] == (incarnation, partition) and history[-1][1] is not CLOSED:
                history.append((self.tick, CLOSED))

    def _parse(self, rows: dict[str, bytes]) -> tuple[list[Row], dict[int, Row]]:
        runs, amendments = [], {}
        for name, value in rows.items():
            kind = name.partition("/")[0]
            if kind in ("journal", "run"):
                runs.append(self._decode(value) | {"kind": kind})
            elif kind == "amend":
                amendments[int(name[6:])] = self._decode(value)
        return runs, amendments

    def _counted(self, runs: list[Row], head: Row) -> list[Row]:
        """The rows that count, in order: journals up to a border, then runs."""
        found = []
        for run in runs:
            is_journal = run["kind"] == "journal"
            assert (run["journal"] is not None) == is_journal
            if is_journal:
                assert run["base"] + run["count"] <= head["journaled"], "a journal above the border"
            elif run["base"] < head["journaled"]:
                continue  # replaced by a journal, and not removed yet
            if run["base"] + run["count"] > head["start"]:
                found.append(run)
        return sorted(found, key=lambda run: int(run["base"]))

    def _state(self, raw: Raw | None, run: Row, amendment: Row | None, needed: set[str]) -> State:
        if raw is None:
            return DELETED
        if amendment is None or amendment["sequence"] <= _applied(run):
            return raw.value
        if amendment["kind"] == "delete":
            return DELETED
        if amendment["object"] is None:
            return bytes(amendment["value"]) if amendment["value"] is not None else None
        needed.add(amendment["object"])
        return self._value(amendment["object"])

    def _record(self, place: Place, raw: Raw | None, state: State) -> None:
        history = self.history.setdefault(place, [])
        if not history:
            assert raw is not None, f"{place} begins as deleted"
            self.events[place] = raw
            if raw.id is not None and place[0] not in self.targets:
                self.by_id.setdefault(raw.id, []).append(place)
        elif history[-1][1] == state:
            return
        else:
            assert history[-1][1] is not DELETED, f"{place} was deleted, and came back as {state!r}"
            assert history[-1][1] is not TRIMMED, f"{place} was trimmed, and came back"
            had = [each for _, each in history]
            assert state not in had, f"{place} became {state!r} a second time: {had}"
        if raw is not None:
            known = self.events[place]
            same = (raw.id, raw.key, raw.time_ms, raw.type)
            assert same == (known.id, known.key, known.time_ms, known.type), f"{place} is another"
        history.append((self.tick, state))
        event_id = self.events[place].id
        if isinstance(state, bytes) and event_id is not None:
            assert state.startswith(event_id.encode()), f"{place} got a value of another event"
        if event_id in self.by_id:
            self.touched.append(event_id)

    def _look_at_audit(self, partition: str) -> None:
        for name, value in self.rows.values(partition).items():
            record = self._decode(value)
            before = self.audit.get(record["id"])
            if before is not None and before["state"] == "done":
                assert record["state"] == "done", f"audit record {name} went back to `begun`"
            self.audit[record["id"]] = record

    def _decode(self, value: bytes) -> Row:
        found = self._decoded.get(value)
        if found is None:
            found = self._decoded[value] = msgspec.msgpack.decode(value)
        return found

    def _value(self, key: str) -> bytes:
        if key not in self._values:
            data = self.objects.find(key)
            assert data is not None, f"the value `{key}` is gone"
            self._values[key] = data
        return self._values[key]

    def _content(self, run: Row) -> dict[int, Raw]:
        """The events of a run or a journal, by offset."""
        key = run["object"], run["byte_start"] if run["journal"] is None else -1
        if key not in self._contents:
            data = self.objects.find(run["object"])
            assert data is not None, f"object `{run['object']}` is gone"
            part = data[run["byte_start"] : run["byte_end"]]
            assert crc32c.crc32c(part) == run["crc"], f"object `{run['object']}`: another checksum"
            if run["journal"] is None:
                found = dict(enumerate(_events(segment_table(data, part))))
                assert len(found) == run["count"]
            else:
                table = parquet_table(data)
                offsets = table.column("offset").to_pylist()
                found = dict(zip(offsets, _events(table), strict=True))
                assert len(found) == run["journal"][2]
            self._contents[key] = found
        found = self._contents[key]
        if run["journal"] is None:
            return {run["base"] + number: raw for number, raw in found.items()}
        return found


def _applied(run: Row) -> int:
    """Amendments up to this sequence are in it."""
    return int(run["journal"][3]) if run["journal"] is not None else 0


@lru_cache(4096)
def parquet_table(data: bytes) -> pa.Table:
    """All rows of a Parquet file."""
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)


@lru_cache(4096)
def segment_table(data: bytes, part: bytes | None = None) -> pa.Table:
    """The events of a segment, or of one piece of it: Arrow messages behind the file's schema."""
    if part is None:
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    schema_end = 16 + int.from_bytes(data[12:16], "little")  # magic, marker, length, schema
    return pa.ipc.open_stream(pa.BufferReader(data[8:schema_end] + part)).read_all()


def _events(table: pa.Table) -> Iterator[Raw]:
    columns = [table.column(name).to_pylist() for name in ("id", "key", "type", "value")]
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    for event_id, key, kind, value, time_ms in zip(*columns, times, strict=True):
        yield Raw(event_id, key, time_ms, kind, value)


def traces(rows: WatchedCatalog, objects: WatchedStore, needles: Iterable[bytes]) -> list[str]:
    """Where bytes are found: names, rows, and objects with what is compressed in them."""
    wanted = list(needles)
    found = []
    for partition, name, value in rows.everything():
        text = f"{partition} {name}".encode() + value
        found += [f"row {name} of {partition}: {each!r}" for each in wanted if each in text]
    for key, data in objects.bare().items():
        text = key.encode() + _unpacked(data) + _inner(key, data)
        found += [f"object {key}: {each!r}" for each in wanted if each in text]
    return found


@lru_cache(4096)
def _unpacked(data: bytes) -> bytes:
    """An object with each frame of Zstandard replaced by what is in it, pages that no row uses too.

    A frame itself is not searched: it joins literals that are apart in its contents.
    """
    found, at = bytearray(), 0
    while (start := data.find(_FRAME, at)) >= 0:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            inner = frame.decompress(data[start:])
        except zstandard.ZstdError:
            inner = b""
        end = len(data) - len(frame.unused_data) if frame.eof else start + len(_FRAME)
        found += data[at:start] + b"\0" + (inner if frame.eof else data[start:end]) + b"\0"
        at = end
    return bytes(found) + data[at:]


@lru_cache(4096)
def _inner(key: str, data: bytes) -> bytes:
    """What an object holds, uncompressed."""
    if key.endswith(".parquet"):
        return repr(parquet_table(data).to_pylist()).encode()
    if data.startswith(b"ARROW1"):
        return repr(segment_table(data).to_pylist()).encode()
    return b""
