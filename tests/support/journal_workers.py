"""``python -m tests.support.journal_workers``: a nursery of processes around a topic that is
compiled.

It reads lines ``ROLE HOME TOPIC FILE NUMBER``, forks a worker for each, and prints its process id.
Producers and consumers are those of ``tests.support.log_workers``. An amender owns its events: it
appends, updates and deletes them, and after each call reads what must be there. A compiler kills
itself by SIGKILL before or after a call to the store or the catalog that changes something, by its
number.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import tidelog
import tidelog.catalog.sqlite
from tests.support.child_processes import fork_workers
from tests.support.log_workers import PAUSE_S, consume, note, produce
from tidelog import Event
from tidelog.errors import NotFoundError, UnavailableError
from tidelog.journal.compile import compile_topic
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore

T = TypeVar("T")

COMPILER_TTL_MS = 1_000  # by which a compiler waits for another, and takes over from a slow one
POLICIES = (
    CompilePolicy(min_events=1, min_amendments=1),
    CompilePolicy(min_events=1, min_amendments=1, max_events=400),
)


class Suicide(Faults):
    """Kills this process around a call that changes something: before it, or after its effect."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def call(self, verb: str, effect: Callable[[], T], lost: Callable[[], Exception]) -> T:
        if verb not in ("write", "put", "copy", "delete"):
            return super().call(verb, effect, lost)
        self._count()
        result = super().call(verb, effect, lost)
        self._count()
        return result

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def compile_(home: tidelog.Home, topic: str, file: int, number: int) -> None:
    faults = Suicide(number)
    context = replace(
        home.context,
        store=FaultyStore(home.context.store, faults),
        catalog=FaultyCatalog(home.context.catalog, faults, home.context.clock),
        log_settings=replace(home.context.log_settings, lease_ttl_ms=COMPILER_TTL_MS),
    )
    compile_topic(context, home.topic(topic), POLICIES[number % len(POLICIES)])
    note(file, "compiled", 0, number)


def sweep(home: tidelog.Home, topic: str, file: int, number: int) -> None:
    while True:
        home.sweep(0)
        note(file, "swept", 0, 0)
        time.sleep(0.3)


def amend(home: tidelog.Home, topic: str, file: int, number: int) -> None:
    """A line before and after each call, with the value that an event has from then on."""
    chance = random.Random(os.getpid())
    mine: dict[str, str] = {}
    for turn in range(1_000_000):
        each = f"a{os.getpid()}-{turn}"
        home.append(topic, [Event(b"0", id=each, key=each.encode())])
        mine[each] = "0"
        note(file, "put", 0, 0, f"{each}=0")
        for _ in range(4):
            each = chance.choice(list(mine))
            if mine[each] == "-":
                continue
            value = "-" if chance.random() < 0.2 else str(int(mine[each]) + 1)
            note(file, "wants", 0, 0, f"{each}={value}")
            try:
                if value == "-":
                    home.delete(topic, each)
                else:
                    home.update(topic, each, value.encode())
            except UnavailableError:
                continue  # the line says that it may have been done
            mine[each] = value
            note(file, "amended", 0, 0, f"{each}={value}")
            look(home, topic, file, each, value)
        time.sleep(PAUSE_S)


def look(home: tidelog.Home, topic: str, file: int, each: str, value: str) -> None:
    try:
        found = (home.get(topic, each).value or b"").decode()
    except NotFoundError:
        found = "-"
    if found != value:
        note(file, "wrong", 0, 0, f"{each}={found}!={value}")


ROLES = {"compile": compile_, "sweep": sweep, "amend": amend}


def work(role: str, where: str, topic: str, path: str, number: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with tidelog.open(where) as opened:
        if role in ROLES:
            ROLES[role](opened, topic, descriptor, int(number))
        else:
            {"produce": produce, "consume": consume}[role](opened, topic, descriptor)


if __name__ == "__main__":
    fork_workers(work)
