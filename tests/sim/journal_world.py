"""Journals in a bad world: several amenders, lookups, compilers, sweeps, trims and copiers at once.

Every process works through the public calls of the journal room. What they were told is compared
with :class:`tests.sim.journal_raw.Truth`, which decodes the bare rows and objects after each write:

- a read gets, for each offset, something that was true between its begin and its end (P5);
- when an update or a delete returns, it is true for all events that were there when it began, and
  nothing brings the old state back (P5); its audit records say ``done`` for ever;
- an acknowledged append is where its positions say (P1), and offsets are dense (P2);
- of events that are appended only if absent, two with one id are never there at once;
- a copier brings no event back whose delete has returned;
- after compile, grace and sweep no byte of a deleted event is left (P5a).

Limits are small here, so that few events make several lots, records, pages and row groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c

from tests.sim.base import ACCEPTED, check_swept
from tests.sim.journal_home import KEYS, PARTITIONS, Desk, HomeWorld
from tests.sim.journal_raw import DELETED, Gone, Place, traces
from tidelog.codec.event_batch import table_of
from tidelog.codec.segment import encode_staged
from tidelog.connectors.topic.segments import EventLimit
from tidelog.connectors.topic.sink import TopicSettings, TopicSink
from tidelog.context import Context
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
)
from tidelog.journal.amend import AmendResult
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.scribe import ScribeOptions
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.maintenance.trim import ToOffsets, trim_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import find_topic
from tidelog.model.event import Event
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import Topic

__all__ = ["JournalWorld", "Tally"]

LATER_MS = 3_000_000_000_000  # beyond what any host's clock says


@dataclass
class Tally:
    """What has happened, for tests that the world is not idle."""

    updates: int = 0  # calls that returned
    deletes: int = 0
    compiled: int = 0  # swaps
    reads: int = 0  # events that were compared
    gets: int = 0
    absents: int = 0  # appends if absent that returned
    refused: int = 0  # of them, that met an id
    copies: int = 0
    erased: int = 0  # events of which no trace was left


class JournalWorld(HomeWorld):
    """One seed's world."""

    prefill = 20  # events of each partition
    updates = 0.6  # of what amenders do
    pause_s = 2.0  # of amenders and compilers, at most
    deleted_max = 6  # ids in one call
    copied = 2  # sets of old events
    may_fail: tuple[type[TidelogError], ...] = ACCEPTED

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tally = Tally()
        self.done_whys: set[str] = set()  # of amendments that returned
        self.erased: dict[str, int] = {}  # ids whose delete has returned, and when
        self.manifests: list[Manifest] = []
        self.new: dict[int, list[str]] = {}  # by manifest, ids whose events are newer than a delete
        self.erased_keys: dict[bytes, int] = {}

    def spawn_all(self) -> None:
        """The actors of this world."""
        for number in range(3):
            self._spawn(f"amender-{number}", self.amend)
        self._spawn("producer", self.produce)
        self._spawn("absent-1", self.append_absent)
        self._spawn("absent-2", self.append_absent)
        self._spawn("reader", self.read)
        self._spawn("getter", self.get)
        self._spawn("compiler", self.compile)
        self._spawn("scribe", self.scribe)
        self._spawn("sweeper", self.sweep)
        self._spawn("copier-1", self.copy)
        self._spawn("copier-2", self.copy)
        self._spawn("trimmer", self.trim)

    def fill(self) -> None:
        """Events that are there from the beginning, in several runs."""
        for partition in range(PARTITIONS):
            left = self.prefill
            while left:
                count = min(left, self.random.choice([3, 5, 8]))
                self.append(self.quiet, partition, [self.event() for _ in range(count)])
                left -= count
        self.manifests = [self._manifest(number) for number in range(self.copied)]

    # The actors.

    def amend(self) -> None:
        """Updates and deletes sets of events that overlap with those of others."""
        desk = Desk(self._context())
        for _ in range(4):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            ids = self.some_ids(self.random.choice([1, 4, 9, 14]))
            chance = self.random.random()
            with contextlib.suppress(*self.may_fail):
                if chance < self.updates:
                    self.update(desk, ids)
                elif chance < 0.9:
                    self.delete(desk, ids[: self.deleted_max])
                else:
                    self.delete_key(desk, f"k{self.random.randrange(KEYS)}".encode())

    def update(self, desk: Desk, ids: Sequence[str]) -> None:
        why = desk.context.ids.new()[:12]
        pad = self.random.choice(["", "", "-" * 60])  # large ones are objects
        values: dict[str, bytes | None] = {each: f"{each}={why}{pad}".encode() for each in ids}
        begin = self.truth.tick
        done = desk.update_many("t", values, why=why)
        self._acknowledged(why)
        self.tally.updates += 1
        for event_id, value in values.items():
            places = self.truth.alive_with(event_id, begin)
            if event_id in done.missing:
                self._check_missing(event_id, begin, "update")
                continue
            for place in places:
                states = self.truth.states(place, begin)
                # Another update that came at the same time may count as the later one.
                assert value in states or len(states) > 1, (
                    f"the update of {event_id} returned, but {place} was {states}"
                )

    def delete(self, desk: Desk, ids: Sequence[str]) -> None:
        why = desk.context.ids.new()[:12]
        begin = self.truth.tick
        done = desk.delete("t", ids, why=why)
        self._acknowledged(why)
        self._check_deleted(done, ids, begin)

    def delete_key(self, desk: Desk, key: bytes) -> None:
        why = desk.context.ids.new()[:12]
        begin = self.truth.tick
        done = desk.delete_key("t", key, why=why)
        self._acknowledged(why)
        if done.events:
            self.erased_keys[key] = self.truth.tick
        self.tally.deletes += 1
        for place, raw in list(self.truth.events.items()):
            if raw.key == key and place[0] not in self.truth.targets:
                first = self.truth.states(place, begin)[0]
                now = self.truth.now(place)
                assert isinstance(first, Gone) or isinstance(now, Gone), (
                    f"the delete of key {key!r} returned, but {place} is {now!r}"
                )

    def produce(self) -> None:
        context = self._context()
        for _ in range(5):
            context.clock.sleep(self.random.uniform(0, 2))
            events = [self.event() for _ in range(2)]
            with contextlib.suppress(*self.may_fail, ConflictError):
                self.append(context, self.random.randrange(PARTITIONS), events)

    def append_absent(self) -> None:
        """Appends events of a few ids, which others append and delete too."""
        desk = Desk(self._context())
        for _ in range(6):
            desk.context.clock.sleep(self.random.uniform(0, 2))
            ids = self.random.sample([f"once{n}x" for n in range(5)], self.random.choice([1, 2]))
            events = [Event(f"{each}=0".encode(), id=each) for each in ids]
            begin = self.truth.tick
            try:
                found: Sequence[Any] = list(desk.append_absent("t", events))
            except AlreadyExistsError as exc:
                self.tally.refused += 1
                for each in exc.context["ids"]:
                    self._check_was_there(each, begin)
                continue
            except PartialAppendError as exc:
                found = exc.positions
            except (*self.may_fail, ConflictError):
                continue
            self.tally.absents += 1
            for event_id, position in zip(ids, found, strict=True):
                if position is not None:
                    self.check_stored(event_id, (position.partition, position.offset))

    def read(self) -> None:
        context = self._context()
        for _ in range(6):
            context.clock.sleep(self.random.uniform(0, self.pause_s))
            with contextlib.suppress(*self.may_fail):
                self._read_partition(context, self.random.randrange(PARTITIONS))

    def _read_partition(self, context: Context, partition: int) -> None:
        begin, at = self.truth.tick, 0
        topic = find_topic(context, "t")
        reader = Reader(context, topic, partition)
        try:
            for stretch in reader.read(at):
                assert stretch.base == at, "a reader skipped or went back"
                found = {event.offset: event for event in stretch.events()}
                for offset in range(stretch.base, stretch.end):
                    event = found.get(offset)
                    place = (topic.incarnation, partition, offset)
                    self._check_seen(place, None if event is None else event.value, begin)
                at = stretch.end
        except NotFoundError as exc:
            if "start" not in exc.context:
                raise  # the topic is gone
            if exc.context["start"] <= at:
                raise AssertionError(f"{at} was called trimmed, and is not") from exc

    def get(self) -> None:
        desk = Desk(self._context())
        for _ in range(8):
            desk.context.clock.sleep(self.random.uniform(0, self.pause_s))
            event_id = self.random.choice(self.some_ids(3))
            begin = self.truth.tick
            try:
                event = desk.get("t", event_id)
            except NotFoundError:
                self._check_missing(event_id, begin, "get")
            except self.may_fail:
                continue
            else:
                assert event.id == event_id
                self._check_got(event, begin)
            self.tally.gets += 1

    def compile(self) -> None:
        desk = Desk(self._context())
        for _ in range(5):
            desk.context.clock.sleep(self.random.uniform(0.1, self.pause_s))
            most = self.random.choice([4, 9, 1_000])
            policy = CompilePolicy(min_events=1, min_amendments=1, max_events=most)
            with contextlib.suppress(*self.may_fail):
                self.tally.compiled += desk.compile("t", policy).journals

    def scribe(self) -> None:
        desk = Desk(self._context())
        how = ScribeOptions(policy=CompilePolicy.everything(), grace_ms=1, sweep_every_ms=0)
        for _ in range(2):
            desk.context.clock.sleep(self.random.uniform(0.1, 2 * self.pause_s))
            with contextlib.suppress(*self.may_fail):
                turn = desk.scribe_once(how)
                if turn is not None:
                    self.tally.compiled += turn.compiled.journals

    def sweep(self) -> None:
        context = self._context()
        for _ in range(4):
            context.clock.sleep(self.random.uniform(0, 1.5 * self.pause_s))
            with contextlib.suppress(*self.may_fail, ConflictError):
                check_swept(sweep_home(context, 1), *self.may_fail, ConflictError)

    def trim(self) -> None:
        context = self._context()
        context.clock.sleep(4)
        for count in (2, 6):
            context.clock.sleep(self.random.uniform(0, 3))
            partition = self.random.randrange(PARTITIONS)
            with contextlib.suppress(*self.may_fail, ConflictError):
                start = min(count, self.truth.end(self.topic.incarnation, partition))
                trim_topic(context, self.topic, ToOffsets({partition: start}))

    def copy(self) -> None:
        """Brings old events in from a place that does not know what was deleted, as a pump does."""
        context = self._context()
        settings = TopicSettings(self.topic, "memory:", False, EventLimit(1 << 20))

        @contextlib.contextmanager
        def open_context() -> Iterator[Context]:
            yield context

        sink = TopicSink(open_context, settings, lambda _: context.store)
        for manifest in self.manifests:
            context.clock.sleep(self.random.uniform(0, 4))
            with contextlib.suppress(*self.may_fail):
                sink.check(["0"])
                sink.publish(manifest)
                self.tally.copies += 1
                self._check_copied(self.new[int(manifest.partition)])

    # Checks.

    def check(self) -> None:
        while self.truth.touched:
            event_id = self.truth.touched.pop()
            if len(self.truth.by_id[event_id]) > 1:
                self._check_doubles(event_id)

    def _check_doubles(self, event_id: str) -> None:
        places = self.truth.by_id[event_id]
        if event_id.startswith("once"):
            there = self.truth.alive_with(event_id)
            assert len(there) <= 1, f"{event_id} was appended if absent, and is at {there}"
        for kind in ("copy", "new"):
            copies = [place for place in places if self.truth.events[place].type == kind]
            assert len(copies) <= 1, f"{event_id} was copied to {copies}"
        for place in places:
            raw = self.truth.events[place]
            returned = self.erased.get(event_id, self.erased_keys.get(raw.key or b""))
            if raw.type == "copy" and returned is not None:
                assert isinstance(self.truth.now(place), Gone), (
                    f"the delete of {event_id} returned at {returned}, but a copy is at {place}, "
                    f"since {self.truth.history[place][0][0]}"
                )

    def _check_copied(self, new: Sequence[str]) -> None:
        """Events that are newer than the deletes of their ids were not left out."""
        for event_id in new:
            kinds = [self.truth.events[place].type for place in self.truth.by_id[event_id]]
            assert "new" in kinds, f"a copier returned, but left out the new {event_id}"

    def _check_seen(self, place: Place, value: bytes | None, begin: int) -> None:
        """``value`` was read; None: there was no event."""
        self.tally.reads += 1
        states = self.truth.states(place, begin)
        seen = DELETED if value is None else value
        assert seen in states, f"{place} was read as {seen!r}, but it was {states}"

    def _check_got(self, event: Event, begin: int) -> None:
        here = (event.partition, event.offset)
        places = [place for place in self.truth.by_id[event.id or ""] if place[1:] == here]
        states = [state for place in places for state in self.truth.states(place, begin)]
        assert event.value in states, f"got {event}, but it was {states}"

    def _check_missing(self, event_id: str, begin: int, what: str) -> None:
        """Each event of an id, or the topic, was away for a moment at least."""
        if not self.truth.was_ready(begin):
            return
        for place in self.truth.by_id.get(event_id, ()):
            states = self.truth.states(place, begin)
            assert any(isinstance(each, Gone) for each in states), (
                f"{what} of {event_id}: not found, but it was at {place} all the time: {states}"
            )

    def _check_was_there(self, event_id: str, begin: int) -> None:
        states = [
            s for p in self.truth.by_id.get(event_id, ()) for s in self.truth.states(p, begin)
        ]
        assert any(not isinstance(each, Gone) for each in states), (
            f"{event_id} was refused, but it was never there"
        )

    def _check_deleted(self, done: AmendResult, ids: Sequence[str], begin: int) -> None:
        self.tally.deletes += 1
        for event_id in ids:
            if event_id in done.missing:
                self._check_missing(event_id, begin, "delete")
                continue
            self.erased[event_id] = self.truth.tick
            self.truth.touched.append(event_id)
            for place in self.truth.alive_with(event_id, begin):
                now = self.truth.now(place)
                assert isinstance(now, Gone), (
                    f"the delete of {event_id} returned, but {place} is {now!r}"
                )

    def acknowledged(self) -> int:
        """How many calls that change something have returned."""
        tally = self.tally
        return tally.updates + tally.deletes + tally.absents + tally.copies

    def _acknowledged(self, why: str) -> None:
        self.done_whys.add(why)
        for record in self.truth.audit.values():
            if record["why"] == why:
                assert record["state"] == "done", f"{why} returned, but its record says `begun`"

    def check_rest(self) -> None:
        """All that is there can be read, and nothing of what was deleted is left."""
        for why in self.done_whys:
            self._acknowledged(why)
        for partition in range(PARTITIONS):
            self.read_to_end(self.quiet_topic(), partition)
        desk = Desk(self.quiet)
        for _ in range(2):
            desk.compile("t")
            self.scheduler.time.advance(8 * 86_400)  # strays are kept for a week
            self.pass_notes()
            check_swept(sweep_home(self.quiet, 1_000))
        self._check_scribe(desk)
        for partition in range(PARTITIONS):
            self.read_to_end(self.quiet_topic(), partition)
        report = verify_topic(self.quiet, self.quiet_topic())
        assert report.errors == 0, report.findings
        self._check_traces()

    def _check_scribe(self, desk: Desk) -> None:
        """A scribe sweeps every hour, whatever date a wrong clock gave to the last sweep."""
        how = ScribeOptions(
            policy=CompilePolicy.everything(), grace_ms=1_000, sweep_every_ms=3_600_000
        )
        sweeps = 0
        for _ in range(2):
            self.scheduler.time.advance(8 * 86_400)  # strays are kept for a week
            turn = desk.scribe_once(how)
            sweeps += turn is not None and turn.swept is not None
        assert sweeps, "a scribe no longer sweeps"

    def read_to_end(self, topic: Topic, partition: int) -> None:
        """All that is there can be read, as it is."""
        begin = self.truth.tick
        at = self.truth.start(topic.incarnation, partition)
        for stretch in Reader(self.quiet, topic, partition).read(at):
            found = {event.offset: event.value for event in stretch.events()}
            for offset in range(stretch.base, stretch.end):
                self._check_seen((topic.incarnation, partition, offset), found.get(offset), begin)
            at = stretch.end
        assert at == self.truth.end(topic.incarnation, partition), "the end was not reached"

    def _check_traces(self) -> None:
        """P5a for the home; staged copies are the copier's, which has ended."""
        self.objects.delete([key for key in self.bare_objects.bare() if key.startswith("staging/")])
        needles = sorted(
            event_id.encode()
            for event_id, places in self.truth.by_id.items()
            if all(self._was_deleted(place) for place in places)
        )
        self.tally.erased += len(needles)
        found = traces(self.bare_rows, self.bare_objects, needles)
        assert not found, f"traces of deleted events: {found[:5]}"

    # Inside.

    def _was_deleted(self, place: Place) -> bool:
        """Whether it was deleted, and perhaps trimmed later; not one that was trimmed only."""
        return any(state is DELETED for _, state in self.truth.history[place])

    def quiet_topic(self) -> Topic:
        """The topic as it is now."""
        return find_topic(self.quiet, "t")

    def _manifest(self, number: int) -> Manifest:
        """Some old events, staged as a pipeline's range."""
        ids = sorted(self.truth.by_id)[number::9][:6]
        old = {each: self.truth.events[self.truth.by_id[each][0]] for each in ids}
        events = [
            Event(f"{each}=copy".encode(), raw.key, each, raw.time_ms, "copy")
            for each, raw in old.items()
        ]
        events += [Event(f"{each}=new".encode(), None, each, LATER_MS, "new") for each in ids[:2]]
        table = table_of(events, 0)
        segment = encode_staged([(number % PARTITIONS, table)])
        staged = f"staging/copy/0000000001/a/s{number}/0"
        self.objects.put(staged, segment.data)
        file = FileEntry(
            staged=staged,
            target="topic:t",
            size=len(segment.data),
            crc=crc32c.crc32c(segment.data),
            events=len(events),
            first_offset=0,
            last_offset=len(events) - 1,
            first_ms=segment.pieces[0].first_ms,
            last_ms=segment.pieces[0].last_ms,
            kind="segment",
            pieces=segment.pieces,
        )
        count = len(events)
        self.new[number] = ids[:2]
        return Manifest("copy", str(number), "0", str(count), 0, count, count, files=(file,))
