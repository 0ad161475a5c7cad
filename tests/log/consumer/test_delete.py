"""A deleted consumer: no trim waits for it, no member of it is passed, nothing of it comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidelog
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.catalog.base import Change, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.context import Context
from tidelog.coordination.ownership import Member
from tidelog.errors import FencedError, InvalidError, NotFoundError
from tidelog.log.consumer.delete import _Deletion, consumer_version, delete_consumer
from tidelog.log.consumer.leases import Leases, decode_registered, read_lease, read_lease_row
from tidelog.log.consumer.seek import check_consumer, move_cursor, plan_move
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.status import consumer_names
from tidelog.log.topics import create_topic
from tidelog.model import layout
from tidelog.model.topic import Topic, decode_row
from tidelog.settings import LogSettings
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog
from tidelog.testing.scheduler import Crash, FakeClock, seeded_ids


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        opened.create_topic("t", 2)
        opened.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
        yield opened


class SleepingClock(FakeClock):
    """Calls ``asleep`` at each sleep: what others do meanwhile."""

    asleep: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.asleep()


def a_log(catalog: MemoryCatalog | FaultyCatalog, clock: FakeClock, seed: int = 1) -> Context:
    faults = Faults()
    return Context(MemoryStore(clock), catalog, clock, seeded_ids(seed), faults.random)


def a_member(context: Context, topic: Topic, *partitions: int) -> Leases:
    member = Leases(context, topic, "c", "earliest")
    member.join()
    for partition in partitions:
        assert member.take(partition, [member.id])
    return member


def rows(catalog: MemoryCatalog, topic: Topic) -> list[str]:
    """The rows of members, and the partitions whose lease counts."""
    members = catalog.scan(layout.consumer_members(topic.incarnation, "c"), "member/", "member0")
    context = a_log(catalog, FakeClock())
    held = [str(p) for p in range(topic.partitions) if read_lease(context, topic, "c", p)]
    return [row.row for row in members] + held


def test_trim_and_delete_pass_a_consumer_that_was_deleted(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        consumer.commit()
    command = "tidelog consumer delete t c"
    with pytest.raises(InvalidError, match=command):
        home.trim("t", ToOffsets({0: 6}))
    with pytest.raises(InvalidError, match=command):
        home.delete_topic("t")
    home.delete_consumer("t", "c")
    assert home.lag("t") == []
    home.trim("t", ToOffsets({0: 6}))
    with pytest.raises(NotFoundError, match="not found"):
        home.delete_consumer("t", "c")
    home.delete_topic("t")


def test_deleted_consumer_of_the_same_name_begins_as_a_new_one(home: Home) -> None:
    for expected in (range(10), range(3, 10)):
        with home.consumer("t", "c") as consumer:
            assert [event.offset for event in consumer.poll(100)] == list(expected)
            consumer.commit()
        home.delete_consumer("t", "c")
        home.trim("t", ToOffsets({0: 3}))
    with home.consumer("t", "c", "latest") as consumer:
        assert consumer.poll(1, timeout_s=0) == []
    assert {each.cursor for each in home.lag("t")} == {10, 0}


def test_topic_delete_removes_the_rows_of_deleted_consumers(home: Home) -> None:
    topic = home.topic("t")
    with home.consumer("t", "c") as consumer:
        consumer.poll(1)
    home.delete_consumer("t", "c")
    home.delete_topic("t", past_readers=True)
    for partition in range(2):
        where = layout.lease_partition(topic.incarnation, "c", partition)
        assert list(home.catalog.scan(where)) == []
    listed = layout.consumers_partition(topic.incarnation)
    assert list(home.catalog.scan(listed, "consumer/", "consumer0")) == []


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("force", [True, False], ids=["force", "no force"])
def test_consumer_that_began_while_another_was_deleted_stays(asked: bool, force: bool) -> None:
    """The delete waits for silence, or stalls; meanwhile the name is free and used again."""
    clock = SleepingClock()
    context = a_log(MemoryCatalog(), clock)
    topic = create_topic(context, Topic("t", "i", 1, 0))
    a_member(context, topic, 0)  # which is silent
    shown = consumer_version(context, topic, "c") if asked else ""
    deletion = _Deletion(context, topic, "c")
    begin = deletion._begin

    def stall(wanted: str) -> tuple[Any, str]:
        delete_consumer(context, topic, "c", force=True)
        again = a_member(context, topic, 0)
        again.commit(0, 0)
        again.leave()
        return begin(wanted)

    deletion._begin = stall  # type: ignore[method-assign]
    with pytest.raises(NotFoundError, match="was deleted and made again"):
        deletion.run(force, shown)
    assert consumer_names(context, topic) == ["c"]
    assert read_lease(context, topic, "c", 0) is not None
    with pytest.raises(NotFoundError, match="was deleted and made again since you were asked"):
        delete_consumer(context, topic, "c", force=True, shown=f"{topic.incarnation}/0")
    delete_consumer(context, topic, "c", shown=consumer_version(context, topic, "c"))
    assert consumer_names(context, topic) == []


def test_consumer_whose_delete_died_is_the_one_that_was_shown() -> None:
    clock = FakeClock()
    catalog = MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "i", 1, 0))
    a_member(context, topic, 0).leave()
    shown = consumer_version(context, topic, "c")
    died = _Deletion(context, topic, "c")
    assert died._begin(shown)[0] == "deleting"
    assert consumer_version(context, topic, "c") == shown
    delete_consumer(context, topic, "c", shown=shown)
    assert consumer_names(context, topic) == []


def test_consumer_with_a_living_member_is_deleted_only_by_force(home: Home) -> None:
    settings = LogSettings(lease_ttl_ms=600)
    object.__setattr__(home.context, "log_settings", settings)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(4)) == 4
        stalled: list[BaseException] = []

        def refused() -> bool:
            """A stall of this machine may make the member look dead: then look again."""
            try:
                home.delete_consumer("t", "c")
            except InvalidError as exc:
                stalled.append(exc)
                return True
            until(lambda: bool(consumer.poll(4)))
            return False

        until(refused)
        assert "is alive: stop it first, or delete with --force" in str(stalled[0])
        home.delete_consumer("t", "c", force=True)
        with pytest.raises(FencedError):
            consumer.commit()
        seen: list[int | None] = []
        until(lambda: bool(seen.extend(event.offset for event in consumer.poll(100)) or seen))
        assert seen[0] == 0, "it begins again, as a new consumer"
    assert [each.consumer for each in home.lag("t")] == ["c", "c"]


def test_member_that_is_silent_is_waited_for_and_then_passed() -> None:
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0)
    once = Leases(context, topic, "c", "earliest")
    assert once.acquire_once(1)
    began_s = clock.monotonic_s()
    delete_consumer(context, topic, "c")
    assert clock.monotonic_s() - began_s > 1.5 * context.log_settings.lease_ttl_ms / 1000
    assert rows(catalog, topic) == []


@pytest.mark.parametrize("sign", ["beat", "join", "once"])
def test_sign_of_life_while_it_waits_refuses_the_delete(sign: str) -> None:
    clock, catalog = SleepingClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    member = a_member(context, topic, 0)
    once = Leases(context, topic, "c", "earliest")
    signs = {
        "beat": member.beat,
        "join": lambda: a_member(context, topic),
        "once": lambda: once.acquire_once(1),
    }
    clock.asleep = signs[sign]
    with pytest.raises(InvalidError, match="is alive"):
        delete_consumer(context, topic, "c")
    clock.asleep = lambda: None
    assert consumer_names(context, topic) == ["c"]
    member.commit(0, 0)


def test_member_that_joins_after_the_look_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    context = a_log(MemoryCatalog(), FakeClock())
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0).leave()
    joined: list[Leases] = []
    real = context.catalog.write

    def write(partition: str, *changes: Change, write_id: str) -> None:
        if not joined and partition == layout.consumers_partition("first"):
            monkeypatch.undo()
            joined.append(a_member(context, topic, 0))
        real(partition, *changes, write_id=write_id)

    monkeypatch.setattr(context.catalog, "write", write)
    with pytest.raises(InvalidError, match="is alive"):
        delete_consumer(context, topic, "c")
    joined[0].commit(0, 0)
    a_member(context, topic)  # the name is open again


def test_take_that_stalls_over_a_delete_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen the consumer in the registry, and sleeps before it writes the lease."""
    context = a_log(MemoryCatalog(), FakeClock())
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0).leave()
    member = Leases(context, topic, "c", "earliest")
    real = member._put

    def stalled(*given: Any) -> bool:
        monkeypatch.undo()
        delete_consumer(context, topic, "c", force=True)
        return real(*given)

    for partition in range(2):
        monkeypatch.setattr(member, "_put", stalled)
        assert not member.take(partition, [])
        assert consumer_names(context, topic) == []
        assert member.take(partition, []), "as a new consumer"
        assert consumer_names(context, topic) == ["c"]


