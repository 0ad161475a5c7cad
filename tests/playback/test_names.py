"""Playbacks by their names: listed, forgotten, begun again, and what is left of those by Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.playback.test_command import RANGE, fill
from tests.playback.test_named_playback import END, RATES, START, Theatre
from tests.support.cli_run import Run, finish, start
from tidelog import open as open_home
from tidelog.context import Context
from tidelog.errors import FencedError, InvalidError, NotFoundError, TidelogError
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.model import layout
from tidelog.playback.request import PlaybackRequest, pinned_playback
from tidelog.playback.session import NamedPlayback, find_playback, forget_playback, list_playbacks
from tidelog.testing.faults import Faults
from tidelog.testing.scheduler import Crash, Scheduler

ASKED = PlaybackRequest("main", "topic:target", START, END)


def names(context: Context) -> list[str]:
    return [each.name for each in list_playbacks(context)]


def test_all_that_have_names_are_listed(tidelog: Run) -> None:
    fill()
    assert tidelog("playback", "--list", "--json").rows() == []
    tidelog("playback", "t", *RANGE, "--to", "null:")
    tidelog("playback", "t", *RANGE, "--to", "topic:u", "--resume", "b")
    with start("playback", "t", *RANGE, "--to", "stdout:", "--resume", "a", "--speed", "1") as slow:
        assert slow.stdout is not None
        slow.stdout.readline()
        states = {
            each["name"]: each["state"] for each in tidelog("playback", "--list", "--json").rows()
        }
        slow.send_signal(signal.SIGKILL)
        finish(slow)
    assert states == {"a": "playing", "b": "finished"}
    one, other = tidelog("playback", "--list", "--json").rows()
    assert (one["name"], one["state"], one["sink"]) == ("a", "stopped", "stdout:")
    assert other.pop("began")
    assert other == {
        "name": "b",
        "topic": "t",
        "start": "2023-11-14T22:13:20.000Z",
        "end": "2023-11-14T22:13:26.000Z",
        "sink": "topic:u",
        "events": 9,
        "state": "finished",
    }
    table = tidelog("playback", "--list").out.decode()
    assert "topic:u" in table
    assert "stopped" in table


def test_a_forgotten_name_can_be_begun_again(tidelog: Run) -> None:
    fill()
    words = ("playback", "t", *RANGE, "--to", "topic:u", "--resume", "p", "--json")
    assert tidelog(*words).rows()[-1]["events"] == 9
    assert tidelog(*words).rows()[-1]["finished_at"]
    assert tidelog("playback", "--forget", "p", "--json").rows() == [{"forgotten": "p"}]
    assert tidelog("playback", "--list", "--json").rows() == []
    assert tidelog(*words).rows()[-1]["events"] == 9
    with open_home() as home:
        found = Counter(event.id for p in range(2) for event in home.read("u", p))
        assert set(found.values()) == {2}, "it was played twice, as it was asked for twice"
    for _ in range(2):
        done = tidelog("playback", "--forget", "q")
        assert done.code == 1
        assert "nothing to forget" in done.err


def test_what_a_file_held_is_not_taken_for_the_new_ones(tidelog: Run, tmp_path: Path) -> None:
    fill()
    words = ("playback", "t", *RANGE, "--to", "file:out.jsonl", "--resume", "p")
    assert tidelog(*words).code == 0
    tidelog("playback", "--forget", "p")
    assert "holds" in tidelog(*words).err
    (tmp_path / "out.jsonl").unlink()
    assert tidelog(*words).code == 0
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 9


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--list", "--forget", "p"), "take no other option"),
        (("--list", "t"), "take no other option"),
        (("--forget", "p", "--to", "null:"), "take no other option"),
        (("--list", "--speed", "max"), "take no other option"),
        (("--forget", ""), "playback name"),
        (("--forget", "../x"), "playback name"),
        (("--to", "null:"), "Missing argument 'TOPIC'"),
        ((), "Missing argument 'TOPIC'"),
    ],
)
def test_wrong_usage_is_refused(tidelog: Run, args: tuple[str, ...], told: str) -> None:
    fill()
    done = tidelog("playback", *args)
    assert (done.code, done.out) == (2, b"")
    assert told in done.err


def test_one_that_is_played_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    theatre = Theatre()
    context = theatre.player()
    pinned_playback(context, "p", ASKED)
    owner = NamedPlayback(context, "p")
    assert owner.try_take()
    other = theatre.player()
    real = theatre.clock.sleep

    def sleep(seconds: float) -> None:
        owner.beat()
        real(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(theatre.clock, "sleep", sleep)
        with pytest.raises(InvalidError, match="a process plays it"):
            forget_playback(other, "p")
    assert names(context) == ["p"]
    forget_playback(other, "p")  # as the owner is silent now
    with pytest.raises(FencedError, match="another process has claimed it"):
        owner.beat()
    assert names(context) == []
    with pytest.raises(InvalidError, match="was forgotten meanwhile"):
        owner.try_take()
    with pytest.raises(NotFoundError, match="nothing to forget"):
        forget_playback(context, "p")


@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("finished", [False, True])
def test_forgetting_that_dies_anywhere_is_finished_by_the_next(call: int, finished: bool) -> None:
    theatre = Theatre()
    pinned_playback(theatre.player(), "p", ASKED)
    if finished:
        theatre.resume(theatre.player())
    faults = Faults(crash_after_call=call)
    died = False
    try:
        forget_playback(theatre.player(faults), "p")
    except Crash:
        died = True
    assert died or faults.calls < call
    context = theatre.player()
    if find_playback(context, "p") is not None:
        forget_playback(context, "p")
    assert names(context) == []
    _, pinned = pinned_playback(context, "p", ASKED)
    assert (pinned.generation, names(context)) == (2, ["p"])


@pytest.mark.parametrize("block", range(3))
def test_beginning_and_forgetting_at_once_in_a_bad_world(block: int) -> None:
    """Whatever comes of it: what has a pin is listed, and what is listed can be forgotten."""
    for seed in range(block * 20, block * 20 + 20):
        theatre = Theatre(seed=seed)
        scheduler = Scheduler(seed)
        faults = Faults(scheduler.random, RATES, scheduler)

        def begin(t: Theatre = theatre, f: Faults = faults, s: Scheduler = scheduler) -> None:
            context = t.player(f, s)
            for _ in range(3):
                with contextlib.suppress(TidelogError):
                    pinned_playback(context, "p", ASKED)
                s.clock.sleep(s.random.random())

        def forget(t: Theatre = theatre, f: Faults = faults, s: Scheduler = scheduler) -> None:
            context = t.player(f, s)
            for _ in range(3):
                with contextlib.suppress(TidelogError):
                    forget_playback(context, "p")
                s.clock.sleep(s.random.random())

        for number, actor in enumerate((begin, begin, forget, forget)):
            scheduler.spawn(str(number), actor)
        scheduler.run()
        while faults.late:
            faults.late.pop()()
        context = theatre.player()
        assert names(context) == (["p"] if find_playback(context, "p") else [])
        pinned_playback(context, "p", ASKED)
        forget_playback(context, "p")
        assert names(context) == []


def test_what_a_killed_playback_by_spark_has_staged_is_swept(tidelog: Run) -> None:
    fill()
    with open_home() as home:
        root = Path(home.store.url.removeprefix("file://"))
        old_s = time.time() - 7_200
        for playback, ages in (("dead", (old_s,) * 3), ("live", (old_s, old_s, time.time()))):
            folder = layout.staging(layout.playback_staging(playback), "all", 0, "windows")
            for number, age_s in enumerate(ages):
                home.store.put(f"{folder}/{number}/0", b"staged")
                os.utime(root / f"{folder}/{number}/0", (age_s, age_s))
        assert sweep_archives(home.context, 10_800_000).objects_young == 6
        swept = sweep_archives(home.context, 3_600_000)
        assert (swept.objects_deleted, swept.objects_young) == (3, 3)
        left = {info.key.split("/")[1] for info in home.store.list("staging/")}
        assert left == {"playback-live"}
