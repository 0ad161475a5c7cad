"""``tidelog pump`` and ``tidelog pipeline`` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_home import run


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
