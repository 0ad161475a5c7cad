"""``tidelog pump`` and ``tidelog pipeline`` as a person runs them."""

from __future__ import annotations

from pathlib import Path

import tidelog as library
from tests.support.cli_run import Run
from tidelog import Event


def test_a_pump_is_listed_shown_and_removed(tidelog: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "orders.txt").write_text('{"user": 7}\n{"user": 8}\n')
    assert tidelog("topic", "create", "orders", "--partitions", "2").code == 0
    pump = ("pump", f"file:{tmp_path}/in?format=lines", "--topic", "orders", "--no-spark", "--json")
    fields = ("--key-field", "user", "--name", "mine")
    done = tidelog(*pump, *fields)
    assert done.rows()[-1]["events"] == 2, done.err
    assert tidelog(*pump, *fields).rows()[-1]["events"] == 0
    (listed,) = tidelog("pipeline", "list", "--json").rows()
    assert (listed["name"], listed["events"]) == ("mine", 2)
    (shown,) = tidelog("pipeline", "show", "mine", "--json").rows()
    assert shown["events"] == 2
    assert tidelog(*pump, "--name", "mine").code != 0, "other settings"
    unknown = tidelog("pipeline", "delete", "mime")
    assert (unknown.code, "did you mean `mine`" in unknown.err) == (1, True)
    asked = tidelog("pipeline", "delete", "mine")
    assert (asked.code, "needs --yes without a terminal" in asked.err) == (2, True)
    assert tidelog("pipeline", "delete", "mine", "--yes").code == 0
    assert tidelog("pipeline", "show", "mine").code == 1
    assert tidelog("pipeline", "list", "--json").out == b""
    bad = tidelog("pump", "topic:nope", "--topic", "orders", "--no-spark")
    assert bad.code == 1
    assert "not found" in bad.err


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


def test_failing_pump_is_listed_as_such_and_shown_with_its_reason(
    tidelog: Run, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("1\n")
    (tmp_path / "in" / "orders.txt").write_text("1\n2\n")
    assert tidelog("topic", "create", "orders").code == 0
    pump = ("pump", f"file:{tmp_path}/in?format=lines", "--topic", "orders", "--no-spark")
    done = tidelog(*pump, "--name", "mine")
    assert done.code == 0
    assert "orders.txt: 0 to 2, 2 events, 0 dead letters\n" in done.err, "a pump writes no files"
    (tmp_path / "in" / "orders.txt").write_text("1\n")
    assert tidelog(*pump, "--name", "mine").code != 0
    (listed,) = tidelog("pipeline", "list", "--json").rows()
    assert listed["state"] == "failing"
    good, bad = tidelog("pipeline", "show", "mine", "--json").rows()
    assert (good["state"], good["error"]) == ("ready", None)
    assert bad["state"] == "failing"
    assert "has shrunk to 2 bytes" in bad["error"]
    (tmp_path / "in" / "orders.txt").write_text("1\n2\n")
    assert tidelog(*pump, "--name", "mine").code == 0
    (listed,) = tidelog("pipeline", "list", "--json").rows()
    assert listed["state"] == "ready"
