"""Processes that amend, killed at any moment: what was acknowledged holds, all else is sound."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.journal.test_amend import compile_all
from tests.support.all_times import ALL_TIMES
from tidelog import Event
from tidelog.home import Home, World, create_home
from tidelog.settings import Settings

KILLS = 4
IDS = 60
AMEND = """
import random, sys
from tidelog.home import open_home

config, seed = sys.argv[1:]
chosen = random.Random(int(seed))
with open_home(config) as home:
    print("ready", flush=True)
    for number in range(100_000):
        ids = [f"id-{chosen.randrange(60)}" for _ in range(30)]
        value = f"{seed}-{number}|".encode() * chosen.choice([1, 2000])
        done = home.update_many("t", dict.fromkeys(ids, value))
        print("updated", value[:20].decode(), *sorted(set(ids) - set(done.missing)), flush=True)
        if number % 4 == 3:
            gone = f"id-{chosen.randrange(60)}"
            home.delete("t", [gone])
            print("deleted", gone, flush=True)
"""


def test_what_was_acknowledged_holds_wherever_an_amender_is_killed(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    chosen = random.Random(5)
    with create_home(settings, world=World(environ={}))[0] as home:
        home.create_topic("t", 2)
        for first in range(0, IDS, 6):
            home.append("t", [Event(b"old", id=f"id-{n}") for n in range(first, first + 6)])
        deleted: set[str] = set()
        for seed in range(KILLS):
            lines = _killed(home, seed, 0.2 + chosen.random())
            updated: dict[str, str] = {}
            for line in lines:
                verb, *words = line.split()
                if verb == "updated":
                    assert not deleted & set(words[1:]), "a delete is final"
                    updated |= dict.fromkeys(words[1:], words[0])
                elif verb == "deleted":
                    deleted.add(words[0])
            found = {event.id: event.value or b"" for event in home.playback("t", *ALL_TIMES)}
            assert not deleted & set(found)
            for each, value in updated.items():
                if each in found:  # else a delete was under way
                    assert _number(found[each], seed) >= _number(value.encode(), seed)
            report = home.verify("t")
            assert report.errors == 0, report.findings
            compile_all(home)
            home.sweep(0)
            assert {event.id: event.value for event in home.playback("t", *ALL_TIMES)} == found
        assert deleted


def _number(value: bytes, seed: int) -> int:
    """Which update of a process gave this value; it may be one that nobody was told of."""
    name, _, number = value[:20].partition(b"-")
    assert name == b"%d" % seed
    return int(number.partition(b"|")[0])


def _killed(home: Home, seed: int, after_s: float) -> list[str]:
    """What an amender had acknowledged when it was killed, a delete among it."""
    process = subprocess.Popen(
        [sys.executable, "-c", AMEND, home.config, str(seed)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said == "ready\n"
    while not said.endswith("\n") or not said.splitlines()[-1].startswith("deleted"):
        line = process.stdout.readline()
        assert line, "the amender died by itself"
        said += line
    time.sleep(after_s)
    process.kill()
    said += process.stdout.read()
    process.wait()
    process.stdout.close()
    return said.splitlines()[: said.count("\n")]
