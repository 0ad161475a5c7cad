"""What threads, signals, forks and partial failures must not do: each case was once a bug."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tests.support.homes import a_catalog
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.catalog.base import Catalog, Change, Put
from tidelog.errors import InvalidError, PartialAppendError, UnavailableError
from tidelog.log.consumer import consumer as consumer_module
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Leases
from tidelog.log.producer.append import Appender
from tidelog.model.topic import SentBatch
from tidelog.settings import LogSettings
from tidelog.testing.scheduler import FakeClock


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        settings = LogSettings(lease_ttl_ms=400, linger_ms=1, segment_bytes=2_000)
        object.__setattr__(opened.context, "log_settings", settings)
        opened.create_topic("t", 2)
        yield opened


class Broken:
    """Wraps a store or catalog, and fails calls of one kind while told to."""

    def __init__(self, inner: object, verb: str) -> None:
        self._inner = inner
        self.verb = verb
        self.fails = False
        self.only = ""

    def __getattr__(self, name: str) -> object:
        real = getattr(self._inner, name)
        if name != self.verb:
            return real

        def call(*args: object, **options: object) -> object:
            if self.fails and self.only in str(args):
                raise UnavailableError("it is down")
            return real(*args, **options)

        return call


def broken(home: Home, part: str, verb: str) -> Broken:
    wrapper = Broken(getattr(home.context, part), verb)
    object.__setattr__(home.context, part, wrapper)
    return wrapper


def values(home: Home, partition: int, topic: str = "t") -> list[bytes | None]:
    return [event.value for event in home.read(topic, partition)]


# Producers.


def test_an_outage_does_not_poison_a_producer_for_good(home: Home) -> None:
    store = broken(home, "store", "put")
    store.fails = True
    senders = [
        threading.Thread(target=_append_quietly, args=(home, [Event(b"lost")])) for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    store.fails = False
    for _ in range(5):
        home.append("t", [Event(b"kept")], partition=0)
    assert values(home, 0) == [b"kept"] * 5


def _append_quietly(home: Home, events: list[Event]) -> None:
    with pytest.raises(UnavailableError):
        home.append("t", events)


def test_a_part_that_fails_waits_for_the_others(home: Home) -> None:
    """Else an event would be called lost that is stored a moment later, and order would break."""
    object.__setattr__(home.context, "commits_at_once", 4)
    keys = {home.partition_for("t", b"%d" % n): b"%d" % n for n in range(20)}
    home.append("t", [Event(b"0", key=key) for key in keys.values()])
    catalog = broken(home, "catalog", "write")
    catalog.only, catalog.fails = f"/{1}'", True
    with pytest.raises(PartialAppendError) as told:
        home.append("t", [Event(b"1", key=keys[0]), Event(b"1", key=keys[1])])
    stored = [position for position in told.value.positions if position is not None]
    assert [position.partition for position in stored] == [0]
    assert values(home, 0) == [b"0", b"1"]
    assert values(home, 1) == [b"0"]


def test_a_later_slice_that_cannot_start_does_not_hide_those_that_did(home: Home) -> None:
    store = broken(home, "store", "put")
    producer = home.producer("t")
    real, calls = producer._submit, []

    def submit(flush: object) -> None:
        calls.append(flush)
        if len(calls) == 3:
            raise UnavailableError("the buffer stayed full")
        real(flush)  # type: ignore[arg-type]

    producer._submit = submit  # type: ignore[method-assign,assignment]
    events = [Event(b"%03d" % n + b"x" * 500) for n in range(12)]
    with pytest.raises(PartialAppendError) as told:
        producer.append(events, partition=0)
    assert len(values(home, 0)) == 12 - len(told.value.remainder)
    assert told.value.remainder
    producer.close()
    assert store.fails is False


def test_a_kept_future_does_not_keep_the_bytes(home: Home) -> None:
    with home.producer("t") as producer:
        futures = [producer.send(b"x" * 1_000) for _ in range(10)]
        producer.flush()
        flush = futures[0].flush
        assert flush.table is None
        assert all(not hasattr(part, "table") for part, _ in flush._bases)


def test_threads_may_share_a_named_producer(home: Home) -> None:
    with home.producer("t", name="n") as producer:
        errors: list[BaseException] = []

        def send() -> None:
            try:
                for number in range(300):
                    producer.send(b"x", key=b"%d" % number)
            except InvalidError as exc:
                errors.append(exc)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(values(home, 0)) + len(values(home, 1)) == 1_200


def test_two_who_open_one_name_at_once_do_not_both_keep_it(home: Home) -> None:
    topic = home.topic("t")
    one, two = Appender(home.context, topic, "n"), Appender(home.context, topic, "n")
    real = one._read_state

    def read_then_be_overtaken(partition: int) -> object:
        found = real(partition)
        one._read_state = real  # type: ignore[method-assign]
        two.open_named()
        return found

    one._read_state = read_then_be_overtaken  # type: ignore[method-assign,assignment]
    one.open_named()
    assert one._epoch > two._epoch


def test_sequences_far_apart_fit_into_a_row(home: Home) -> None:
    with home.producer("t", name="n") as producer:
        for number in range(5_000):
            producer.send(b"x", key=b"one", sequence=number * 10**12)
        producer.flush()
    with home.producer("t", name="n") as producer:
        last = producer.send(b"x", key=b"one", sequence=4_999 * 10**12).result(60)
        assert last.offset == 4_999
    huge = SentBatch(0, 0, 100_000, (10**12,) * 99_999)
    from tidelog.log.producer.append_plan import recent_batches

    first, *_, final = recent_batches((), huge)
    assert (first.first, first.base) == (0, 0)
    assert (final.first, final.base) == (99_999 * 10**12, 99_999)


def test_headers_that_change_after_send_are_stored_as_they_were(home: Home) -> None:
    headers = [("a", b"1")]
    with home.producer("t") as producer:
        future = producer.send(b"x", headers=headers)  # type: ignore[arg-type]
        headers.append(("b", "not bytes"))  # type: ignore[arg-type]
        position = future.result(60)
    (event,) = home.read("t", position.partition)
    assert event.headers == (("a", b"1"),)


# Consumers.


def test_a_release_that_failed_does_not_orphan_the_partition(home: Home) -> None:
    member = Leases(home.context, home.topic("t"), "c", "earliest")
    member.join()
    assert member.take(0, member.alive())
    catalog = broken(home, "catalog", "write")
    catalog.fails = True
    with pytest.raises(UnavailableError):
        member.release(0)
    catalog.fails = False
    assert 0 not in member.held
    assert member.take(0, member.alive())


def test_a_member_that_slept_notices_what_it_lost(home: Home) -> None:
    topic = home.topic("t")
    sleeper, other = (Leases(home.context, topic, "c", "earliest") for _ in range(2))
    sleeper.join()
    sleeper.acquire_share(sleeper.alive())
    assert sorted(sleeper.held) == [0, 1]
    other.join()
    other.take(0, [other.id])  # as if the sleeper were dead
    other._seen["member/" + sleeper.id] = ("", 0.0)
    found = home.catalog.get(*_lease_row(home, 0))
    assert found is not None
    home.catalog.write(
        _lease_row(home, 0)[0], Put("lease", found.value, found.version), write_id="taken"
    )
    sleeper.check_held()
    assert sorted(sleeper.held) == [1]


def _lease_row(home: Home, partition: int) -> tuple[str, str]:
    from tidelog.model import layout

    return layout.lease_partition(home.topic("t").incarnation, "c", partition), "lease"


def test_what_was_read_under_an_older_epoch_cannot_be_committed(home: Home) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
    with home.consumer("t", "c") as consumer:
        assert len(consumer.poll(5)) == 5
        held = consumer._leases.held[0]
        with consumer._lock:  # else its keeper may be the one who takes it again
            consumer._leases.release(0)
            assert consumer._leases.take(0, [consumer._leases.id])
        assert consumer._leases.held[0].lease.epoch == held.lease.epoch + 1
        with pytest.raises(tidelog.FencedError):
            consumer.commit()
        assert [event.offset for event in consumer.poll()] == list(range(10))


def test_an_interrupted_poll_gives_its_events_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
    with home.consumer("t", "c") as consumer:
        consumer.poll(timeout_s=0.01, max_events=3)
        consumer.commit()
        with monkeypatch.context() as patch:
            patch.setattr(consumer_module.OffsetEvents, "events", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.poll()
        consumer.commit()  # as a `finally` would
        assert [event.offset for event in consumer.poll()] == list(range(3, 10))


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_dead_letters_that_could_not_be_stored_lose_nothing(home: Home) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(6)], partition=0)
    handled: list[bytes | None] = []

    def handle(event: Event) -> None:
        if event.value == b"2":
            raise RuntimeError("cannot")
        handled.append(event.value)

    how = {"on_error": "dead-letter", "dead_letter": "dlq", "retries": 0, "until_caught_up": True}
    with home.consumer("t", "c") as consumer:
        with pytest.raises(tidelog.NotFoundError):
            consumer.run(handle, **how)  # type: ignore[arg-type]
        home.create_topic("dlq")
        consumer.run(handle, **how)  # type: ignore[arg-type]
    assert handled == [b"0", b"1", b"3", b"4", b"5"]
    assert values(home, 0, "dlq") == [b"2"]


def test_a_stop_during_retries_skips_nothing(home: Home) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(3)], partition=0)
    stop = threading.Event()

    def handle(event: Event) -> None:
        stop.set()
        raise RuntimeError("not yet")

    with home.consumer("t", "c") as consumer:
        consumer.run(handle, on_error="skip", retries=5, retry_base_ms=10_000, stop=stop)
        assert consumer.lag()[0].cursor == 0


def test_a_long_batch_keeps_its_lease_while_the_handler_lives(home: Home) -> None:
    """Longer than the time to live and the poll interval, in steps for which both keepers wait."""
    settings = LogSettings(lease_ttl_ms=150, max_poll_interval_ms=300)
    object.__setattr__(home.context, "log_settings", settings)
    clock, stop = FakeClock(), threading.Event()
    object.__setattr__(home.context, "clock", clock)
    handled: list[int | None] = []
    taken: list[Event] = []

    def slowly(event: Event) -> None:
        beats = [each._leases._beats for each in (one, two)]
        clock.advance(0.06)
        for each, before in zip((one, two), beats, strict=True):
            until(lambda each=each, before=before: each._leases._beats > before)
        handled.append(event.offset)
        if len(handled) == 10:
            stop.set()

    def poll_beside() -> None:
        while not stop.wait(0.01):
            taken.extend(two.poll(timeout_s=0))

    with home.consumer("t", "c") as one, home.consumer("t", "c") as two:
        start_keeper(one)  # the first, which has partition 0
        start_keeper(two)
        home.append("t", [Event(b"%d" % n) for n in range(10)], partition=0)
        other = threading.Thread(target=poll_beside)
        other.start()
        try:
            assert one.run(slowly, retries=0, stop=stop) == 10
        finally:
            stop.set()
            other.join()
        assert one.lag()[0].cursor == 10
    assert handled == list(range(10))
    assert taken == []


def start_keeper(consumer: Consumer) -> None:
    """Join, and wait until the keeper is at work, while a fake time stands."""
    looks = []
    look = consumer._look_around

    def counted() -> bool:
        looks.append(1)
        return look()

    consumer._look_around = counted  # type: ignore[method-assign]
    consumer.poll(timeout_s=0)
    until(lambda: len(looks) > 1)  # the first look is the joiner's own


def test_caught_up_means_the_whole_topic(home: Home) -> None:
    patient = LogSettings(lease_ttl_ms=600_000, linger_ms=1)
    object.__setattr__(home.context, "log_settings", patient)
    home.append("t", [Event(b"x")], partition=0)
    holder = home.consumer("t", "c")
    holder.poll(timeout_s=0.05)
    with home.consumer("t", "c") as other:
        other.poll(timeout_s=0.01)
        assert not other.caught_up()
    holder.commit()
    with home.consumer("t", "c") as other:
        other.poll(timeout_s=0.01)
        assert other.caught_up()


def test_a_keeper_that_met_an_error_goes_on(home: Home) -> None:
    with home.consumer("t", "c") as consumer:
        consumer.poll(timeout_s=0.01)
        consumer._leases.beat = _boom  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            consumer.poll(timeout_s=60)
        assert consumer._keeper is not None
        assert consumer._keeper.is_alive()


def _boom() -> None:
    raise RuntimeError("a bug")


def test_a_one_shot_reader_is_listed(home: Home) -> None:
    home.append("t", [Event(b"x")], partition=0)
    home.consumer("t", "fn").read_once(0)
    assert {lag.consumer for lag in home.lag("t")} == {"fn"}


# Homes.


def test_closing_a_home_closes_what_it_gave_out_and_flushes() -> None:
    home = tidelog.open("memory:")
    home.create_topic("t")
    context = home.context
    home.producer("t").send(b"kept")
    consumer = home.consumer("t", "c")
    consumer.poll(timeout_s=0.01)
    home.close()
    home.close()
    rows = list(
        context.catalog.scan(
            f"topic/{next(iter(_incarnations(context.catalog)))}/0", "run/", "run0"
        )
    )
    assert len(rows) == 1
    for call in (home.topics, lambda: home.append("t", []), consumer.poll):
        with pytest.raises(InvalidError, match="closed"):
            call()


def _incarnations(catalog: Catalog) -> Iterator[str]:
    from tidelog.model.topic import Topic, decode_row

    for row in catalog.scan("registry", "topic/", "topic0"):
        yield decode_row(row.value, Topic, "topic").incarnation


def test_topics_that_come_and_go_leave_no_threads(home: Home) -> None:
    before = threading.active_count()
    for _ in range(5):
        home.create_topic("brief")
        home.append("brief", [Event(b"x")])
        home.delete_topic("brief")
    until(lambda: threading.active_count() <= before + 1)  # timers end when next scheduled


def test_a_forked_child_is_told_to_open_its_own(home: Home) -> None:
    home.append("t", [Event(b"x")], partition=0)
    child = os.fork()
    if child == 0:
        try:
            home.append("t", [Event(b"y")])
        except InvalidError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0


def test_threads_that_end_give_their_connections_back(tmp_path: Path) -> None:
    catalog = a_catalog(f"sqlite://{tmp_path}/c.sqlite", create=True)

    def use() -> None:
        catalog.write("p", Put("a", b"x"), write_id=str(threading.get_ident()))

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    use()
    before = descriptors()
    for _ in range(20):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    gc.collect()
    assert descriptors() <= before + 4
    catalog.close()


def test_an_interrupted_write_leaves_no_transaction_open(tmp_path: Path) -> None:
    catalog = a_catalog(f"sqlite://{tmp_path}/c.sqlite", create=True)
    changes: tuple[Change, ...] = (Put("a", b"1"),)
    with catalog._connections.use() as connection:  # type: ignore[attr-defined]
        connection.execute("BEGIN IMMEDIATE")  # where an interrupt would have left it
    with pytest.raises(Exception, match="transaction"):
        catalog.write("p", *changes, write_id="w1")
    catalog.write("p", *changes, write_id="w1")
    assert catalog.get("p", "a") is not None
    catalog.close()
