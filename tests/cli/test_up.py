"""``tidelog up`` with real processes: killed parts, killed keepers, two at once, and its stop."""

from __future__ import annotations

import http.server
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.cli_run import TIDELOG, finish, start
from tests.support.up_run import SECONDS_MAX, archived, eventually, is_gone, post, tidelog, upped
from tidelog import Event, Home
from tidelog.coordination.jobs import Keepers
from tidelog.home import open_home
from tidelog.log.producer.producer import Producer
from tidelog.model.event import from_iso


def values(home: Home, topic: str, partitions: int = 1) -> list[bytes]:
    return [event.value or b"" for p in range(partitions) for event in home.read(topic, p)]


def test_one_command_serves_follows_what_is_made_meanwhile_and_stops_without_a_loss(
    home: Home, place: Path
) -> None:
    figures = place.parent / "scribe.prom"
    with upped(place, "--metrics-file", str(figures)) as up:
        url = up.url
        home.create_topic("orders")
        home.create_topic("copy")
        tidelog(
            place, *("archive", "create", "raw", "--source", "topic:orders", "--max-age", "200ms")
        )
        tidelog(place, "pump", "topic:orders", "--topic", "copy", "--name", "copier", "--no-spark")
        for number in range(5):
            post(url, "orders", f"order {number}")
        up.part("archive raw")
        up.part("pump copier")
        eventually("the archive follows", lambda: archived(home, "raw") == 5)
        eventually("the pump follows", lambda: len(values(home, "copy")) == 5)
        eventually("the scribe has had a turn", figures.exists)
        [keeper] = Keepers(home.context).list()
        assert keeper.url == url
        assert {"serve", "archives and pumps"} <= {part.name for part in keeper.parts}
        eventually(
            "the home knows its parts",
            lambda: (
                {"archive raw", "pump copier"}
                <= {part.name for part in Keepers(home.context).list()[0].parts}
            ),
        )
        answered: list[str] = []
        posting = threading.Thread(target=_post_until_refused, args=(url, answered))
        posting.start()
        eventually("events come in", lambda: len(answered) > 20)
        assert up.end() == 0
        posting.join()
        assert all(is_gone(pid) for pid in up.pids())
        assert Keepers(home.context).list() == []
    assert "tidelog_scribe_last_turn_timestamp_seconds" in figures.read_text()
    kept = [value.decode() for value in values(home, "orders")][5:]
    assert set(answered) <= set(kept)
    assert len(kept) == len(set(kept))


def _post_until_refused(url: str, answered: list[str]) -> None:
    for number in range(100_000):
        try:
            post(url, "orders", f"more {number}")
        except (OSError, urllib.error.URLError):
            return
        answered.append(f"more {number}")


def test_a_killed_part_comes_back_at_the_same_address_after_growing_waits(place: Path) -> None:
    with upped(place) as up:
        url = up.url
        waits = []
        for restarts in range(1, 4):
            running = up.part("serve", restarts=restarts - 1)
            os.kill(running["pid"], signal.SIGKILL)
            failed = up.part("serve", "failed", restarts=restarts - 1)
            assert "signal 9" in failed["error"]
            again = up.part("serve", restarts=restarts)
            waits.append((from_iso(again["since"]) - from_iso(failed["since"])) / 1000)
        assert waits[0] > 0.2
        assert waits[1] > 0.45
        assert waits[2] > 0.9
        eventually("it answers again", lambda: _is_up(url))
        assert up.end(signal.SIGINT) == 0
    assert all(is_gone(pid) for pid in up.pids())


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_killed_keeper_leaves_nobody_behind(home: Home, place: Path) -> None:
    with upped(place) as up:
        assert up.url
        up.part("archives and pumps")
        pids = up.pids()
        assert len(pids) >= 2
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
        eventually("its programs die with it", lambda: all(is_gone(pid) for pid in pids))
    assert Keepers(home.context).list() == []  # its process is known to be dead


