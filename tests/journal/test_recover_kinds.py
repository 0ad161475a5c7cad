"""After a loss each event is in the topic once, whoever wrote it, or it is reported and kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from io import BytesIO
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.log.maintenance.test_losses import Embedded
from tests.log.producer.test_witnesses import Staging
from tests.support.ranges import batch_of
from tests.support.topic_upkeep import DAY_S
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment, encode_staged
from tidelog.connectors.sink import Lot
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.producer.copier import append_staged
from tidelog.log.producer.staged import StagedSegment
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.topic import Topic

EVENTS = [Event(b"with an id", b"k", id="a"), Event(b"without", b"k")]
ONCE = {"with an id": 1, "without": 1}
NAMES = {
    "unnamed producer": "~write",
    "named producer": "np",
    "pump": ":pipeline:pp:orders/0",
    "restore": ":pipeline:restore:0",
    "Spark sink": ":sink:s",
    "playback": "",
}
STAGED = ["pump", "restore", "Spark sink"]
LOSSES = ["rows", "journal", "both", "swept", "swept and forgotten"]
FLAGS = list(product([False, True], repeat=2))
COUNTS = ["appended", "present", "erased", "doubted", "waiting", "trimmed", "missing", "earlier"]


class Lossy(Staging):
    """One writer, a loss, and recoveries."""

    def now(self) -> Topic:
        return find_topic(self.context, "orders")

    def write(self, kind: str) -> None:
        name = NAMES[kind]
        if kind == "playback":
            sink = TopicPlaybackSink(self.context, self.now(), "again", False)
            sink.put(Lot(0, batch_of(EVENTS)))
        elif kind.endswith("producer"):
            appender = self.appender(self.now(), name)
            if kind.startswith("named"):
                appender.open_named()
            segment = encode_segment([(0, table_of(EVENTS, 0))], appender.known([0]))
            appender.commit(appender.upload(segment), segment.pieces[0])
        else:
            segment = encode_staged([(0, table_of(EVENTS, 0))], name)
            staged = StagedSegment(f"staging/p/0000000001/a/{self.ids.new()}/0", segment.pieces)
            self.store.put(staged.key, segment.data)
            append_staged(self.driver(name), [staged], 10)

    def lose(self, how: str, kind: str) -> None:
        forgets = how in ("rows", "both", "swept and forgotten")
        if forgets:
            self.keep_copy()
        self.write(kind)
        if not forgets:
            self.keep_copy()
        if how != "rows":
            self.compile(self.now())
        if how.startswith("swept"):
            self.sweeps()
        self.go_back()
        if how == "swept":
            self.trim_all()

    def trim_all(self) -> None:
        ends = {each: self.head(self.now(), each).next for each in range(2)}
        trim_topic(self.context, self.now(), ToOffsets(ends))

    def sweeps(self) -> None:
        for _ in range(2):
            self.clock.advance(DAY_S)
            self.sweep()

    def recovers(self, writers: bool, trimmed: bool, *, dry_run: bool = False) -> RecoverReport:
        lookup = Lookup(self.context, self.now())
        return recover_topic(
            self.context, lookup, dry_run=dry_run, writers_resumed=writers, include_trimmed=trimmed
        )

    def in_topic(self) -> Counter[str]:
        found = (self.events(self.now(), each).values() for each in range(2))
        return Counter(value for values in found for value in values)

    def stored(self) -> set[str]:
        """The values of all events that some object of the topic has."""
        found: set[str] = set()
        for info in self.store.list(f"topics/{self.orders.incarnation}/"):
            if info.key.endswith(".parquet"):
                table = pq.read_table(BytesIO(self.store.get(info.key)), columns=["value"])
            elif info.key.endswith(".arrow"):
                table = pa.ipc.open_file(pa.py_buffer(self.store.get(info.key))).read_all()
            else:
                continue
            found.update(value.decode() for value in table.column("value").to_pylist())
        return found


def check_accounts(report: RecoverReport) -> None:
    assert report.unaccounted == 0
    assert report.events == sum(getattr(report, name) for name in COUNTS), report


@pytest.mark.parametrize("flags", FLAGS, ids=["", "writers", "trimmed", "both"])
@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("kind", NAMES)
def test_event_is_in_the_topic_once_or_is_reported_and_kept(
    kind: str, how: str, flags: tuple[bool, bool]
) -> None:
    writers, trimmed = flags[1], flags[0]
    house = Lossy()
    house.lose(how, kind)
    dry = house.recovers(writers, trimmed, dry_run=True)
    report = house.recovers(writers, trimmed)
    assert asdict(report) == asdict(dry) | {"dry_run": False}
    check_accounts(report)
    house.sweeps()
    found = house.in_topic()
    assert all(times == 1 for times in found.values())
    left = set(ONCE) - set(found)
    assert left <= house.stored()
    assert len(left) <= report.waiting + report.trimmed
    last = house.recovers(True, True)
    check_accounts(last)
    assert last.appended == len(left)
    house.sweeps()
    assert house.in_topic() == ONCE
    assert house.recovers(True, True).events == 0


@pytest.mark.parametrize("kind", STAGED)
def test_events_whose_claim_outlived_them_wait_for_the_flag(kind: str) -> None:
    house = Lossy()
    house.lose("swept", kind)
    report = house.recovers(True, False)
    assert (report.appended, report.trimmed) == (0, 2)
    assert house.stored() == set(ONCE)
    assert house.recovers(True, True).appended == 2


def test_claim_counts_while_a_journal_holds_its_events() -> None:
    """A copy that a slow driver stored after the sweep holds nothing that is lost."""
    house = Lossy()
    house.write("pump")
    segment = next(i for i in house.store.list("topics/") if i.key.endswith(".arrow"))
    data = house.store.get(segment.key)
    house.compile(house.now())
    house.sweeps()
    house.store.put(segment.key, data)
    report = house.recovers(True, True)
    assert (report.events, report.appended) == (2, 0)
    assert report.present + report.earlier == 2
    check_accounts(report)
    assert house.in_topic() == ONCE


def test_recovered_events_that_were_lost_again_are_recovered_again() -> None:
    house = Lossy()
    house.lose("rows", "pump")
    assert house.recovers(True, False).appended == 2
    house.keep_copy()
    house.compile(house.now())
    house.sweeps()
    house.go_back()
    house.trim_all()
    report = house.recovers(True, True)
    check_accounts(report)
    house.sweeps()
    assert house.in_topic() == ONCE


def test_journal_stays_while_a_row_names_a_missing_object_of_its_events() -> None:
    house = Lossy()
    house.append(house.orders, ["with an id"])
    house.keep_copy()
    house.append(house.orders, ["without"])
    house.compile(house.now())
    house.sweeps()
    house.go_back()
    report = house.recovers(False, False)
    check_accounts(report)
    assert (report.appended, report.missing) == (1, 1)
    house.sweeps()
    trim_topic(house.context, house.now(), ToOffsets({0: 1}))
    house.recovers(False, False)
    house.sweeps()
    assert house.in_topic() == ONCE


def test_event_that_an_earlier_call_has_left_out_keeps_its_object(tmp_path: Path) -> None:
    """That call has doubted it, and appended one with a higher number."""
    embedded = Embedded(tmp_path)
    with embedded.open() as home:
        home.append("orders", [Event(b"first", id="a")])
    embedded.keep_copy()
    before = embedded.segments()
    with embedded.open() as home:
        home.append("orders", [Event(b"second", id="a"), Event(b"other")])
    lost = embedded.segments() - before
    embedded.go_back()
    with embedded.open() as home:
        home.update("orders", "a", b"third")
        report = home.recover_topic("orders")
        assert (report.appended, report.doubted) == (1, 1)
        home.trim("orders", ToOffsets({0: 1}))
        report = home.recover_topic("orders")
        assert (report.events, report.earlier, report.doubted) == (2, 1, 1)
        home.sweep(0)
    assert lost <= embedded.segments()
