"""A missing or too old program is told in one line, by server and by the command line."""

from pathlib import Path

import pytest

from tests.servers import __main__ as command_line
from tests.servers.tools import GO, JAVA, MAVEN, MissingToolError, require


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def test_a_missing_tool_is_told_with_its_server_and_remedy(programs: Path) -> None:
    with pytest.raises(MissingToolError) as raised:
        require("kafka", (MAVEN,))
    assert str(raised.value) == "kafka: `mvn` is not on PATH: install Maven 3.8 or later"


def test_an_old_java_is_told_with_its_version(programs: Path) -> None:
    _program(programs / "java", "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2")
    with pytest.raises(MissingToolError) as raised:
        require("kafka", (JAVA,))
    assert str(raised.value) == (
        "kafka: `java` is of Java 11, 17 is needed: install a JDK 17 or later"
    )


def test_java_home_comes_before_path(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(programs / "java", "echo 'openjdk version \"11.0.2\"' >&2")
    home = programs / "jdk"
    (home / "bin").mkdir(parents=True)
    _program(home / "bin" / "java", "echo 'openjdk version \"21\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    require("kafka", (JAVA,))


def test_check_prints_a_line_for_each_missing_tool(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _program(programs / "java", "echo 'openjdk version \"17.0.15\"' >&2")
    _program(programs / "javac", "")
    _program(programs / "go", "")
    assert command_line.main(["check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "`mvn` is not on PATH: install Maven 3.8 or later (for kafka, dynamodb, cassandra)"
    ]
    _program(programs / "mvn", "")
    assert command_line.main(["check"]) == 0
    assert capsys.readouterr().out == ""


def test_fetch_says_in_one_line_why_it_cannot(
    programs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELOGTEST_CACHE", str(programs / "cache"))
    assert command_line.main(["fetch", "s3"]) == 1
    assert capsys.readouterr().err == f"s3: `go` is not on PATH: {GO.remedy}\n"


def test_an_unknown_server_is_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["run", "kafak"]) == 1
    assert capsys.readouterr().err == (
        "kafak: there is no such server: "
        "choose one of kafka, dynamodb, cassandra, s3, moto, spark\n"
    )


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
