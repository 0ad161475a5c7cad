"""``tidelog playback``: what it prints, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import tidelog as library
from tests.support.cli_run import Run, finish, start
from tests.support.playback_stage import T0
from tidelog import Event
from tidelog.playback.play import Playback

RANGE = ("--start", "2023-11-14T22:13:20Z", "--end", "2023-11-14T22:13:26Z")


def fill(events: int = 12, apart_ms: int = 400) -> None:
    """A topic ``t``, from T0 on, without any event in one of its seconds."""
    with library.open() as home:
        home.create_topic("t", 2)
        home.create_topic("u", 2)
        times = [T0 + 150 + apart_ms * n for n in range(events)]
        wanted = [time for time in times if not 2_000 <= time - T0 < 3_000]
        home.append("t", [Event(b"%d" % t, b"%d" % t, f"id-{t}", t, "x") for t in wanted])


def test_it_tells_of_each_slot_as_its_forerunner_did(tidelog: Run) -> None:
    fill()
    done = tidelog("playback", "t", *RANGE, "--to", "null:")
    lines = done.out.decode().splitlines()
    assert lines[:-1] == [
        "playback of t from 2023-11-14T22:13:20.000Z to 2023-11-14T22:13:26.000Z",
        "2023-11-14T22:13:20Z: 3 events, the first at 22:13:20.150",
        "2023-11-14T22:13:21Z: 2 events, the first at 22:13:21.350",
        "2023-11-14T22:13:23Z: 2 events, the first at 22:13:23.350",
        "2023-11-14T22:13:24Z: 2 events, the first at 22:13:24.150",
    ]
    assert lines[-1].startswith("Success: played 9 events in ")
    assert (done.code, done.err) == (0, "")


def test_parameters_come_from_a_file_where_the_command_line_has_none(
    tidelog: Run, tmp_path: Path
) -> None:
    """As `sls invoke -p test.json` took them; times as numbers too."""
    fill()
    params = tmp_path / "test.json"
    params.write_text(json.dumps({"topic": "t", "start": T0, "end": T0 + 6_000, "to": "null:"}))
    lines = tidelog("playback", "--params", str(params)).out.decode().splitlines()
    assert lines[0].endswith("from 2023-11-14T22:13:20.000Z to 2023-11-14T22:13:26.000Z")
    assert lines[-1].startswith("Success: played 9 events in ")
    done = tidelog("playback", "--params", str(params), "--end", "2023-11-14T22:13:21Z")
    assert done.out.decode().splitlines()[-1].startswith("Success: played 3 events in ")


@pytest.mark.parametrize("text", ['{"begin": 1}', "[]", "", '{"start": 1.5}', '{"start": -1e99}'])
def test_parameters_that_mean_nothing_are_refused(tidelog: Run, tmp_path: Path, text: str) -> None:
    fill(0)
    params = tmp_path / "test.json"
    params.write_text(text)
    done = tidelog("playback", "t", "--to", "null:", "--params", str(params))
    assert (done.code, done.out) == (2, b"")
    assert "give an object with topic, start, end" in done.err


def test_empty_slots_are_told_on_request(tidelog: Run) -> None:
    fill()
    done = tidelog("playback", "t", *RANGE, "--to", "null:", "--empty-slots")
    assert [line for line in done.out.decode().splitlines() if line.endswith(": 0 events")] == [
        "2023-11-14T22:13:22Z: 0 events",
        "2023-11-14T22:13:25Z: 0 events",
    ]


def test_bar_is_there_before_the_first_event(tidelog: Run) -> None:
    fill()
    played = tidelog("playback", "t", *RANGE, "--to", "null:", terminal=True)
    assert "waiting for events" in played.err


def test_a_quiet_playback_prints_the_summary_alone(tidelog: Run) -> None:
    fill()
    done = tidelog("playback", "t", *RANGE, "--to", "null:", "--quiet")
    assert done.out.startswith(b"Success: played 9 events in ")
    assert (done.out.count(b"\n"), done.err) == (1, "")
    (summary,) = tidelog("playback", "t", *RANGE, "--to", "null:", "-q", "--json").rows()
    assert summary["events"] == 9
    assert tidelog("playback", "t", "--to", "null:", "-q", "--empty-slots").code == 2


def test_a_terminal_shows_a_bar_instead_of_a_line_for_each_slot(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = tidelog("playback", "t", *RANGE, "--to", "null:", terminal=True)
    lines = done.out.decode().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["playback", "Success:"]
    assert "2023-11-14T22:13:24Z  9 events" in done.err
    assert (
        "events" not in tidelog("playback", "t", *RANGE, "--to", "null:", "-q", terminal=True).err
    )


def test_json_is_for_machines(tidelog: Run) -> None:
    fill()
    *slots, summary = tidelog("playback", "t", *RANGE, "--to", "null:", "--json").rows()
    assert slots[0] == {
        "slot": "2023-11-14T22:13:20.000Z",
        "first": "2023-11-14T22:13:20.150Z",
        "events": 3,
    }
    assert len(slots) == 4
    assert (summary["events"], summary["slots"], summary["finished"]) == (9, 4, True)
    assert set(summary) == {"events", "slots", "left_out", "seconds", "events_per_s", "finished"}


def test_standard_output_carries_events_alone(tidelog: Run) -> None:
    fill()
    done = tidelog("playback", "t", *RANGE, "--to", "stdout:")
    assert [row["timestamp"] for row in done.rows()] == sorted(
        row["timestamp"] for row in done.rows()
    )
    assert len(done.rows()) == 9
    assert ": 3 events, " in done.err
    assert "played 9 events in" in done.err
    as_json = tidelog("playback", "t", *RANGE, "--to", "stdout:", "--json")
    assert len(as_json.rows()) == 9
    assert json.loads(as_json.err.splitlines()[-1])["events"] == 9


def test_into_a_topic_everything_stays_but_the_place(tidelog: Run) -> None:
    fill()
    assert tidelog("playback", "t", *RANGE, "--to", "topic:u").code == 0
    with library.open() as home:
        found, given = (
            {(e.value, e.key, e.id, e.timestamp, e.type) for p in (0, 1) for e in home.read(n, p)}
            for n in ("u", "t")
        )
        assert found == given
        assert len(found) == 9


def test_a_name_begins_goes_on_and_is_done(tidelog: Run) -> None:
    fill()
    args = ("playback", "t", "--to", "topic:u", "--resume", "again")
    assert "9 events" in tidelog(*args, *RANGE).out.decode()
    done = tidelog(*args)
    assert done.code == 0
    assert done.out.startswith(b"playback `again` was finished at 2")
    assert b", with 9 events; to play again, " in done.out
    (row,) = tidelog(*args, "--json").rows()
    assert (row["playback"], row["events"], row["finished"]) == ("again", 9, True)
    assert tidelog("topic", "show", "u", "--json").rows()[0]["events"] == 9
    other = tidelog(*args, "--start", "2023-11-14T22:13:21Z")
    assert other.code == 2
    assert "began with start `2023-11-14T22:13:20.000Z`" in other.err


def test_as_of(tidelog: Run) -> None:
    fill()
    with library.open() as home:
        ends = [state.next for state in home.partitions("t")]
    as_of = f"0:{ends[0] - 1},1:0"
    rows = tidelog("playback", "t", *RANGE, "--to", "null:", "--json", "--as-of", as_of).rows()
    assert rows[-1]["events"] == ends[0] - 1
    before = tidelog("playback", "t", *RANGE, "--to", "null:", "--json", "--as-of", "-1h").rows()
    assert before[-1]["events"] == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--start", "yesterday", "--to", "null:"), "is not ISO 8601"),
        (("--start", "1h", "--to", "null:"), "or -15m for 15 minutes ago"),
        (("--to", "out.jsonl"), "give topic:NAME, file:PATH"),
        (("--start", "-5m", "--end", "-6m", "--to", "null:"), "runs backwards"),
        (("--to", "nowhere:"), "unknown scheme"),
        (("--to", "null:", "--speed", "fast"), "speed `fast`"),
        (("--to", "null:", "--resume", "a b"), "playback name"),
        (("--to", "null:", "--as-of", "0:1,0:2"), "named twice"),
        (("--to", "null:", "--as-of", "7:1"), "has no partition 7"),
        (("--to", "null:", "--parallel", "--resume", "x"), "leave out"),
        (("--to", "null:", "--parallel", "--speed", "2"), "leave out"),
        (("--to", "null:", "--conf", "spark.cores.max=1"), "give --parallel too"),
        (("--to", "file:x.parquet", "--resume", "x"), "cannot be continued"),
        (("--resume", "x"), "Missing option '--to'"),
        (("--speed", "2"), "Missing option '--to'"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_done(
    tidelog: Run, tmp_path: Path, args: tuple[str, ...], told: str
) -> None:
    fill()
    done = tidelog("playback", "t", *args)
    assert (done.code, done.out) == (2, b"")
    assert told in done.err
    assert not list(tmp_path.glob("x*"))


def test_what_is_not_there_fails(tidelog: Run) -> None:
    fill()
    for args in (("no", "--to", "null:"), ("t", "--to", "topic:no")):
        done = tidelog("playback", *args)
        assert done.code == 1
        assert "not found" in done.err


def test_ctrl_c_ends_it_well_and_says_how_to_go_on(tidelog: Run) -> None:
    fill(events=3_000, apart_ms=40)
    span = ("--start", "2023-11-14T22:13:20Z", "--end", "2023-11-15")
    args = ("playback", "t", *span, "--to", "stdout:", "--speed", "1")
    with start(*args, "--resume", "slow") as playing:
        assert playing.stdout is not None
        first = [playing.stdout.readline() for _ in range(20)]
        playing.send_signal(signal.SIGINT)
        done = finish(playing)
    assert done.code == 130
    assert "Resume it with: tidelog playback t --to stdout: --resume slow" in done.err
    rest = tidelog("playback", "t", "--to", "stdout:", "--resume", "slow")
    assert rest.code == 0
    all_of_it = tidelog("playback", "t", *span, "--to", "stdout:").out
    assert b"".join(first) + done.out + rest.out == all_of_it


def test_ctrl_c_without_a_name_says_how_far_it_came(tidelog: Run) -> None:
    fill(events=3_000, apart_ms=40)
    span = ("--start", "2023-11-14T22:13:20Z", "--end", "2023-11-15")
    with start("playback", "t", *span, "--to", "stdout:", "--speed", "1") as playing:
        assert playing.stdout is not None
        playing.stdout.readline()
        playing.send_signal(signal.SIGTERM)
        done = finish(playing)
    assert done.code == 143
    assert "With --resume NAME it could resume there" in done.err


def test_missing_target_says_how_to_create_it(tidelog: Run) -> None:
    fill()
    refused = tidelog("playback", "t", *RANGE, "--to", "topic:drill")
    assert "or create it with `tidelog topic create drill`" in refused.err


def test_hint_to_resume_keeps_the_speed_and_the_home(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    real = Playback.batches

    def signalled(self: Playback, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, *given)

    monkeypatch.setattr(Playback, "batches", signalled)
    where = ("--home", "tidelog-data")
    done = tidelog(
        *where, "playback", "t", *RANGE, *("--to", "topic:u", "--resume", "rel"), "--speed", "300"
    )
    assert done.code == 130
    assert done.err.endswith(
        "Resume it with: tidelog --home tidelog-data playback t --to topic:u --resume rel "
        "--speed 300\n"
    )