def test_an_address_that_is_taken_is_one_clear_line(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = finish(start("--home", str(place), "up", "--no-spark", "--port", port))
    assert done.code == 1
    assert "choose another --port" in done.err.splitlines()[-1]
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.err


def test_beyond_loopback_it_wants_tokens(place: Path) -> None:
    done = finish(
        start("--home", str(place), "up", "--no-spark", "--port", "0", "--host", "0.0.0.0")
    )
    assert done.code == 1
    assert "tidelog token create" in done.err


def test_of_two_on_one_home_the_second_stands_by_and_takes_over(home: Home, place: Path) -> None:
    home.create_topic("orders")
    tidelog(place, *("archive", "create", "raw", "--source", "topic:orders", "--max-age", "200ms"))
    with upped(place) as first:
        first.part("archive raw")
        with upped(place) as second:
            second.part("archive raw", "standing by")
            assert second.url != first.url
            eventually("both are known", lambda: len(Keepers(home.context).list()) == 2)
            for number in range(3):
                post(second.url, "orders", str(number))
            eventually("the first one archives", lambda: archived(home, "raw") == 3)
            first.end(signal.SIGKILL)
            for number in range(3, 6):
                post(second.url, "orders", str(number))
            eventually("the second one goes on", lambda: archived(home, "raw") == 6)
            second.part("archive raw")
            assert second.end() == 0
    tidelog(place, "archive", "verify", "raw")


def test_one_that_fails_is_shown_and_the_others_go_on(home: Home, place: Path) -> None:
    home.create_topic("orders")
    home.create_topic("gone")
    for name, source in (("good", "orders"), ("bad", "gone")):
        tidelog(
            place,
            *("archive", "create", name, "--source", f"topic:{source}", "--max-age", "200ms"),
        )
    home.delete_topic("gone")
    home.append("orders", [Event(b"one")])
    with upped(place) as up:
        failed = up.part("archive bad", "failed")
        assert "gone" in failed["error"]
        eventually("the other one goes on", lambda: archived(home, "good") == 1)
        assert up.end() == 0


def test_notifications_that_a_dead_process_owed_are_sent(home: Home, place: Path) -> None:
    told: list[dict[str, object]] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hook = f"http://127.0.0.1:{server.server_address[1]}/hook"
        topic = home.create_topic("orders", notify=[hook])
        with Producer(home.context, topic) as silent:  # commits, and tells nobody
            silent.send(b"one").result(60)
        with upped(place) as up:
            eventually("it is told", lambda: told)
            assert told[0] == {"topic": "orders", "partition": 0, "offset": 0}
            assert up.end() == 0
        server.shutdown()


def archive_events(home: Home) -> int:
    """How many events the archives have processed, as the keepers of the home say."""
    parts = [part for keeper in Keepers(home.context).list() for part in keeper.parts]
    return sum(part.events or 0 for part in parts if part.name.startswith("archive "))


def test_the_demo_brings_events_can_be_gone_on_with_and_ends_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    made = finish(start("demo", "--no-spark", "--folder", str(folder), "--json"))
    assert made.code == 0, made.err
    steps = {step.get("step"): step for step in made.rows()}
    assert steps["members"]["left"] == 0
    assert steps["archive"]["events"] == 100_001
    assert sum(step["events"] for step in made.rows() if step.get("step") == "query") == 100_001
    words = ("--home", str(folder), "up", "--demo", "--port", "0", "--for")
    first = start(*words, "10m")
    try:
        with open_home(folder) as home:
            eventually("events come through", lambda: archive_events(home))
            eventually("the pump follows", lambda: values(home, "clicks-by-user", 2))
            eventually("the archive follows", lambda: archived(home, "hourly") >= 100_001)
    finally:
        first.send_signal(signal.SIGTERM)
        done = finish(first)
    assert done.code == 0, done.err
    assert b"Console: http://127.0.0.1:" in done.out
    assert b"Events while it ran: archive " in done.out
    again = finish(start(*words, "1s"))
    assert again.code == 0, again.err
    assert b"Console: http://127.0.0.1:" in again.out


def test_the_demo_does_not_touch_a_home_with_topics_of_its_own(home: Home, place: Path) -> None:
    home.create_topic("payroll")
    done = finish(start("--home", str(place), "up", "--demo"))
    assert done.code == 2
    assert "give a folder that is free" in done.err
    assert [topic.name for topic in home.topics()] == ["payroll"]


def test_on_a_terminal_it_shows_a_table_and_ctrl_c_ends_it(place: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*TIDELOG, "--home", str(place), "up", "--no-spark", "--port", "0"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as screen:
        try:
            while b"notifications" not in shown or b"Console: " not in shown:
                shown += screen.read(4096)
            process.send_signal(signal.SIGINT)
            while True:
                shown += screen.read(4096)
        except OSError:  # the terminal is gone when its last process is
            pass
    assert process.wait(SECONDS_MAX) == 0
    assert b"restarts" in shown
    assert b"running" in shown
    assert b"Traceback" not in shown


def test_child_process_without_its_parent_ends_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "--child-of", "1", "topic", "list"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "has ended" in done.stderr
