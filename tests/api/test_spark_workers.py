"""Spark where it is missing: one line that says what to do, or work without it, with a notice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.archive_look import a_home, an_archive
from tidelog import Event, Home
from tidelog.api.spark_workers import LateWorkers, missing_for_spark, open_session, open_workers
from tidelog.cli.main import cli
from tidelog.errors import InvalidError, UnavailableError
from tidelog.spark.failures import start_error


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def archived(home: Home, *options: str) -> Any:
    an_archive(home)
    home.append("t", [Event(b"one")])
    words = ["--home", home.config, "archive", "run", "daily", *options]
    return CliRunner().invoke(cli, words)


def test_java_is_found_by_its_home_or_the_path(tmp_path: Path) -> None:
    assert "install Java 17" in missing_for_spark({"PATH": str(tmp_path)})
    assert missing_for_spark({"SPARK_HOME": "/opt/spark"}) == "", "it may have a Java of its own"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(0o755)
    assert missing_for_spark({"JAVA_HOME": str(tmp_path)}) == ""
    assert missing_for_spark({"PATH": str(tmp_path / "bin")}) == ""


@pytest.mark.usefixtures("no_java")
def test_without_java_a_run_works_without_spark_unless_it_names_a_master(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        home.create_topic("t")
        done = archived(home)
        assert done.exit_code == 0
        assert done.stderr.startswith("Running without Spark: Java is not installed: ")
        assert home.archives.get("daily").status().partitions[0].events == 1
        words = ["--home", home.config, "archive", "run", "daily"]
        refused = CliRunner().invoke(cli, [*words, "--master", "local[2]"])
        assert refused.exit_code == 1
        assert "Java is not installed: install Java 17" in str(refused.exception)
        assert "Running without Spark" not in CliRunner().invoke(cli, [*words, "--no-spark"]).stderr
        both = CliRunner().invoke(cli, [*words, "--no-spark", "--master", "local[2]"])
        assert "give one of them" in str(both.exception)


@pytest.mark.usefixtures("no_java")
def test_library_says_in_one_line_what_spark_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="Spark: Java is not installed") as caught:
        open_workers("x", "local[2]")
    assert "\n" not in str(caught.value)
    with a_home(tmp_path) as home:
        home.create_topic("t")
        home.append("t", [Event(b"one")])
        with pytest.raises(InvalidError, match="Java is not installed"):
            home.verify("t", spark="local[2]")


def test_workers_that_are_opened_late_are_opened_once() -> None:
    opened: list[Any] = []

    class Workers:
        parallelism, waves = 7, 3

        def run(self, tasks: Any) -> Any:
            return iter(tasks)

    def open_one() -> Any:
        opened.append(None)
        if len(opened) == 1:
            raise UnavailableError("no memory")
        return Workers()

    late = LateWorkers(open_one)
    assert not opened
    with pytest.raises(UnavailableError, match="no memory"):
        late.run([])
    threads = [threading.Thread(target=lambda: late.parallelism) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (late.parallelism, late.waves) == (7, 3)
    assert len(opened) == 2


def test_unknown_master_is_refused_before_java_starts() -> None:
    with pytest.raises(InvalidError, match=r"master `locl`: is unknown: give local\[\*\]"):
        open_session("locl", "daily")


def test_session_that_cannot_start_is_reported_by_its_cause() -> None:
    class JavaError(Exception):
        java_exception = "org.apache.spark.SparkException: Could not parse Master URL: 'local[x]'"

    wrong = start_error(JavaError("An error occurred while calling None.org.apache\nat x"))
    assert isinstance(wrong, InvalidError)
    assert str(wrong).startswith("Spark: could not be started (Could not parse Master URL: 'local")
    other = start_error(RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited\nmore"))
    assert isinstance(other, UnavailableError)
    assert "([JAVA_GATEWAY_EXITED] Java gateway process exited): check" in str(other)
