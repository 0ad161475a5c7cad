"""The notifier's thread: real time, real producers, targets that hang, fail and refuse."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.homes import a_catalog, a_store
from tests.support.recorder import Recorder
from tests.support.waiting import until
from tidelog.catalog.memory import MemoryCatalog
from tidelog.clock import RandomIds, SystemClock
from tidelog.context import Context
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.identity import HomeIdentity
from tidelog.log import notifier as notifier_module
from tidelog.log.notifier import Notification, Notifier, NotifyTarget, read_state, repair
from tidelog.log.producer.producer import Producer
from tidelog.log.topics import change_topic, create_topic, delete_topic
from tidelog.model.event import Event
from tidelog.model.times import Backoff
from tidelog.model.topic import Topic
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock

ROOT = Path(__file__).parents[2]


def a_log() -> Context:
    return Context(
        store=MemoryStore(SystemClock()),
        catalog=MemoryCatalog(),
        clock=SystemClock(),
        ids=RandomIds(),
        random=random.Random(7),
        backoff=Backoff(attempts=4, base_ms=20),
    )


def a_topic(context: Context, latency_ms: int, targets: int = 1, partitions: int = 1) -> Topic:
    urls = tuple(str(number) for number in range(targets))
    wanted = Topic(
        "orders", context.ids.new(), partitions, 0, notify=urls, max_latency_ms=latency_ms
    )
    return create_topic(context, wanted)


@contextmanager
def notifying(
    context: Context, topic: Topic, *targets: NotifyTarget
) -> Iterator[tuple[Notifier, Producer]]:
    notifier = Notifier(context, lambda url: targets[int(url)])
    notifier.watch(topic)
    with Producer(context, topic) as producer:
        yield notifier, producer
    notifier.close(0)


def fail(_: int) -> None:
    raise UnavailableError("down")


def test_changed_targets_are_notified_by_a_process_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifier_module, "_TARGETS_S", 0.0)
    context, first, second = a_log(), Recorder(), Recorder()
    topic = a_topic(context, 1)
    with notifying(context, topic, first, second) as (_, producer):
        producer.append([Event(b"a")])
        until(lambda: first.offsets == [0])
        change_topic(context, "orders", notify=["1"])
        producer.append([Event(b"b")])
        until(lambda: second.offsets == [1])
        change_topic(context, "orders", notify=[])
        producer.append([Event(b"c")])
        until(lambda: read_state(context, topic, 0)[0].notified == 3)
        change_topic(context, "orders", notify=["0", "1"])
        producer.append([Event(b"d")])
        until(lambda: first.offsets == [0, 3] and second.offsets == [1, 3])


def test_first_targets_are_notified_by_a_process_that_appends_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifier_module, "_TARGETS_S", 0.0)
    context, target = a_log(), Recorder()
    topic = a_topic(context, 1, targets=0)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: notifier._known[topic.incarnation, 0].covered)
        assert read_state(context, topic, 0)[1] is None  # without targets nothing is written
        change_topic(context, "orders", notify=["0"])
        producer.append([Event(b"b")])
        until(lambda: target.offsets == [1])
        assert notifier.close(60)


def test_look_for_targets_delays_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "_TARGETS_S", 0.0)
    context = a_log()
    topic = a_topic(context, 50, targets=0)
    with notifying(context, topic) as (notifier, producer):
        producer.append([Event(b"a")])
        known = notifier._known[topic.incarnation, 0]
        until(lambda: known.covered)
        monkeypatch.setattr(notifier_module, "_TARGETS_S", 30.0)
        producer.append([Event(b"b")])
        until(lambda: known.due_s is not None)
        began_s = time.monotonic()
        assert notifier.close(60)
        assert time.monotonic() - began_s < 15


def test_copy_notifies_the_targets_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "_TARGETS_S", 0.0)
    context, theirs, ours = a_log(), Recorder(), Recorder()
    context = replace(context, identity=HomeIdentity("copy"))
    topic = create_topic(
        context, Topic("orders", context.ids.new(), 1, 0, notify=("0",), home="original")
    )
    with notifying(context, topic, theirs, ours) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: notifier._known[topic.incarnation, 0].covered)
        change_topic(context, "orders", max_latency_ms=7)
        producer.append([Event(b"b")])
        until(lambda: notifier._known[topic.incarnation, 0].notified == 2)
        change_topic(context, "orders", notify=["1"])
        producer.append([Event(b"c")])
        until(lambda: ours.offsets == [2])
    assert not theirs.offsets


def test_topic_made_again_is_not_changed_and_the_old_one_sends_no_notifications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifier_module, "_TARGETS_S", 0.0)
    context, target = a_log(), Recorder()
    topic = a_topic(context, 1)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: target.offsets == [0])
        delete_topic(context, "orders", lambda _: None, lambda _: None)
        with pytest.raises(NotFoundError):
            change_topic(context, "orders", notify=["1"])
        again = a_topic(context, 1)
        with pytest.raises(InvalidError, match="max_latency_ms is 0"):
            change_topic(context, "orders", max_latency_ms=0)
        # The notifier's own thread may have looked first, and has forgotten the topic then.
        with pytest.raises(NotFoundError, match=r"is another one now|is deleted"):
            notifier._current(topic.incarnation)
        assert change_topic(context, "orders", max_latency_ms=7).notify == again.notify


def test_one_write_makes_exactly_one_notification() -> None:
    context, target = a_log(), Recorder()
    topic = a_topic(context, 100)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: target.offsets == [0])
        time.sleep(0.3)
        assert notifier.close(60)
    assert target.told == [Notification("orders", 0, 0)]


def test_ten_parallel_writes_make_fewer_than_ten_and_the_last_is_told() -> None:
    context, target = a_log(), Recorder()
    topic = a_topic(context, 1_000)
    with notifying(context, topic, target) as (notifier, _), ThreadPoolExecutor(10) as pool:
        producers = [Producer(context, topic) for _ in range(10)]
        list(pool.map(lambda producer: producer.append([Event(b"x")]), producers))
        for producer in producers:
            producer.close()
        assert notifier.close(60)
    assert target.offsets[-1] == 9
    assert len(target.told) < 10


def test_a_hanging_target_holds_up_no_producer() -> None:
    context, released = a_log(), threading.Event()
    target = Recorder(lambda _: released.wait(600) and None)
    topic = a_topic(context, 10)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"first")])
        until(lambda: target.tries == 1)
        started_s = time.monotonic()
        for _ in range(50):
            producer.append([Event(b"x")])
        took_s = time.monotonic() - started_s
        assert target.told == []
        started_s = time.monotonic()
        assert not notifier.close(0.2)
        assert time.monotonic() - started_s < 60
        released.set()
    assert took_s < 60


def test_hanging_targets_delay_no_other_topic_and_each_topic_has_one_check_at_a_time() -> None:
    context, released = a_log(), threading.Event()
    hanging = Recorder(lambda _: released.wait(600) and None)
    target = Recorder()
    notifier = Notifier(context, lambda url: hanging if url == "hangs" else target)
    topics = [
        create_topic(context, Topic(f"t{number}", context.ids.new(), 2, 0, notify=(url,)))
        for number, url in enumerate(("hangs", "hangs", "hangs", "works"))
    ]
    for topic in topics:
        notifier.watch(topic)
        with Producer(context, topic) as producer:
            for partition in range(2):
                producer.append([Event(b"x")], partition=partition)
    until(lambda: len(target.told) == 2)
    until(lambda: hanging.tries == 3)  # the other partitions of these topics wait
    assert hanging.told == []
    released.set()
    assert notifier.close(60)
    assert (len(hanging.told), hanging.tries) == (6, 6)


def test_close_waits_for_its_turn_where_there_is_time() -> None:
    context = a_log()
    told_ms: list[int] = []
    target = Recorder(lambda _: told_ms.append(context.clock.now_ms()))
    topic, began_ms = a_topic(context, 1_000), context.clock.now_ms()
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: read_state(context, topic, 0)[0].notified == 1)
        turn_ms = read_state(context, topic, 0)[0].until_ms
        started_s = time.monotonic()
        producer.append([Event(b"b")])
        assert notifier.close(120)
        assert time.monotonic() - started_s < 60
    assert target.offsets == [0, 1]
    assert told_ms[1] >= turn_ms >= began_ms + 1_000


def test_close_tells_at_once_where_there_is_no_time() -> None:
    context, target = a_log(), Recorder()
    topic = a_topic(context, 600_000, partitions=3)
    with notifying(context, topic, target) as (notifier, producer):
        for _ in range(2):
            for partition in range(3):
                producer.append([Event(b"a")], partition=partition)
            until(lambda: len(target.told) == 3)
        started_s = time.monotonic()
        assert notifier.close(120)
        assert time.monotonic() - started_s < 60
    assert sorted((n.partition, n.offset) for n in target.told[3:]) == [(0, 1), (1, 1), (2, 1)]


def test_close_without_a_commit_returns_at_once() -> None:
    context = a_log()
    with notifying(context, a_topic(context, 100), Recorder()) as (notifier, _):
        assert notifier.close(60)
        assert notifier.close(60)


def test_failures_are_retried_with_backoff() -> None:
    context = a_log()
    target = Recorder(lambda tries: fail(tries) if tries < 3 else None)
    topic = a_topic(context, 50)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: target.offsets == [0])
        assert notifier.close(60)
        assert (target.tries, notifier.errors, notifier.error_count) == (3, [], 0)


def test_a_target_that_stays_down_stops_nothing_and_is_repaired_later() -> None:
    context, broken, sound = a_log(), Recorder(fail), Recorder()
    topic = a_topic(context, 50, targets=2)
    with notifying(context, topic, broken, sound) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: notifier.error_count == 1)
        producer.append([Event(b"b")])
        assert not notifier.close(0.5)
        assert [str(error) for error in notifier.errors] == ["down"]
    assert broken.tries == 4
    assert sound.offsets == [0]  # not once more for each try of the other
    assert read_state(context, topic, 0)[0].notified == 0
    later = replace(context, clock=FakeClock(SystemClock().now_ms() + 31_000))
    assert repair(later, topic, [sound]).sent == [Notification("orders", 0, 1)]


def test_a_target_that_refuses_is_not_asked_again() -> None:
    def refuse(_: int) -> None:
        raise InvalidError("not here")

    context, target = a_log(), Recorder(refuse)
    topic = a_topic(context, 20)
    with notifying(context, topic, target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: notifier.error_count == 1)
        producer.append([Event(b"b")])
        time.sleep(0.2)
        assert (target.tries, notifier.close(0.2)) == (1, False)


def test_a_strange_error_does_not_end_the_thread() -> None:
    context = a_log()

    def stumble(tries: int) -> None:
        if tries == 1:
            raise RuntimeError("a target's own bug")

    target = Recorder(stumble)
    with notifying(context, a_topic(context, 50), target) as (notifier, producer):
        producer.append([Event(b"a")])
        until(lambda: target.offsets == [0])
        assert notifier.close(60)


def test_a_topic_without_targets_costs_nothing() -> None:
    context = a_log()
    topic = a_topic(context, 50, targets=0)
    before, others = threading.active_count(), set(threading.enumerate())
    with notifying(context, topic) as (notifier, producer):
        producer.append([Event(b"a")])
        started = set(threading.enumerate()) - others
        assert "tidelog-notify" not in {thread.name for thread in started}
        assert notifier.close(60)
    # The producer's timer ends when it is next scheduled.
    until(lambda: threading.active_count() <= before)
    assert read_state(context, topic, 0)[1] is None


def test_topics_are_told_apart_also_when_one_is_made_again() -> None:
    context, target = a_log(), Recorder()
    first = a_topic(context, 50)
    with notifying(context, first, target) as (notifier, producer):
        producer.append([Event(b"a")] * 3)
        until(lambda: target.offsets == [2])
        delete_topic(context, "orders")
        time.sleep(0.2)  # the check that was promised finds the topic gone
        second = a_topic(context, 50)
        notifier.watch(second)
        notifier.watch(second)
        with Producer(context, second) as other:
            other.append([Event(b"b")])
            until(lambda: target.offsets == [2, 0])
        assert notifier.close(60)
        assert notifier.errors == []


def test_a_target_that_cannot_be_opened_is_refused_by_watch() -> None:
    context = a_log()

    def refuse(url: str) -> NotifyTarget:
        raise InvalidError(f"target `{url}`: unknown")

    with pytest.raises(InvalidError):
        Notifier(context, refuse).watch(a_topic(context, 50))


KILLED = """
import sys, time
from tests.log.test_notifier import a_folder_log, Notifier, Producer, Recorder, Event
from tidelog.log.topics import find_topic
log = a_folder_log(sys.argv[1])
topic = find_topic(log, "orders")
def hang(tries):
    print("claimed", flush=True)
    time.sleep(600)
notifier = Notifier(log, lambda url: Recorder(hang))
notifier.watch(topic)
Producer(log, topic).append([Event(b"a"), Event(b"b")])
time.sleep(600)
"""


def a_folder_log(folder: str, clock: SystemClock | FakeClock | None = None) -> Context:
    return Context(
        store=a_store(f"{folder}/objects"),
        catalog=a_catalog(f"{folder}/catalog.sqlite", create=True),
        clock=clock or SystemClock(),
        ids=RandomIds(),
        random=random.Random(7),
    )


def test_what_a_killed_process_owed_is_repaired(tmp_path: Path) -> None:
    context = a_folder_log(str(tmp_path))
    topic, target = a_topic(context, 1_000), Recorder()
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        process.send_signal(signal.SIGKILL)
    until_ms = read_state(context, topic, 0)[0].until_ms
    early = replace(context, clock=FakeClock(until_ms - 1_000))
    assert repair(early, topic, [target]).waiting == [0]
    later = replace(context, clock=FakeClock(until_ms + 600))
    assert repair(later, topic, [target]).sent == [Notification("orders", 0, 1)]
    assert target.offsets == [1]
    context.catalog.close()
