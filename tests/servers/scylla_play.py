"""A writer that plays Scylla on Cassandra: a table, its change log, and generations of streams.

The tables are laid out as Scylla lays them out, in all three shapes of generations. What Scylla's
nodes would do is done here by hand: a change goes into the log at any time that the caller wants,
with the change's own time, in the stream of the generation that was in force then.
"""

from __future__ import annotations

import random
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from cassandra.cluster import Session
from cassandra.query import BatchStatement, BatchType

from tests.servers.cassandra import Cassandra

Shape = Literal["one table", "two tables", "tablets"]

TICKS_1970 = 0x01B21DD213814000
OPERATIONS = {
    "pre_image": 0,
    "update": 1,
    "insert": 2,
    "row_delete": 3,
    "partition_delete": 4,
    "range_delete_start_inclusive": 5,
    "range_delete_start_exclusive": 6,
    "range_delete_end_inclusive": 7,
    "range_delete_end_exclusive": 8,
    "post_image": 9,
}

GENERATION_TABLES: dict[Shape, tuple[str, ...]] = {
    "one table": (
        (
            "CREATE TABLE cdc_streams_descriptions (time timestamp PRIMARY KEY, "
            "streams frozen<set<blob>>, expired timestamp)"
        ),
    ),
    "two tables": (
        (
            "CREATE TABLE cdc_generation_timestamps (key text, time timestamp, expired timestamp, "
            "PRIMARY KEY (key, time)) WITH CLUSTERING ORDER BY (time DESC)"
        ),
        (
            "CREATE TABLE cdc_streams_descriptions_v2 (time timestamp, range_end bigint, "
            "streams frozen<set<blob>>, PRIMARY KEY (time, range_end))"
        ),
    ),
    "tablets": (
        (
            "CREATE TABLE cdc_timestamps (keyspace_name text, table_name text, "
            '"timestamp" timestamp, PRIMARY KEY ((keyspace_name, table_name), "timestamp")) '
            'WITH CLUSTERING ORDER BY ("timestamp" DESC)'
        ),
        (
            'CREATE TABLE cdc_streams (keyspace_name text, table_name text, "timestamp" timestamp, '
            "stream_state tinyint, stream_id blob, PRIMARY KEY ((keyspace_name, table_name), "
            '"timestamp", stream_state, stream_id)) WITH CLUSTERING ORDER BY ("timestamp" DESC)'
        ),
    ),
}
BASE = """CREATE TABLE orders (region text, id int, note text static, state text, total decimal,
    tags set<text>, words list<text>, marks map<text, int>, home address,
    kept frozen<address>, seen timestamp, PRIMARY KEY (region, id))"""
COLUMNS = {
    "note": ("text", None),
    "state": ("text", None),
    "total": ("decimal", None),
    "tags": ("frozen<set<text>>", "frozen<set<text>>"),
    "words": ("frozen<map<timeuuid, text>>", "frozen<set<timeuuid>>"),
    "marks": ("frozen<map<text, int>>", "frozen<set<text>>"),
    "home": ("frozen<address>", "frozen<set<smallint>>"),
    "kept": ("frozen<address>", None),
    "seen": ("timestamp", None),
}


@dataclass(frozen=True)
class Row:
    """A row of the log: an operation on a row of the base table, and what it set."""

    operation: str
    region: str
    id: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    deleted: Sequence[str] = ()
    removed: Mapping[str, Any] = field(default_factory=dict)  # elements, by column
    ttl: int | None = None


@dataclass(frozen=True)
class WrittenRows:
    """Where a batch is in the log."""

    stream: bytes
    time: uuid.UUID
    time_ms: int
    rows: tuple[Row, ...]

    def identity(self, number: int) -> tuple[str, str, int]:
        return self.stream.hex(), str(self.time), number


