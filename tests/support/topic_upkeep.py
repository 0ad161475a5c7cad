"""A small log to keep house in: plain substrates, fake time, and appends step by step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tidelog.catalog.base import Catalog, Delete, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import Segment, encode_segment, encode_staged
from tidelog.context import Context
from tidelog.log.maintenance.verify import VerifyReport, verify_topic
from tidelog.log.maintenance.verify_bytes import Finding
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.append import Appender
from tidelog.log.producer.append_plan import StoredSegment
from tidelog.log.topics import create_topic, find_topic, read_head
from tidelog.model import layout
from tidelog.model.event import Event
from tidelog.model.topic import AppenderView, Head, Run, Topic, decode_row, encode_row
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import FakeClock, seeded_ids

WEEK_S = 7 * 24 * 3600  # for which a sweep keeps strays
DAY_S = 24 * 3600
HOUR_MS = 3600 * 1000


class House:
    """One home's substrates, and what tests do with them."""

    def __init__(self, seed: int = 1) -> None:
        self.clock = FakeClock()
        self.store: Store = MemoryStore(self.clock)
        self.catalog: Catalog = MemoryCatalog()
        self.ids = seeded_ids(seed)
        self.context = Context(self.store, self.catalog, self.clock, self.ids, random.Random(seed))

    def faulty(self, faults: Faults) -> Context:
        """The same home behind a bad network."""
        return Context(
            FaultyStore(self.store, faults),
            FaultyCatalog(self.catalog, faults, self.clock),
            self.clock,
            self.ids,
            random.Random(7),
        )

    def topic(self, name: str = "orders", partitions: int = 1) -> Topic:
        wanted = Topic(name, self.ids.new(), partitions, self.clock.now_ms())
        return create_topic(self.context, wanted)

    def appender(self, topic: Topic, name: str | None = None) -> Appender:
        present = find_topic(self.context, topic.name)
        return Appender(self.context, present, name or f"~{self.ids.new()}")

    def append(
        self,
        topic: Topic,
        values: Sequence[str],
        partition: int = 0,
        at_ms: int | None = None,
        apart_ms: int = 0,
    ) -> int:
        """One run; its first offset."""
        appender = self.appender(topic)
        known = appender.known([partition])
        segment = self.shared_segment({partition: values}, at_ms, apart_ms, known)
        base, _ = appender.commit(appender.upload(segment), segment.pieces[0])
        appender.close()
        return base

    def segment(
        self, values: Sequence[str], partition: int = 0, at_ms: int | None = None
    ) -> Segment:
        return self.shared_segment({partition: values}, at_ms)

    def shared_segment(
        self,
        values: Mapping[int, Sequence[str]],
        at_ms: int | None = None,
        apart_ms: int = 0,
        known: Mapping[int, AppenderView] | None = None,
    ) -> Segment:
        """One segment for several partitions, whose events may lie apart in time."""
        time_ms = self.clock.now_ms() if at_ms is None else at_ms
        parts = []
        for partition, some in values.items():
            events = [
                Event(value.encode(), timestamp=time_ms + number * apart_ms)
                for number, value in enumerate(some)
            ]
            parts.append((partition, table_of(events, time_ms)))
        return encode_staged(parts) if known is None else encode_segment(parts, known)

    def orphan(self, topic: Topic) -> StoredSegment:
        """A segment that was uploaded and never committed."""
        appender = self.appender(topic)
        return appender.upload(self.shared_segment({0: ["lost"]}, known=appender.known([0])))

    def head(self, topic: Topic, partition: int = 0) -> Head:
        return read_head(self.context, topic, partition)[0]

    def rows(self, topic: Topic, prefix: str = "", partition: int = 0) -> list[Row]:
        where = layout.topic_partition(topic.incarnation, partition)
        return list(self.catalog.scan(where, prefix, prefix + "\U0010ffff"))

    def runs(self, topic: Topic, partition: int = 0) -> list[Run]:
        return [decode_row(row.value, Run, row.row) for row in self.rows(topic, "run/", partition)]

    def put(self, topic: Topic, row: str, value: bytes | Run | Head, partition: int = 0) -> None:
        """Write a row by hand, as damage does."""
        data = value if isinstance(value, bytes) else encode_row(value)
        where = layout.topic_partition(topic.incarnation, partition)
        self.catalog.write(where, Put(row, data), write_id=self.ids.new())

    def values(self, topic: Topic, partition: int = 0, start: int | None = None) -> list[str]:
        at = self.head(topic, partition).start if start is None else start
        found = []
        for stretch in Reader(self.context, topic, partition).read(at):
            found += [(event.value or b"").decode() for event in stretch.events()]
        return found

    def objects(self) -> set[str]:
        return {info.key for info in self.store.list()}


class DamagedHouse(House):
    """A house with a topic ``orders`` that tests damage by hand, and verify."""

    orders: Topic

    def verify(self) -> VerifyReport:
        return verify_topic(self.context, self.orders)

    def only_error(self) -> Finding:
        report = self.verify()
        assert report.errors == 1, report.findings
        return next(finding for finding in report.findings if finding.severity == "error")

    def delete(self, row: str) -> None:
        where = layout.topic_partition(self.orders.incarnation, 0)
        self.catalog.write(where, Delete(row), write_id=self.ids.new())

    def replace_object(self, run: Run, data: bytes) -> None:
        self.store.replace(run.object, data, self.store.head(run.object).etag)