def test_what_was_read_before_a_delete_is_not_committed_after_it() -> None:
    context = a_log(MemoryCatalog(), FakeClock())
    topic = create_topic(context, Topic("t", "first", 1, 0))
    member = a_member(context, topic, 0)
    epoch = member.held[0].lease.epoch
    delete_consumer(context, topic, "c", force=True)
    member.check_held()
    assert member.take(0, [member.id])
    with pytest.raises(FencedError):
        member.commit(0, 0, epoch)


def test_repeated_packet_of_a_join_brings_no_deleted_consumer_back() -> None:
    catalog = MemoryCatalog()
    context = a_log(catalog, FakeClock())
    topic = create_topic(context, Topic("t", "first", 1, 0))
    sent: list[tuple[str, tuple[Change, ...], str]] = []
    real = catalog.write

    def write(partition: str, *changes: Change, write_id: str) -> None:
        sent.append((partition, changes, write_id))
        real(partition, *changes, write_id=write_id)

    catalog.write = write  # type: ignore[method-assign]
    member = a_member(context, topic, 0)
    member.leave()
    beat = layout.member_row(member.id)
    late = [each for each in sent if isinstance(each[1][0], Put) and each[1][0].row != beat]
    assert len(late) == 3, "the registry, the lease as it was taken and as it was released"
    delete_consumer(context, topic, "c")
    for partition, changes, write_id in late:
        with contextlib.suppress(tidelog.ConflictError):
            real(partition, *changes, write_id=f"{write_id}-again")
    assert consumer_names(context, topic) == []
    assert read_lease(context, topic, "c", 0) is None


