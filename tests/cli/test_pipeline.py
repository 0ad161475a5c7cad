"""``tidelog pump`` and ``tidelog pipeline`` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import tidelog as library
from tests.cli.test_home import run
from tests.support.cli_run import Run
from tidelog import Event


def test_a_pump_is_listed_shown_and_removed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "orders.txt").write_text('{"user": 7}\n{"user": 8}\n')
    assert run(tmp_path, "topic", "create", "orders", "--partitions", "2").returncode == 0
    pump = ("pump", f"file:{tmp_path}/in?format=lines", "--topic", "orders", "--no-spark", "--json")
    fields = ("--key-field", "user", "--name", "mine")
    done = run(tmp_path, *pump, *fields)
    assert json.loads(done.stdout.splitlines()[-1])["events"] == 2, done.stderr
    assert json.loads(run(tmp_path, *pump, *fields).stdout.splitlines()[-1])["events"] == 0
    (listed,) = map(json.loads, run(tmp_path, "pipeline", "list", "--json").stdout.splitlines())
    assert (listed["name"], listed["events"]) == ("mine", 2)
    (shown,) = map(
        json.loads, run(tmp_path, "pipeline", "show", "mine", "--json").stdout.splitlines()
    )
    assert shown["events"] == 2
    assert run(tmp_path, *pump, "--name", "mine").returncode != 0, "other settings"
    unknown = run(tmp_path, "pipeline", "delete", "mime")
    assert (unknown.returncode, "did you mean `mine`" in unknown.stderr) == (1, True)
    asked = run(tmp_path, "pipeline", "delete", "mine")
    assert (asked.returncode, "needs --yes without a terminal" in asked.stderr) == (2, True)
    assert run(tmp_path, "pipeline", "delete", "mine", "--yes").returncode == 0
    assert run(tmp_path, "pipeline", "show", "mine").returncode == 1
    assert run(tmp_path, "pipeline", "list", "--json").stdout == ""
    bad = run(tmp_path, "pump", "topic:nope", "--topic", "orders", "--no-spark")
    assert "not found" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_events_that_were_left_out_as_erased_are_shown_and_measured(tidelog: Run) -> None:
    for topic in ("from", "to"):
        assert tidelog("topic", "create", topic).code == 0
    with library.open() as home:
        home.append("to", [Event(b"x", id="b", timestamp=1)])
        home.delete("to", ["b"])
        home.append("from", [Event(b"x", id=each, timestamp=1) for each in "abc"])
    pump = ("pump", "topic:from", "--topic", "to", "--no-spark", "--name", "mine", "--json")
    assert tidelog(*pump).rows()[-1]["left_out"] == 1
    (listed,) = tidelog("pipeline", "list", "--json").rows()
    assert (listed["events"], listed["left_out"]) == (3, 1)
    (shown,) = tidelog("pipeline", "show", "mine", "--json").rows()
    assert (shown["events"], shown["left_out"]) == (3, 1)
    assert "left_out" in tidelog("pipeline", "list").out.decode()
    metrics = tidelog("pipeline", "list", "--prometheus").out.decode()
    labels = '{pipeline="mine",partition="from/0"}'
    assert f"tidelog_pipeline_left_out_total{labels} 1\n" in metrics
    assert f"tidelog_pipeline_events_total{labels} 3\n" in metrics