class Play:
    """A keyspace of its own, with the table ``orders``."""

    def __init__(
        self,
        server: Cassandra,
        shape: Shape = "two tables",
        *,
        vnodes: int = 6,
        ttl_s: int = 86_400,
        seed: int = 7,
        login: tuple[str, str] | None = None,
    ) -> None:
        self.server = server
        self.shape: Shape = shape
        self.keyspace = f"play_{uuid.uuid4().hex[:12]}"
        self.chance = random.Random(seed)
        self.generations: dict[int, list[bytes]] = {}
        self.written: list[WrittenRows] = []
        self._vnodes = vnodes
        self.session: Session = server.session(login=login)
        self.session.execute(
            f"CREATE KEYSPACE {self.keyspace} WITH replication = "
            "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
        self.session.set_keyspace(self.keyspace)
        self.session.execute("CREATE TYPE address (street text, no int)")
        self.session.execute(BASE)
        self.session.execute(self._log_table(ttl_s))
        for statement in GENERATION_TABLES[shape]:
            self.session.execute(statement)
        self._inserts: dict[tuple[str, ...], Any] = {}

    def url(self, **options: object) -> str:
        """The source's address."""
        said = {"generations": self.keyspace, "groups": 4, **options}
        query = "&".join(f"{name}={value}" for name, value in said.items())
        return f"scylla://{self.server.address}/{self.keyspace}.orders?{query}"

    def begin_generation(self, time_ms: int, streams: int = 12) -> None:
        """A new set of streams from a time on."""
        ids = [self._stream_id(number % self._vnodes) for number in range(streams)]
        self.generations[time_ms] = ids
        time = moment(time_ms)
        if self.shape == "one table":
            self.session.execute(
                "INSERT INTO cdc_streams_descriptions (time, streams) VALUES (%s, %s)",
                (time, set(ids)),
            )
        elif self.shape == "two tables":
            for number in range(0, len(ids), 4):
                self.session.execute(
                    "INSERT INTO cdc_streams_descriptions_v2 (time, range_end, streams) "
                    "VALUES (%s, %s, %s)",
                    (time, number, set(ids[number : number + 4])),
                )
            self.session.execute(
                "INSERT INTO cdc_generation_timestamps (key, time) VALUES ('timestamps', %s)",
                (time,),
            )
        else:
            for each in ids:
                self.session.execute(
                    "INSERT INTO cdc_streams (keyspace_name, table_name, timestamp, stream_state, "
                    "stream_id) VALUES (%s, 'orders', %s, 0, %s)",
                    (self.keyspace, time, each),
                )
            self.session.execute(
                "INSERT INTO cdc_timestamps (keyspace_name, table_name, timestamp) "
                "VALUES (%s, 'orders', %s)",
                (self.keyspace, time),
            )

    def write(self, time_ms: int, *rows: Row, torn: int | None = None) -> WrittenRows:
        """One batch lands now, changed at a time; torn: without its rows from a number on."""
        start = max(each for each in self.generations if each <= time_ms)
        streams = self.generations[start]
        stream = streams[zlib.crc32(rows[0].region.encode()) % len(streams)]
        made = WrittenRows(stream, self.timeuuid(time_ms), time_ms, rows)
        self.land(made, 0, len(rows) if torn is None else torn)
        self.written.append(made)
        return made

    def land(self, made: WrittenRows, first: int, end: int) -> None:
        """Some rows of a batch get into the log."""
        batch = BatchStatement(BatchType.UNLOGGED)
        for number, row in enumerate(made.rows[first:end], first):
            values: dict[str, Any] = {
                "cdc$stream_id": made.stream,
                "cdc$time": made.time,
                "cdc$batch_seq_no": number,
                "cdc$operation": OPERATIONS[row.operation],
                "cdc$end_of_batch": number == len(made.rows) - 1 or None,
                "cdc$ttl": row.ttl,
                "region": row.region,
                "id": row.id,
                **row.values,
                **{f"cdc$deleted_{name}": True for name in row.deleted},
                **{f"cdc$deleted_elements_{name}": some for name, some in row.removed.items()},
            }
            told = {name: value for name, value in values.items() if value is not None}
            batch.add(self._insert(tuple(told)), list(told.values()))
        self.session.execute(batch)

    def timeuuid(self, time_ms: int) -> uuid.UUID:
        """One that nobody else has; within a millisecond in no order."""
        ticks = time_ms * 10_000 + self.chance.randrange(10_000) + TICKS_1970
        head = struct.pack(
            ">IHH", ticks & 0xFFFFFFFF, (ticks >> 32) & 0xFFFF, (ticks >> 48) & 0xFFF | 0x1000
        )
        return uuid.UUID(bytes=head + b"\x80" + self.chance.randbytes(7))

    def expected(self) -> dict[tuple[str, str, int], str]:
        """Every change that must become an event, and its operation."""
        return {
            made.identity(number): row.operation
            for made in self.written
            for number, row in enumerate(made.rows)
            if not _is_joined(made.rows, row)
        }

    def close(self) -> None:
        self.session.cluster.shutdown()

    def _insert(self, names: tuple[str, ...]) -> Any:
        if names not in self._inserts:
            columns = ", ".join(f'"{name}"' for name in names)
            marks = ", ".join("?" for _ in names)
            self._inserts[names] = self.session.prepare(
                f"INSERT INTO orders_scylla_cdc_log ({columns}) VALUES ({marks})"
            )
        return self._inserts[names]

    def _stream_id(self, vnode: int) -> bytes:
        index = 0 if self.shape == "tablets" else vnode
        low = self.chance.getrandbits(38) << 26 | index << 4 | 1
        return struct.pack(">qQ", self.chance.getrandbits(63), low)

    @staticmethod
    def _log_table(ttl_s: int) -> str:
        columns = ""
        for name, (kind, elements) in COLUMNS.items():
            columns += f', "{name}" {kind}, "cdc$deleted_{name}" boolean'
            if elements:
                columns += f', "cdc$deleted_elements_{name}" {elements}'
        return (
            'CREATE TABLE orders_scylla_cdc_log ("cdc$stream_id" blob, "cdc$time" timeuuid, '
            '"cdc$batch_seq_no" int, "cdc$operation" tinyint, "cdc$ttl" bigint, '
            f'"cdc$end_of_batch" boolean, region text, id int{columns}, '
            'PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no")) '
            f"WITH default_time_to_live = {ttl_s}"
        )


def _is_joined(rows: Sequence[Row], row: Row) -> bool:
    """Whether a row is the image of another one of its batch that changed the same row."""
    if row.operation not in ("pre_image", "post_image"):
        return False
    return any(
        (each.region, each.id) == (row.region, row.id)
        for each in rows
        if each.operation not in ("pre_image", "post_image")
    )


def moment(time_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