@pytest.mark.parametrize("call", range(1, 40))
def test_delete_that_dies_after_any_call_is_finished_by_the_next(call: int) -> None:
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0, 1).commit(0, 0)
    faults = Faults(crash_after_call=call)
    died = False
    try:
        delete_consumer(a_log(FaultyCatalog(catalog, faults), clock, 2), topic, "c", force=True)
    except Crash:
        died = True
    listed = consumer_names(context, topic)
    if not listed:
        assert rows(catalog, topic) == [], "what is not listed has no cursor"
    elif not died:
        pytest.fail("is not deleted")
    with contextlib.suppress(NotFoundError):
        delete_consumer(context, topic, "c", force=True)
    assert consumer_names(context, topic) == []
    assert rows(catalog, topic) == []
    member = a_member(context, topic, 0)
    assert consumer_names(context, topic) == ["c"]
    assert read_lease(context, topic, "c", 0) == (member.held[0].lease, member.held[0].version)


def test_member_does_not_join_a_consumer_whose_delete_did_not_finish() -> None:
    unfinished = 0
    for call in range(1, 60):
        catalog = MemoryCatalog()
        context = a_log(catalog, FakeClock())
        topic = create_topic(context, Topic("t", "first", 2, 0))
        a_member(context, topic, 0).leave()
        dying = a_log(FaultyCatalog(catalog, Faults(crash_after_call=call)), FakeClock(), call)
        try:
            delete_consumer(dying, topic, "c")
            break
        except Crash:
            found = read_lease_row(context, topic, "c", 0)
        if found is None or not found[0].deleted or not consumer_names(context, topic):
            continue  # not begun, or done
        unfinished += 1
        assert consumer_names(context, topic) == ["c"], "trims wait for it until it is deleted"
        with pytest.raises(NotFoundError, match="is being deleted: delete it again to finish"):
            a_member(context, topic)
        delete_consumer(context, topic, "c")
        a_member(context, topic, 0, 1)
    assert unfinished > 5


def test_console_knows_a_deleted_consumer_only_when_it_is_new_again(home: Home) -> None:
    topic = home.topic("t")
    with home.consumer("t", "c") as consumer:
        consumer.poll(4)
        consumer.commit()
    check_consumer(home.context, topic, "c")
    home.delete_consumer("t", "c")
    with pytest.raises(NotFoundError):
        check_consumer(home.context, topic, "c")
    member = Leases(home.context, topic, "c", "earliest")
    member.join()
    move = plan_move(home.context, topic, "c", 0, "7")
    assert move.cursor is None
    assert move_cursor(home.context, topic, "c", 0, move.to, move.version)
    found = read_lease(home.context, topic, "c", 0)
    assert found is not None
    assert found[0].cursor == 7


