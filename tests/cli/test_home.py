"""``init``, ``home`` and ``demo`` as a person runs them: bad input above all, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_run import TIDELOG, Run, finish, start


def test_init_is_idempotent_and_home_shows_the_same(tidelog: Run) -> None:
    made, again, home = (
        tidelog(*args, "--json").rows()[0] for args in (["init"], ["init"], ["home"])
    )
    assert (made.pop("new"), again.pop("new")) == (True, False)
    assert made == again == home
    assert home["config"].startswith("tidelog:?store=file:///")
    assert b"Created a new home" in tidelog("--home", "other", "init").out
    assert b"already exists" in tidelog("--home", "other", "init").out


def test_home_by_config_string_by_variable_and_saved(
    tidelog: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [made] = tidelog("init", "--store", "o", "--catalog", "c.sqlite", "--save", "--json").rows()

    def shown(*args: str) -> str:
        [home] = tidelog(*args, "home", "--json").rows()
        return str(home["id"])

    assert shown() == made["id"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(elsewhere)
        assert shown("--home", made["config"]) == made["id"]
        for given in (made["config"], str(tmp_path)):
            patch.setenv("TIDELOG_HOME", given)
            assert shown() == made["id"]
    twice = tidelog("init", "--store", "o", "--catalog", "c.sqlite", "--save")
    assert (twice.code, "exists already" in twice.err) == (1, True)


def test_the_default_home_is_made_on_first_use(tidelog: Run, tmp_path: Path) -> None:
    assert tidelog("home").code == 0
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
    "a bad setting beside addresses": (
        ["init", "--store", "o", "--catalog", "c.sqlite"],
        {"TIDELOG_RETRY_ATTEMPTS": "0"},
        2,
        "give 1 or more",
    ),
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
def test_bad_input_gets_one_line_an_exit_code_and_leaves_nothing(
    tidelog: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    args, environ, code, message = BAD[case]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = tidelog(*args)
    assert done.code == code, done.err
    assert message in done.err
    assert "hunter2" not in done.err + done.out.decode()
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    as_json = tidelog(*args, "--json")
    assert as_json.code == code
    assert json.loads(as_json.err)["error"]["message"]


def test_wrong_usage_is_told_by_the_command_itself(tidelog: Run) -> None:
    done = tidelog("init", "--catlog", "x")
    assert done.code == 2
    assert done.err.startswith("error: No such option '--catlog'")
    assert "--catalog" in done.err
    assert len(done.err.splitlines()) == 1
    as_json = json.loads(tidelog("consume", "t", "--json").err)["error"]
    assert as_json["kind"] == "invalid"
    assert "'--name': see `tidelog consume --help`" in as_json["message"]
    assert "Usage:" in tidelog("topic").err, "a group alone shows its help"
    assert tidelog("nonsense").code == 2
    assert tidelog("--version").out.startswith(b"tidelog, version ")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--version"], 0, "tidelog, version "),
        (["--home", "gone", "topic", "list"], 1, "error: "),
        (["nonsense"], 2, "error: "),
    ],
)
def test_process_exits_with_the_code_of_its_command(
    tmp_path: Path, args: list[str], code: int, said: str
) -> None:
    done = finish(start(*args, cwd=tmp_path))
    assert (done.code, (done.out.decode() + done.err)[: len(said)]) == (code, said)


def test_the_demo_shows_real_work_and_ends(tmp_path: Path) -> None:
    done = finish(start("demo", "--clean", cwd=tmp_path))
    shown = done.out.decode()
    assert done.code == 0, done.err
    assert "the counts match" in shown
    assert "{" not in shown, "people get words, not Python's values"
    picture = shown.partition("orders per hour")[2].splitlines()
    assert all("█" in row for row in picture[1:6]), "it ends with a picture"
    assert picture[-1].split("└")[1].strip() == "2026-11-13"


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
def test_a_full_disk_is_one_line_and_exit_code_1(
    tidelog: Run, tmp_path: Path, words: list[str]
) -> None:
    tidelog("topic", "create", "t")
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
