"""A catalog that goes back to a copy: what was acknowledged since is not deleted from the store.

Producers, a compiler, a trimmer and a sweeper are at work, and a copy of all rows is taken at a
random moment, often between two commits of one flush. When they have ended, the catalog is put back
to that copy, perhaps weeks later and perhaps with a store that dates its objects in another order,
and others go on, with fresh clients, from what it knows. After every step each event that was
acknowledged, and never trimmed while the catalog knew it, is in some object. In the end the sweep
refuses the topic wherever a lost commit was seen by another lost one, was that of a staged segment,
or is in a journal that the catalog does not know, and ``verify`` names an object of every lost
event. In some worlds all is compiled and swept before the copy and before the catalog goes back, so
that journals are the only copies of what is lost. In some worlds recoveries run beside the others
after the loss. Then each event is in the topic once in the end, unless a row names an object that
is missing. In some of these worlds, with drivers of staged segments, all is compiled and swept
before the catalog goes back, and a person trims the topic past what is lost before the last
recovery. In some, events share ids, others have keys, and all events of a key are deleted after the
loss, also those that only strays hold: then no recovery brings back what the catalog had forgotten.
In some, few commits are lost, as many come after them, and the store dates the newest objects
first. Rows and objects are read here as plain MessagePack, Arrow and Parquet.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.sim.bare import fields
from tests.sim.base import ACCEPTED, SimWorld, in_peace
from tidelog.catalog.base import Row
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_segment, encode_staged
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.erasure.delete import DeleteResult, delete_strays
from tidelog.errors import ConflictError, CorruptError
from tidelog.journal.amend import Amender
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import RecoverReport, recover_topic
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import VerifyReport, verify_topic
from tidelog.log.producer.append import Appender
from tidelog.log.producer.copier import Copier, append_staged
from tidelog.log.producer.staged import StagedSegment, staged_origin
from tidelog.log.topics import create_topic, find_topic
from tidelog.model.event import Event
from tidelog.model.topic import Head, Topic
from tidelog.store.base import put_fresh
from tidelog.testing.faults import Fault

__all__ = ["LastCommitWorld", "RollbackWorld"]

PARTITIONS = 2
KEYS = (b"k0", b"k1", b"k2", b"k3", b"k4", b"k5")
PEACE_S = 600
WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True)
class _Sent:
    """An acknowledged event: where it is, and the newest run when its producer began."""

    value: bytes
    partition: int
    offset: int
    before: str  # the object of that run, or a staged segment's own; "" where neither is known
    phase: int
    key: bytes | None
    time_ms: int


class RollbackWorld(SimWorld):
    """One seed's world."""

    # A process that the catalog's past refuses stops; a person has to look at it.
    accepted = (*ACCEPTED, CorruptError, ConflictError)
    hosts_count = 2
    steps_max = 40_000

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.topic = create_topic(self._quiet, Topic("t", self._ids.new(), PARTITIONS, 0))
        self.sent: list[_Sent] = []
        self.trimmed: set[bytes] = set()
        self.forgotten: set[bytes] = set()  # events that the catalog does not know any more
        self.phase = 0
        self.copy_at = self.random.randrange(5, 120)  # writes
        self.copies_between = self.chance(0.4)  # two commits of one flush
        self.copied: dict[str, dict[str, Row]] | None = None
        self.has_swept = False  # since the copy was taken
        self.recovers = seed % 3 == 0
        self.amends = seed % 9 == 6
        if self.amends:
            self.copy_at = self.random.randrange(20, 60)
        self.stages = seed % 4 == 1
        self.only_stages = seed % 8 == 1  # before the loss: nothing else proves it then
        if self.only_stages:
            self.copy_at = self.random.randrange(2, 16)
        self.only_journals = seed % 10 == 2 and not self.recovers  # when the catalog goes back
        if self.only_journals:
            self.copy_at = 1 << 30  # the copy is taken when all is compiled
            self.copies_between = False
        self.redates = seed % 8 == 4 and not self.recovers and not self.only_journals
        if self.redates:  # few commits are lost, and as many come after them
            self.copy_at = self.random.randrange(4, 24)
        # The newest journals are the only copies, and a person trims the topic past what is lost.
        self.trims_past_lost = self.stages and self.recovers
        self.chooses = seed % 6 == 3  # producers append where they have looked, as for absent ids
        self.erased: set[bytes] = set()  # events before deletes of their key that have returned
        self.is_trimmed_past_lost, self._deletes = False, 0
        self._values: dict[str, frozenset[bytes]] = {}

    def run(self) -> Counter[Fault]:
        with self.simulation():
            for phase in range(2):
                self.phase = phase
                self.spawn_all()
                self.scheduler.run(self.steps_max, self._after_step)
                if phase == 0:
                    if self.only_journals:
                        self.compile_and_sweep()
                        self.spawn_all()
                        self.scheduler.run(self.steps_max, self._after_step)
                    if self.trims_past_lost or self.only_journals:
                        self.compile_and_sweep()
                    self.go_back()
            self.faults.heal()
            if self.only_journals:
                in_peace(self, "others", self._go_on, PEACE_S)
            self.check_end()
        return self.faults.counts

    def spawn_all(self) -> None:
        if self.stages:
            self._spawn("driver", self.copy_staged)
        if self.only_stages and not self.phase:
            return
        one_shots = self.random.choice([1, 3])
        for number in range((1, 3)[self.phase] if self.redates else one_shots):
            self._spawn(f"one-shot-{number}", self.append_once)
        for number in range(self.random.choice([0, 1]) + self.chooses):
            self._spawn(f"producer-{number}", self.append_many)
        if self.chance(0.7) or self.only_journals:
            self._spawn("compiler", self.compile)
        if self.chance(0.5) and not (self.phase and self.recovers):
            self._spawn("trimmer", self.trim)
        for number in range(self._recoverers()):
            self._spawn(f"recoverer-{number}", self.recover)
        if self.phase or self.chance(0.5):
            self._spawn("sweeper", self.sweep)
        if self.phase and self.amends:
            self._spawn("amender", self.amend)

    def _recoverers(self) -> int:
        if not (self.phase and self.recovers):
            return 0
        if self.amends and self.chance(0.5):
            return 0  # the recovery comes in the end, after all deletes
        return self.random.choice([1, 2])

    # The actors.

    def append_once(self) -> None:
        for _ in range(4):
            context = self._context()
            context.clock.sleep(self.random.uniform(0, 1))
            places = self.random.sample(range(PARTITIONS), self.random.choice([1, 1, PARTITIONS]))
            before = {place: self._head(place).get("last_object", "") for place in places}
            with contextlib.suppress(*ACCEPTED, ConflictError):
                appender = Appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
                self._append(context, appender, places, before)
                appender.close()

    def append_many(self) -> None:
        context = self._context()
        appender = Appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
        for _ in range(5):
            context.clock.sleep(self.random.uniform(0, 1))
            with contextlib.suppress(*ACCEPTED, ConflictError):
                self._append(context, appender, [self.random.randrange(PARTITIONS)], {})

    def _append(
        self, context: Context, appender: Appender, places: list[int], before: dict[int, str]
    ) -> None:
        parts = []
        for place in sorted(places):
            event = self._event(f"{place} {context.ids.new()}".encode())
            parts.append((place, table_of([event], context.clock.now_ms())))
        segment = encode_segment(parts, appender.known(sorted(places)))
        stored = appender.upload(segment)
        for (place, table), piece in zip(parts, segment.pieces, strict=True):
            if self.chooses:
                base, stored = appender.commit_at(
                    stored,
                    piece,
                    lambda at=place: self._head(at)["next"],  # type: ignore[misc]
                )
            else:
                base, stored = appender.commit(stored, piece)
            event = table.to_pylist()[0]
            told = before.get(place, ""), self.phase, event["key"], _time_ms(table)
            self.sent.append(_Sent(event["value"], place, base, *told))
            if len(parts) > 1 and place == min(places) and self.copies_between:
                self._keep_copy_once()

    def copy_staged(self) -> None:
        """Commits staged segments, as drivers of pumps and Spark do."""
        for _ in range(3):
            context = self._context()
            context.clock.sleep(self.random.uniform(0, 1))
            places = self.random.sample(range(PARTITIONS), self.random.choice([1, PARTITIONS]))
            parts = []
            for place in sorted(places):
                event = self._event(f"{place} {context.ids.new()}".encode())
                parts.append((place, table_of([event], context.clock.now_ms())))
            segment = encode_staged(parts)
            staged = StagedSegment(f"staging/{context.ids.new()}/0", segment.pieces)
            with contextlib.suppress(*ACCEPTED, ConflictError):
                put_fresh(context.store, staged.key, segment.data)
                copier = Copier(context, find_topic(context, "t"), f"~{context.ids.new()}")
                append_staged(copier, [staged])
                for place, table in parts:
                    self._note_copied(copier, staged, place, table)

    def _note_copied(
        self, copier: Copier, staged: StagedSegment, place: int, table: pa.Table
    ) -> None:
        head, _ = copier._heads.get(place, (Head(), ""))
        if staged_origin(staged.key) in head.last_object:  # else a recovery has appended it
            event = table.to_pylist()[0]
            told = head.last_object, self.phase, event["key"], _time_ms(table)
            self.sent.append(_Sent(event["value"], place, head.last_base, *told))

    def _event(self, value: bytes) -> Event:
        if not self.amends:
            return Event(value)
        if self.chance(0.5):
            return Event(value, id=f"i{self.random.randrange(3)}")
        return Event(value, self.random.choice(KEYS))

    def amend(self) -> None:
        """Deletes all events of a key, as ``delete --prove`` does; forgotten ones stay erased."""
        context = self._context()
        for _ in range(4):
            context.clock.sleep(self.random.uniform(0, 1))
            key = self.random.choice(KEYS)
            with contextlib.suppress(*ACCEPTED, ConflictError):
                amender = Amender(context, Lookup(context, find_topic(context, "t")), Why("sim"))
                before = {each.value for each in self.sent if each.key == key}
                deleted = DeleteResult(amender.delete_key(key, lambda _: None).events)
                delete_strays(context, amender, deleted, (), [key])
                self.erased |= before

    def compile(self) -> None:
        context = self._context()
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 2))
            with contextlib.suppress(*ACCEPTED):
                compile_topic(context, self.topic, CompilePolicy.everything())

    def trim(self) -> None:
        context = self._context()
        context.clock.sleep(self.random.uniform(0, 3))
        partition = self.random.randrange(PARTITIONS)
        start = self.random.randrange(max(1, self._head(partition)["next"]))
        with contextlib.suppress(*ACCEPTED, ConflictError):
            trim_topic(context, self.topic, ToOffsets({partition: start}))

    def sweep(self) -> None:
        context = self._context()
        for _ in range(3):
            context.clock.sleep(self.random.uniform(0, 2))
            with contextlib.suppress(*ACCEPTED, ConflictError):
                sweep_home(context, 1)

    def recover(self) -> None:
        context = self._context()
        for _ in range(2):
            context.clock.sleep(self.random.uniform(0, 2))
            with contextlib.suppress(*ACCEPTED, ConflictError):
                self._recover(context)

    def _recover(self, context: Context) -> RecoverReport:
        include = self.trims_past_lost and self.is_trimmed_past_lost
        lookup = Lookup(context, find_topic(context, "t"))
        report = recover_topic(context, lookup, writers_resumed=include, include_trimmed=include)
        counts = (report.appended, report.present, report.erased, report.doubted, report.waiting)
        others = report.trimmed + report.missing + report.earlier
        assert report.events == sum(counts) + others, report
        return report

    def _recover_if_whole(self, context: Context) -> None:
        """Where ids must be looked up in an object that is missing, it refuses: restore first."""
        with contextlib.suppress(CorruptError):
            self._recover(context)

    # The catalog goes back.

    def compile_and_sweep(self) -> None:
        """Let journals be the only copies of all events when the catalog goes back."""
        if not self.only_journals:
            self._keep_copy_once()
        rates, self.faults.rates = self.faults.rates, {}
        in_peace(self, "compiler", self._compile_all, PEACE_S)
        for _ in range(2):
            in_peace(self, "sweeper", lambda context: sweep_home(context, 0), PEACE_S)
        self.faults.rates = rates
        self._keep_copy_once()

    def _compile_all(self, context: Context) -> None:
        with contextlib.suppress(*ACCEPTED, ConflictError):
            compile_topic(context, self.topic, CompilePolicy.everything())

    def _go_on(self, context: Context) -> None:
        """Take the offsets and the epochs of what is lost once more, from what the catalog has."""
        for _ in range(4):
            appender = Appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
            self._append(context, appender, list(range(PARTITIONS)), {})
            appender.close()
            with contextlib.suppress(CorruptError):  # a row may name an object that is missing
                self._compile_all(context)

    def _trim_past_lost(self, context: Context) -> None:
        """Trim each partition past the last row that names an object which is missing."""
        starts = {}
        for partition in range(PARTITIONS):
            spans = [
                (run["base"], run["base"] + run["count"])
                for run in self._living_runs(partition)
                if not self.objects.holds(run["object"])
            ]
            if spans:
                starts[partition] = max(end for _, end in spans)
            for each in self.sent:
                is_lost = any(base <= each.offset < end for base, end in spans)
                if each.partition == partition and is_lost and each.value not in self.trimmed:
                    self.forgotten.add(each.value)
        if starts:
            trim_topic(context, find_topic(context, "t"), ToOffsets(starts))
        self.is_trimmed_past_lost = True

    def go_back(self) -> None:
        """Put the rows back to the copy; nothing that was sent before arrives any more."""
        self.faults.late.clear()
        if self.copied is None:
            self._keep_copy()
        self.rows._partitions = {name: dict(rows) for name, rows in (self.copied or {}).items()}
        self.rows._had.clear()
        if self.chance(0.5):
            self.scheduler.time.advance(self.random.uniform(1, 4) * WEEK_S)
        if self.chance(0.5) or self.redates:
            self._shuffle_dates()
        self.forgotten = {
            each.value
            for each in self.sent
            if each.value not in self.trimmed and each.offset >= self._head(each.partition)["next"]
        }

    def _shuffle_dates(self) -> None:
        """Let the store be a copy whose tool has dated the objects in another order."""
        objects = sorted(self.objects._objects.items(), key=lambda each: each[1][1].modified_ms)
        dates = [info.modified_ms for _, (_, info) in objects]
        if self.chance(0.7) or self.redates:
            dates = [dates[-1] - number for number in range(len(dates))]  # the newest first
        else:
            self.random.shuffle(dates)
        for (key, (data, info)), date in zip(objects, dates, strict=True):
            self.objects._objects[key] = (data, replace(info, modified_ms=date))

    def _date_now(self) -> None:
        """Let the store be a copy that has just been made."""
        now_ms = self.scheduler.clock.now_ms()
        for key, (data, info) in self.objects._objects.items():
            self.objects._objects[key] = (data, replace(info, modified_ms=now_ms))

    def _keep_copy_once(self) -> None:
        if self.copied is None and self.phase == 0:
            self._keep_copy()

    def _keep_copy(self) -> None:
        self.copied = {name: dict(rows) for name, rows in self.rows._partitions.items()}

    # Checks.

    def check(self) -> None:
        if self.rows.writes >= self.copy_at:
            self._keep_copy_once()
        self.has_swept |= self.phase == 0 and self.copied is not None and self._is_swept()
        starts = [self._head(partition)["start"] for partition in range(PARTITIONS)]
        for each in self.sent:
            if each.value not in self.forgotten and each.offset < starts[each.partition]:
                self.trimmed.add(each.value)
        if self._is_swept():
            self._deletes = self.objects.deletes
            self._check_stored()

    def _is_swept(self) -> bool:
        return self._deletes != self.objects.deletes

    def _check_stored(self) -> None:
        stored = frozenset[bytes]().union(*(self._read(key) for key in self._data_keys()))
        for each in self.sent:
            if each.value not in self.trimmed and not self._is_erased(each):
                assert each.value in stored, f"acknowledged event {each} is in no object"

    def check_end(self) -> None:
        report = in_peace(self, "sweeper", lambda context: sweep_home(context, 0), PEACE_S)
        self._check_stored()
        if self.recovers:
            self._check_recovered()
            return
        self._check_reported(in_peace(self, "verify", self._verify, PEACE_S))
        lost = [*self._seen_losses(), *self._lost_in_journals()]
        if lost:
            refused = [each.topic for each in report.refused]
            assert refused == ["t"], f"no sweep refuses, though {lost[0]} was lost"

    def _check_recovered(self) -> None:
        if self.amends and self.chance(0.5):
            self._date_now()
        if self.trims_past_lost:
            in_peace(self, "person", self._trim_past_lost, PEACE_S)
        for _ in range(2):
            in_peace(self, "recoverer", self._recover_if_whole, PEACE_S)
            self._check_once()
            in_peace(self, "sweeper", lambda context: sweep_home(context, 0), PEACE_S)
        self._check_stored()

    def _check_once(self) -> None:
        """No event is in the topic twice; none that was acknowledged is absent."""
        found: Counter[bytes] = Counter()
        is_whole = True
        for partition in range(PARTITIONS):
            head = self._head(partition)
            deleted = self._deleted(partition)
            for run in self._living_runs(partition):
                if not self.objects.holds(run["object"]):
                    is_whole = False
                    continue
                is_journal = run["object"].endswith(".parquet")
                if is_journal or run["base"] not in deleted:  # one event in a run
                    found.update(self._values_of(run["object"], partition, head["start"], deleted))
        for value, times in found.items():
            assert times == 1, f"event {value!r} is in the topic {times} times"
        for each in self.sent if is_whole else ():
            is_over = each.value in self.trimmed or self._is_erased(each)
            assert each.value in found or is_over, f"{each} was not recovered"
        for value in self.erased:
            assert value not in found, f"{value!r} was deleted, and came back"

    def _living_runs(self, partition: int) -> Iterator[dict[str, Any]]:
        """The runs and journals of a partition that hold events which it has."""
        head = self._head(partition)
        for name, row in self.rows.bare(self._place(partition)).items():
            run = fields(row.value) if name.startswith(("run/", "journal/")) else None
            if run is None or run["base"] + run["count"] <= head["start"]:
                continue
            if not name.startswith("run/") or run["base"] >= head["journaled"]:
                yield run

    def _deleted(self, partition: int) -> set[int]:
        """The offsets that rows of amendments say are deleted."""
        rows = self.rows.bare(self._place(partition)).items()
        amended = {int(name[6:]): row for name, row in rows if name.startswith("amend/")}
        return {at for at, row in amended.items() if fields(row.value)["kind"] == "delete"}

    def _is_erased(self, sent: _Sent) -> bool:
        """Whether the topic's ledger has its key, up to its time or a later one."""
        return sent.key is not None and self._erased_until(sent.key) >= sent.time_ms

    def _erased_until(self, key: bytes) -> int:
        digest = sha256(key).hexdigest()
        rows = self.rows.bare(f"erased/{self.topic.incarnation}/{digest[:2]}")
        row = rows.get(f"key/{digest}")
        return -1 if row is None else int(fields(row.value)["until_ms"])

    def _values_of(self, key: str, partition: int, start: int, deleted: set[int]) -> list[bytes]:
        """Of a partition, in an object; of a journal those from the start on that are there."""
        ours = b"%d " % partition
        if not key.endswith(".parquet"):
            return [value for value in self._read(key) if value.startswith(ours)]
        table = pq.read_table(BytesIO(self.objects.data(key)), use_threads=False)
        pairs = zip(
            table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True
        )
        return [value for offset, value in pairs if offset >= start and offset not in deleted]

    def _verify(self, context: Context) -> VerifyReport:
        return verify_topic(context, self.topic)

    def _check_reported(self, report: VerifyReport) -> None:
        """Every event that the catalog has lost is in an object of which ``verify`` warns."""
        reported = {each.where for each in report.findings if each.severity != "note"}
        warned = {key for key in self._data_keys() if f"object `{key}`" in reported}
        values = frozenset[bytes]().union(*(self._read(key) for key in warned))
        for each in self.sent:
            if each.phase == 0 and each.value in self.forgotten:
                assert each.value in values, f"verify does not warn of {each}, which is lost"

    def _seen_losses(self) -> Iterator[_Sent]:
        """Lost commits that prove themselves: of staged segments, and of producers that had seen
        another lost one; with the objects still there.
        """
        if self.has_swept:
            return  # an object that was compiled and swept before the loss proves nothing
        known = {
            fields(row.value)["object"]
            for rows in (self.copied or {}).values()
            for name, row in rows.items()
            if name.startswith(("run/", "journal/"))
        }
        listed = {
            key
            for rows in (self.copied or {}).values()
            for name, row in rows.items()
            if name.startswith("unused/")
            for key in fields(row.value)["objects"]
        }
        keys = set(self._data_keys())
        for each in self.sent:
            is_lost = each.phase == 0 and each.value in self.forgotten
            if is_lost and each.before in keys - known - listed:
                yield each

    def _lost_in_journals(self) -> Iterator[_Sent]:
        """Lost commits that a journal proves: it is there, and the catalog never had it.

        Where the offset is not trimmed, it has another event or none.
        """
        rows = [row for each in range(PARTITIONS) for row in self._rows_of(each)]
        known = {each for row in rows for each in [row.get("object"), *row.get("objects", ())]}
        strays = {key for key in self._data_keys() if key.endswith(".parquet")} - known
        values = frozenset[bytes]().union(*(self._read(key) for key in strays))
        for each in self.sent:
            is_lost = each.phase == 0 and each.value in self.forgotten & values
            if is_lost and each.offset >= self._head(each.partition)["start"]:
                yield each

    def _rows_of(self, partition: int) -> Iterator[dict[str, Any]]:
        """The rows of a partition that name or list objects."""
        for name, row in self.rows.bare(self._place(partition)).items():
            if name.startswith(("run/", "journal/", "unused/")):
                yield fields(row.value)

    def _data_keys(self) -> list[str]:
        return [key for key in self.objects.bare() if key.endswith((".arrow", ".parquet"))]

    def _read(self, key: str) -> frozenset[bytes]:
        """The values that an object holds."""
        if key not in self._values:
            data = self.objects.data(key)
            if key.endswith(".parquet"):
                table = pq.read_table(BytesIO(data), columns=["value"], use_threads=False)
            else:
                table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
            self._values[key] = frozenset(table.column("value").to_pylist())
        return self._values[key]

    def acknowledged(self) -> int:
        return len(self.sent)

    def _place(self, partition: int) -> str:
        return f"topic/{self.topic.incarnation}/{partition}"

    def _head(self, partition: int) -> dict[str, Any]:
        return fields(self.rows.bare(self._place(partition))["head"].value)


def _time_ms(table: pa.Table) -> int:
    return int(table.column("timestamp").cast(pa.int64())[0].as_py())


class LastCommitWorld(RollbackWorld):
    """The catalog loses one commit, so no other object proves that it was there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.copy_at = 1 << 30
        self.copies_between = False

    def go_back(self) -> None:
        self._keep_copy()
        rates, self.faults.rates = self.faults.rates, {}
        in_peace(self, "last", self._append_last, PEACE_S)
        self.faults.rates = rates
        super().go_back()

    def _append_last(self, context: Context) -> None:
        appender = Appender(context, find_topic(context, "t"), f"~{context.ids.new()}")
        self._append(context, appender, [self.random.randrange(PARTITIONS)], {})
        appender.close()
