"""Types that several threads meet first at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tidelog.errors import CorruptError
from tidelog.model.decoding import decode_json, decode_msgpack
from tidelog.model.topic import decode_row

ROOT = Path(__file__).parents[2]

# With msgspec's own `decode` this ends in a segmentation fault in its first rounds.
AT_ONCE = """
import sys, threading
import msgspec
from tidelog.model.decoding import decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
for number in range(500):
    inner = [
        msgspec.defstruct(f"Inner{n}", [(f"x{m}", "int | None", None) for m in range(3)])
        for n in range(6)
    ]
    fields = [(f"f{n}", each | None, None) for n, each in enumerate(inner)]
    outer = msgspec.defstruct("Outer", fields)
    value = {f"f{n}": {"x1": n} for n in range(6)}
    packed, text = msgspec.msgpack.encode(value), msgspec.json.encode(value)
    barrier, right = threading.Barrier(4), []

    def decode(by, data):
        barrier.wait()
        right.append(all(by(data, outer).f5.x1 == 5 for _ in range(10)))

    ways = [(decode_json, text), (decode_msgpack, packed)] * 2
    threads = [threading.Thread(target=decode, args=way) for way in ways]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert right == [True] * 4
"""


def test_threads_that_meet_a_type_at_once_all_decode_it() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], cwd=ROOT, check=False, timeout=240)
    assert done.returncode == 0


def test_a_child_decodes_what_its_parent_was_about_to_learn() -> None:
    class Slow(msgspec.Struct):
        number: int

    stop = threading.Event()

    def learn() -> None:
        while not stop.is_set():
            kind = msgspec.defstruct("Kind", [("number", int)])
            assert decode_msgpack(msgspec.msgpack.encode({"number": 1}), kind).number == 1  # type: ignore[attr-defined]

    learning = threading.Thread(target=learn)
    learning.start()
    try:
        for number in range(20):
            child = os.fork()
            if child == 0:
                os._exit(decode_json(b'{"number": %d}' % number, Slow).number)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == number
    finally:
        stop.set()
        learning.join()


def test_what_is_no_such_value_is_told() -> None:
    class Row(msgspec.Struct):
        number: int

    assert decode_row(msgspec.msgpack.encode({"number": 1, "newer": 2}), Row, "row `x`").number == 1
    with pytest.raises(CorruptError, match=r"row `x`: Expected `int`, got `str`.*: keep it"):
        decode_row(msgspec.msgpack.encode({"number": "1"}), Row, "row `x`")
    with pytest.raises(msgspec.MsgspecError):
        decode_json("{", Row)
