"""Threads that go on when the main thread has ended, and a producer that is closed at the exit.

Python's own pools take no work any more then, so each case runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import atexit, threading, time
import tidelog
from tidelog import Event

home = tidelog.open("memory:")
home.create_topic("t", 2)
producer = home.producer("t")
main = threading.main_thread()

def shown():
    print(sorted(event.value for p in range(2) for event in home.read("t", p)))
"""
_THREAD = """
def work():
    main.join()
    time.sleep(0.05)  # pools are told after the main thread has ended
{calls}
    shown()

threading.Thread(target=work).start()
"""
_EXIT = """
def end():
    producer.close()
    shown()
    home.close()
    print("closed")

atexit.register(end)
producer.send(b"last")
"""


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread after the main one ended"
)
def test_threads_that_outlive_the_main_one_store_what_they_send() -> None:
    calls = """
    print(producer.send(b"a", b"k").result(20))
    producer.send(b"b", b"k"); producer.flush(20)
    print(home.append("t", [Event(b"c", key=b"k")])[0])
    with home.consumer("t", "c") as consumer:
        print(consumer.run(lambda event: None, until_caught_up=True))
"""
    first, second, handled, stored = _output(_BEGIN + _THREAD.format(calls=calls))
    assert (first[-2:], second[-2:], handled) == ("/0", "/2", "3")
    assert stored == "[b'a', b'b', b'c']"


def test_close_of_a_producer_returns_only_when_all_is_stored() -> None:
    calls = """
    producer.send(b"last")
    time.sleep(0.3)  # longer than it lingers
    producer.close()
"""
    assert _output(_BEGIN + _THREAD.format(calls=calls)) == ["[b'last']"]


def test_producer_that_is_closed_at_the_exit_stores_what_was_sent() -> None:
    assert _output(_BEGIN + _EXIT) == ["[b'last']", "closed"]


def _output(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()
