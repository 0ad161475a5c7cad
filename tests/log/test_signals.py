"""A signal handler raises in the middle of a call, as Ctrl-C does; the same objects go on."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import tidelog
from tidelog import Event, Home
from tidelog.concurrency import Flag, Pool
from tidelog.log.consumer import consumer as consumer_module
from tidelog.log.consumer import handler as handler_module
from tidelog.settings import LogSettings

_HANDLERS_RUN_AFTER = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME")


@pytest.fixture
def home() -> Iterator[Home]:
    with tidelog.open("memory:") as opened:
        object.__setattr__(opened.context, "log_settings", LogSettings(linger_ms=1))
        opened.create_topic("t", 2)
        yield opened


def interrupt(call: Callable[[], object], place: int) -> bool:
    """Makes a call that is interrupted where Python may run signal handlers for the n-th time.

    Returns False if the call has fewer such places.
    """
    before: dict[FrameType, str] = {}
    places = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = before.get(frame)
            before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last in _HANDLERS_RUN_AFTER and next(places) == place:
                raise KeyboardInterrupt
        return trace

    traced = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it only when tracing begins
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(traced)
    return False


def ends(call: Callable[[], object]) -> bool:
    """Returns whether a call in another thread ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_flag_can_be_set_after_any_interrupt() -> None:
    for place in itertools.count(1):
        flag = Flag()
        if not interrupt(lambda flag=flag: (flag.wait(0), flag.set()), place):  # type: ignore[misc]
            break
        assert ends(flag.set), place
        assert flag.is_set()
        assert flag.wait()
    assert place > 10


@pytest.mark.parametrize("waits", [False, True])
def test_a_pool_works_on_after_any_interrupt(waits: bool) -> None:
    with Pool(1) as pool:
        pool.submit(int).result()

        def work() -> None:
            future = pool.submit(int)
            if waits:
                future.add_done_callback(id)
                future.result()

        for place in itertools.count(1):
            if not interrupt(work, place):
                break
            assert ends(lambda: pool.submit(int).result()), place
    assert place > 10


class Interrupts:
    """Makes a call, and raises before or after it, once."""

    def __init__(self, call: Callable[..., Any], *, after: bool = False) -> None:
        self._call = call
        self._after = after
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls == 1 and not self._after:
            raise KeyboardInterrupt
        result = self._call(*args)
        if self._calls == 1:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_start_of_a_flush_holds_up_no_later_one(home: Home, after: bool) -> None:
    with home.producer("t") as producer:
        pool = producer._queue._pool
        pool.submit = Interrupts(pool.submit, after=after)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            producer.append([Event(b"1")], partition=0)
        assert producer.append([Event(b"2")], partition=0)[0].offset == 1
    assert [event.value for event in home.read("t", 0)] == [b"1", b"2"]


def test_what_was_sent_is_stored_although_its_flush_was_interrupted(home: Home) -> None:
    with home.producer("t") as producer:
        sent = producer.send(b"1", key=b"k")
        queue = producer._queue
        queue.start = Interrupts(queue.start)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        producer.flush()
        assert home.read("t", sent.result(20).partition).__next__().value == b"1"


class Interrupting(list[Any]):
    """A list that is interrupted once when something is added."""

    calls = 0

    def append(self, each: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        super().append(each)


@pytest.mark.parametrize("column", ["fields", "times", "values"])
@pytest.mark.parametrize("name", [None, "loader"])
def test_an_interrupted_send_leaves_nothing_to_other_events(
    home: Home, column: str, name: str | None
) -> None:
    with home.producer("t", name) as producer:
        sequence = None if name is None else 4
        setattr(producer._open.pending, column, Interrupting())
        with pytest.raises(KeyboardInterrupt):
            producer.send(b"1", key=b"k", id="one", sequence=sequence)
        first = producer.send(b"2", sequence=sequence)  # its sequence is free
        again = producer.send(b"1", key=b"k", id="one").result(20)
        position = first.result(20)
        found = next(home.read("t", position.partition, position.offset))
        assert (found.value, found.key, found.id) == (b"2", None, None)
        assert next(home.read("t", again.partition, again.offset)).id == "one"


class InterruptedPool(Pool):
    """A pool that is interrupted when it gets work."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


def test_a_handler_gets_what_an_interrupted_run_has_polled(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(2):
        home.append("t", [Event(b"%d" % n) for n in range(3)], partition=partition)
    handled: set[tuple[int | None, int | None]] = set()

    def handle(event: Event) -> None:
        handled.add((event.partition, event.offset))

    with home.consumer("t", "c") as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(handler_module, "Pool", InterruptedPool)
            with pytest.raises(KeyboardInterrupt):
                consumer.run(handle, until_caught_up=True)
        assert handled == set()
        consumer.run(handle, until_caught_up=True)
    assert handled == {(partition, offset) for partition in range(2) for offset in range(3)}


def test_a_loop_gets_what_an_interrupted_one_has_polled(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.append("t", [Event(b"%d" % n) for n in range(3)], partition=0)
    with home.consumer("t", "c") as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(consumer_module, "one_by_one", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(iter(consumer))
        coming = consumer.one_by_one(consumer.poll(timeout_s=0.1))
        consumer.commit()  # as a `finally` would, before the first event
        assert [event.offset for event in consumer.poll(timeout_s=0.1)] == [0, 1, 2]
        assert list(coming) == []


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_home_whose_close_was_interrupted_is_closed_by_the_next_call(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(home.context, "log_settings", LogSettings(linger_ms=600_000))
    producer = home.producer("t")
    sent = producer.send(b"a")
    monkeypatch.setattr(producer, "close", Interrupts(producer.close))
    with pytest.raises(KeyboardInterrupt):
        home.close()
    assert not sent.done()
    home.close()
    assert sent.result(0).offset == 0
