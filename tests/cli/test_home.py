"""``init``, ``home`` and ``demo`` as a person runs them: real processes, bad input above all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIDELOG = [sys.executable, "-c", "from tidelog.cli.main import run; run()"]


def run(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TIDELOG, *args],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_init_is_idempotent_and_home_shows_the_same(tmp_path: Path) -> None:
    first, second, shown = (
        run(tmp_path, "init", "--json"),
        run(tmp_path, "init", "--json"),
        run(tmp_path, "home", "--json"),
    )
    made, again, home = (json.loads(done.stdout) for done in (first, second, shown))
    assert (made.pop("new"), again.pop("new")) == (True, False)
    assert made == again == home
    assert home["config"].startswith("tidelog:?store=file:///")
    assert "Created a new home" in run(tmp_path, "--home", "other", "init").stdout
    assert "already exists" in run(tmp_path, "--home", "other", "init").stdout


def test_home_by_config_string_by_variable_and_saved(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "--store", "o", "--catalog", "c.sqlite", "--save", "--json")
    config = json.loads(made.stdout)["config"]
    expected = json.loads(made.stdout)["id"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for shown in (
        run(elsewhere, "--home", config, "home", "--json"),
        run(elsewhere, "home", "--json", TIDELOG_HOME=config),
        run(elsewhere, "home", "--json", TIDELOG_HOME=str(tmp_path)),
        run(tmp_path, "home", "--json"),
    ):
        assert json.loads(shown.stdout)["id"] == expected
    twice = run(tmp_path, "init", "--store", "o", "--catalog", "c.sqlite", "--save")
    assert (twice.returncode, "exists already" in twice.stderr) == (1, True)


def test_the_default_home_is_made_on_first_use(tmp_path: Path) -> None:
    assert run(tmp_path, "home").returncode == 0
    assert (tmp_path / "tidelog-data" / "catalog.sqlite").exists()


BAD = {
    "a home that was not made": (
        ["--home", "a place", "topic", "list"],
        {},
        1,
        "run `tidelog --home 'a place' init`",
    ),
    "a variable's home that was not made": (
        ["topic", "list"],
        {"TIDELOG_HOME": "gone"},
        1,
        "run `tidelog init`",
    ),
    "half a URL as home": (["--home", "s3:/b", "init"], {}, 2, "looks like a URL"),
    "half a URL in the environment": (
        ["topic", "list"],
        {"TIDELOG_HOME": "s3:/b"},
        2,
        "TIDELOG_HOME `s3:/b`: looks like a URL",
    ),
    "a file as home": (["--home", sys.executable, "topic", "list"], {}, 2, "is a file"),
    "a URL as home": (["--home", "s3://b", "home"], {}, 2, "two addresses"),
    "a malformed config string": (["--home", "tidelog:?x", "home"], {}, 2, "tidelog:?store=URL"),
    "an unknown scheme": (
        ["init", "--store", "s33://b", "--catalog", "x"],
        {},
        2,
        "did you mean `s3`",
    ),
    "an unknown catalog": (
        ["init", "--store", "x", "--catalog", "dynamo://t"],
        {},
        2,
        "did you mean `dynamodb`",
    ),
    "half a home": (["init", "--store", "x"], {}, 2, "--catalog is missing"),
    "two ways at once": (
        ["--home", "a", "init", "--store", "x", "--catalog", "y"],
        {},
        2,
        "contradict",
    ),
    "a secret": (
        ["init", "--store", "s3://AKIA:hunter2@b", "--catalog", "x"],
        {},
        2,
        "credentials come from the environment",
    ),
    "an unknown variable": (["home"], {"TIDELOG_HOMR": "x"}, 2, "did you mean `TIDELOG_HOME`"),
    "no credentials": (
        ["init", "--store", "s3://b", "--catalog", "x"],
        {},
        2,
        "no AWS credentials",
    ),
    "a store that is down": (
        ["init", "--store", "s3://b?endpoint=http://127.0.0.1:9", "--catalog", "x"],
        {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "TIDELOG_RETRY_ATTEMPTS": "2"},
        1,
        "no answer",
    ),
    "a file where a folder should be": (
        ["init", "--store", "/dev/null/x", "--catalog", "x"],
        {},
        2,
        "error:",
    ),
    "a catalog below a file": (
        ["init", "--store", "x", "--catalog", "/dev/null/x.sqlite"],
        {},
        2,
        "cannot be created",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line_an_exit_code_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    args, environ, code, message = BAD[case]
    done = run(tmp_path, *args, **environ)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    as_json = run(tmp_path, *args, "--json", **environ)
    assert as_json.returncode == code
    assert json.loads(as_json.stderr)["error"]["message"]


def test_wrong_usage_is_told_by_the_command_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "init", "--catlog", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: No such option '--catlog'")
    assert "--catalog" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    as_json = json.loads(run(tmp_path, "consume", "t", "--json").stderr)["error"]
    assert as_json["kind"] == "invalid"
    assert "'--name': see `tidelog consume --help`" in as_json["message"]
    assert "Usage:" in run(tmp_path, "topic").stderr, "a group alone shows its help"
    assert run(tmp_path, "nonsense").returncode == 2
    assert run(tmp_path, "--version").stdout.startswith("tidelog, version ")


def test_the_demo_shows_real_work_and_ends(tmp_path: Path) -> None:
    shown = run(tmp_path, "demo", "--clean")
    assert shown.returncode == 0
    assert "the counts match" in shown.stdout
    assert "{" not in shown.stdout, "people get words, not Python's values"
    picture = shown.stdout.partition("orders per hour")[2].splitlines()
    assert all("█" in row for row in picture[1:6]), "it ends with a picture"
    assert picture[-1].split("└")[1].strip() == "2026-11-13"
    done = run(tmp_path, "demo", "--clean", "--no-spark", "--json")
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    by_name = {step.get("step"): step for step in steps}
    assert by_name["members"]["left"] == 0
    assert by_name["archive"]["events"] == 100_001
    assert sum(step["events"] for step in steps if step.get("step") == "query") == 100_001


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from tidelog.cli.main import run; run()' "
        "demo --clean --no-spark | head -c 1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["topic", "list"], ["topic", "list", "--json"], ["--help"]], ids=" ".join
)
def test_a_full_disk_is_one_line_and_exit_code_1(tmp_path: Path, words: list[str]) -> None:
    run(tmp_path, "topic", "create", "t")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*TIDELOG, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_lost_at_the_last_flush_is_a_failure(tmp_path: Path) -> None:
    program = (
        "import sys, tidelog.cli.main as m\n"
        "m.main = lambda: sys.stdout.write('not flushed')\n"
        "m.run()"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=full,
            check=False,
        )
    assert done.returncode == 1
