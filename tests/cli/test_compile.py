"""``tidelog compile`` and ``tidelog scribe``, as people and programs run them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_run import Run, finish, start
from tests.support.heartbeats import beaten_between_takes
from tidelog import Event, Home
from tidelog.home import create_home
from tidelog.journal.compile import PartitionCompile
from tidelog.journal.compile_steps import CompilePolicy
from tidelog.journal.scribe import Rate, Tickets
from tidelog.model.event import from_iso
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "1000")
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings)[0] as made:
        made.create_topic("orders", 2)
        for number in range(12):
            made.append("orders", [Event(b"%d" % number, id=f"id-{number}")])
        yield made


def events(home: Home) -> int:
    return sum(1 for partition in range(2) for _ in home.read("orders", partition))


def test_a_topic_is_compiled(tidelog: Run, home: Home) -> None:
    done = tidelog("--home", home.config, "compile", "orders", "--json")
    assert done.code == 0, done.err
    (row,) = done.rows()
    assert (row["topics"], row["runs"], row["events"], row["busy"]) == (1, 12, 12, 0)
    assert row["journals"] == row["partitions"] <= 2
    assert events(home) == 12
    again = tidelog("--home", home.config, "compile", "--all")
    assert again.code == 0
    assert re.search(rb"^journals +0$", again.out, re.MULTILINE)


def test_amendments_wait_unless_they_are_asked_for(tidelog: Run, home: Home) -> None:
    tidelog("--home", home.config, "compile", "orders")
    home.delete("orders", "id-3")
    (few,) = tidelog("--home", home.config, "compile", "orders", "--json").rows()
    (all_of_them,) = tidelog(
        "--home", home.config, "compile", "orders", "--amended", "--json"
    ).rows()
    assert (few["amendments"], all_of_them["amendments"]) == (0, 1)
    assert (few["amendments_waiting"], all_of_them["amendments_waiting"]) == (1, 0)
    assert tidelog("--home", home.config, "sweep", "--grace", "0s").code == 0
    assert events(home) == 11
    assert tidelog("--home", home.config, "verify", "orders").code == 0


def test_people_are_told_how_to_apply_what_waits(tidelog: Run, home: Home) -> None:
    tidelog("--home", home.config, "compile", "orders")
    home.delete("orders", ["id-3", "id-4"])
    for words, hint in ((["orders"], b"compile orders --amended"), (["--all"], b"--all --amended")):
        shown = tidelog("--home", home.config, "compile", *words)
        assert re.search(rb"^amendments_waiting +2$", shown.out, re.MULTILINE)
        assert b"2 updates and deletes not applied yet" in shown.out
        assert hint in shown.out
    assert b"not applied" not in tidelog("--home", home.config, "compile", "--all", "--amended").out


def test_bounds_say_what_can_wait(tidelog: Run, home: Home) -> None:
    for bound in (["--min-events", "100"], ["--min-bytes", "10000000"], ["--older-than", "1h"]):
        (row,) = tidelog("--home", home.config, "compile", "orders", *bound, "--json").rows()
        assert row["journals"] == 0
    both = ["--min-events", "100", "--older-than", "0s"]
    (row,) = tidelog("--home", home.config, "compile", "orders", *both, "--json").rows()
    assert row["events"] == 12


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["orders", "--all"],
        ["nope"],
        ["orders", "--older-than", "soon"],
        ["orders", "--conf", "a=b"],
    ],
)
def test_wrong_words_change_nothing(tidelog: Run, home: Home, words: list[str]) -> None:
    done = tidelog("--home", home.config, "compile", *words)
    assert done.code != 0
    assert done.err.startswith("error: ")
    assert all(state.runs for state in home.partitions("orders") if state.events)


def test_a_partition_that_another_process_compiles_is_told(tidelog: Run, home: Home) -> None:
    topic = home.topic("orders")
    partition = next(state.partition for state in home.partitions("orders") if state.events)
    other = PartitionCompile(home.context, topic, partition, CompilePolicy.everything())
    assert other.holding.try_take()
    with other.holding.beating(), beaten_between_takes():
        done = tidelog("--home", home.config, "compile", "orders", "--json")
    assert done.code == 1
    assert done.rows()[0]["busy"] == 1
    other.holding.release()
    assert tidelog("--home", home.config, "compile", "orders").code == 0


def test_a_scribe_has_one_turn_for_cron(tidelog: Run, home: Home, tmp_path: Path) -> None:
    file = tmp_path / "scribe.prom"
    words = ("scribe", "--once", "--min-events", "1", "--grace", "0s")
    done = tidelog("--home", home.config, *words, "--metrics-file", str(file), "--json")
    assert done.code == 0, done.err
    (row,) = done.rows()
    assert (row["scribe"], row["finished"], row["events"], row["errors"]) == ("turn", True, 12, [])
    assert row["swept_objects"] == 12
    told = dict(line.split(" ") for line in file.read_text().splitlines() if line[0] != "#")
    assert told["tidelog_scribe_turns_total"] == "1"
    assert told["tidelog_scribe_events_total"] == "12"
    assert float(told["tidelog_scribe_last_turn_timestamp_seconds"]) > 1e9
    assert events(home) == 12
    shown = tidelog("--home", home.config, "scribe", "--once")
    assert b"0 runs into 0 journals" in shown.out


@pytest.mark.parametrize(
    "words",
    [
        ["--every", "10m", "--discard-older", "5m"],
        ["--every", "0s"],
        ["--budget", "quick"],
        ["--grace", "-1s"],
    ],
)
def test_a_scribe_refuses_what_makes_no_sense(tidelog: Run, home: Home, words: list[str]) -> None:
    done = tidelog("--home", home.config, "scribe", *words)
    assert done.code != 0
    assert done.err.startswith("error: ")


def test_of_two_scribes_one_works_and_a_signal_ends_both_well(home: Home) -> None:
    words = ("--home", home.config, "scribe", "--every", "1s", "--discard-older", "5s", "--json")
    # Nobody dies here: who stalls for less than the time to live must not be taken for dead.
    more: dict[str, Any] = {"env": {**os.environ, "TIDELOG_LEASE_TTL_MS": "60000"}, "bufsize": 0}
    scribes = [start(*words, "--min-events", "1", **more) for _ in range(2)]
    tickets = Tickets(home.context, Rate(every_ms=1_000, discard_ms=5_000))
    try:
        started = [json.loads(each.stdout.readline()) for each in scribes]
        until = time.monotonic() + 60
        while tickets.read()[0].turns < 3:
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        for each in scribes:
            each.send_signal(signal.SIGTERM)
    done = [finish(each) for each in scribes]
    assert [each.code for each in done] == [0, 0], [each.err for each in done]
    assert [first["scribe"] for first in started] == ["started", "started"]
    turns = []
    for each in done:
        *between, last = map(json.loads, each.out.splitlines())
        assert last["scribe"] == "stopped"
        turns += between
    assert all(turn["scribe"] == "turn" for turn in turns)
    queue, _ = tickets.read()
    assert len(turns) == queue.turns
    first_ms = min(from_iso(each["at"]) for each in started) // 1_000 * 1_000
    stretches = (queue.issued_ms - first_ms) // 1_000 + 1
    assert queue.turns + len(queue.tickets) <= stretches, "one ticket for each second"
    spans = sorted((from_iso(turn["at"]), round(turn["seconds"] * 1000)) for turn in turns)
    for (before_ms, took_ms), (began_ms, _) in pairwise(spans):
        assert began_ms >= before_ms + took_ms - 2, "one at a time, whoever has it"
    assert sum(turn["events"] for turn in turns) == 12
    assert events(home) == 12