def test_error_says_where_the_member_runs(home: Home) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(lease_ttl_ms=600_000))
    topic = home.topic("t")
    member = Leases(home.context, topic, "c", "earliest")
    member.join()
    row = next(iter(home.catalog.scan(layout.consumer_members(topic.incarnation, "c"))))
    mark = decode_row(row.value, Member, "member").mark
    assert mark
    clock = SleepingClock()
    clock.asleep = member.beat
    object.__setattr__(home.context, "clock", clock)
    with pytest.raises(InvalidError, match=rf"member `{member.id}` \(.+, process [0-9]+\) is"):
        home.delete_consumer("t", "c")


class StallingCatalog:
    """Runs ``meanwhile`` once, before a call by its number: what others do while we stall."""

    def __init__(self, inner: MemoryCatalog, call: int, meanwhile: Callable[[], object]) -> None:
        self._inner = inner
        self._left = call
        self._meanwhile = meanwhile

    @property
    def has_stalled(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if not self._left:
            self._meanwhile()
        return getattr(self._inner, name)


STALLS = range(1, 28)
AFTER_STEP_2 = 12  # the call of a delete that is the first of step 3


def state_of(catalog: MemoryCatalog, topic: Topic) -> str:
    row = catalog.get(layout.consumers_partition(topic.incarnation), layout.consumer_row("c"))
    assert row is not None
    return decode_registered(row).state


@pytest.mark.parametrize("call", STALLS)
def test_delete_that_stalls_changes_nothing_of_a_new_consumer_of_the_name(call: int) -> None:
    clock, catalog = SleepingClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0, 1).leave()
    fresh: list[Leases] = []

    def meanwhile() -> None:
        delete_consumer(a_log(catalog, clock, 3), topic, "c")
        fresh.append(a_member(context, topic, 0, 1))
        fresh[0].commit(0, 7)
        fresh[0].commit(1, 5)
        clock.asleep = fresh[0].beat

    stalling: Any = StallingCatalog(catalog, call, meanwhile)
    with contextlib.suppress(NotFoundError, InvalidError, tidelog.UnavailableError):
        delete_consumer(a_log(stalling, clock, 2), topic, "c")
    if not stalling.has_stalled:
        assert call > 20, "the table covers every call"
        return
    assert rows(catalog, topic) == [layout.member_row(fresh[0].id), "0", "1"]
    fresh[0].commit(0, 8)
    fresh[0].commit(1, 6)
    a_member(context, topic)  # the name is open


@pytest.mark.parametrize("call", STALLS)
def test_delete_that_stalls_wipes_no_cursor_after_another_has_refused(call: int) -> None:
    """A member joins between the looks of two calls that began together."""
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    before = a_member(context, topic, 0, 1)
    before.commit(0, 7)
    before.commit(1, 5)
    before.leave()
    joined = Leases(context, topic, "c", "earliest")
    joined._register()  # and then it stalls
    has_begun, may_go_on = threading.Event(), threading.Event()

    def delete(calls: int, meanwhile: Callable[[], object], seed: int) -> None:
        stalling: Any = StallingCatalog(catalog, calls, meanwhile)
        with contextlib.suppress(InvalidError, NotFoundError, tidelog.UnavailableError):
            delete_consumer(a_log(stalling, clock, seed), topic, "c")

    def stall() -> None:
        has_begun.set()
        may_go_on.wait()

    first = threading.Thread(target=delete, args=(AFTER_STEP_2, stall, 2))

    def first_goes_on() -> None:
        joined.beat()
        may_go_on.set()
        first.join()

    first.start()
    has_begun.wait()
    assert state_of(catalog, topic) == "deleting"
    delete(call, first_goes_on, 3)
    may_go_on.set()
    first.join()
    if state_of(catalog, topic) == "ready":
        leases = [read_lease(context, topic, "c", partition) for partition in range(2)]
        assert [each and each[0].cursor for each in leases] == [7, 5]


@pytest.mark.parametrize("call", range(1, 40))
@pytest.mark.parametrize("sign", ["join", "beat"])
def test_member_that_stalls_over_a_delete_leaves_no_row_behind(sign: str, call: int) -> None:
    """It saw the consumer before a delete, and beats at any moment of it, or after it."""
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    a_member(context, topic, 0).leave()
    late = a_member(context, topic)
    sent: list[Callable[[], object]] = []
    real = catalog.write

    def hold_back(partition: str, *changes: Change, write_id: str) -> None:
        sent.append(lambda: real(partition, *changes, write_id=write_id))

    if sign == "join":
        late = Leases(context, topic, "c", "earliest")
    catalog.write = hold_back  # type: ignore[method-assign]
    late.join() if sign == "join" else late.beat()
    catalog.write = real  # type: ignore[method-assign]

    def arrives() -> None:
        for each in sent:
            with contextlib.suppress(tidelog.ConflictError):
                each()

    stalling: Any = StallingCatalog(catalog, call, arrives)
    delete_consumer(a_log(stalling, clock, 2), topic, "c", force=True)
    arrives()
    assert state_of(catalog, topic) == "deleted"
    assert rows(catalog, topic) == []
    late.beat()  # and joins again
    assert (state_of(catalog, topic), rows(catalog, topic)) == (
        "ready",
        [layout.member_row(late.id)],
    )


@pytest.mark.parametrize("call", range(1, 40))
@pytest.mark.parametrize("is_forced", [True, False])
def test_next_call_ends_a_delete_that_died_after_any_call(is_forced: bool, call: int) -> None:
    """A member that joined meanwhile, or that was forced out, does not leave it half done."""
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    member = a_member(context, topic, 0, 1)
    if not is_forced:
        member.leave()
    stalled = Leases(context, topic, "c", "earliest")
    stalled._register()
    faults = Faults(crash_after_call=call)
    with contextlib.suppress(Crash):
        behind = a_log(FaultyCatalog(catalog, faults), clock, 2)
        delete_consumer(behind, topic, "c", force=is_forced)
    assert stalled._beat() or state_of(catalog, topic) in ("ending", "deleted")
    with contextlib.suppress(NotFoundError, InvalidError):
        sleeping = SleepingClock()
        sleeping.asleep = stalled._beat
        delete_consumer(a_log(catalog, sleeping, 3), topic, "c")
    assert state_of(catalog, topic) in ("ready", "deleted")
    if state_of(catalog, topic) == "deleted":
        assert rows(catalog, topic) == []


@pytest.mark.parametrize("call", range(1, 40))
def test_two_deletes_at_once_leave_the_consumer_deleted_or_ready(call: int) -> None:
    """The second takes over from the first at any call, and finds a member that has joined."""
    clock, catalog = FakeClock(), MemoryCatalog()
    context = a_log(catalog, clock)
    topic = create_topic(context, Topic("t", "first", 2, 0))
    before = a_member(context, topic, 0, 1)
    before.commit(0, 7)
    before.leave()
    joined = Leases(context, topic, "c", "earliest")
    joined._register()

    def second() -> None:
        sleeping = SleepingClock()
        sleeping.asleep = joined._beat
        joined._beat()
        with contextlib.suppress(InvalidError, NotFoundError):
            delete_consumer(a_log(catalog, sleeping, 3), topic, "c")

    stalling: Any = StallingCatalog(catalog, call, second)
    with contextlib.suppress(InvalidError, NotFoundError, tidelog.UnavailableError):
        delete_consumer(a_log(stalling, clock, 2), topic, "c")
    assert state_of(catalog, topic) in ("ready", "deleted")
    if state_of(catalog, topic) == "ready":
        lease = read_lease(context, topic, "c", 0)
        assert lease is not None
        assert lease[0].cursor == 7
    else:
        assert rows(catalog, topic) == []


def test_member_that_could_not_register_again_does_not_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = MemoryCatalog()
    context = a_log(catalog, FakeClock())
    topic = create_topic(context, Topic("t", "first", 2, 0))
    member = a_member(context, topic)
    delete_consumer(context, topic, "c", force=True)

    def fails() -> None:
        raise tidelog.UnavailableError("registry: no answer: try again")

    monkeypatch.setattr(member, "_register", fails)
    for _ in range(3):
        with pytest.raises(tidelog.UnavailableError):
            member.beat()
    assert rows(catalog, topic) == []
    monkeypatch.undo()
    member.beat()
    assert consumer_names(context, topic) == ["c"]
