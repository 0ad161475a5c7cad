"""Arguments that no command can take end in one line, never in a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.all_times import ALL_TIMES_OPTIONS
from tests.support.cli_run import Run
from tidelog.cli.main import cli

BAD = os.fsdecode(b"x\xff")
PATHS = {"file", "files", "ids_file"}


def parameters(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The beginning of a call for each parameter, which ends with a value that is not UTF-8."""
    before: list[str] = []
    for param in command.params:
        is_path = isinstance(param.type, click.Path) or param.name in PATHS
        if isinstance(param, click.Option):
            if not (param.is_flag or param.count or is_path):
                yield (*path, param.opts[0], *["x"] * (param.nargs - 1), BAD)
            continue
        if not is_path:
            yield (*path, *before, BAD)
        before.append("x")
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from parameters(below, (*path, name))


@pytest.mark.parametrize("args", list(parameters()), ids=ascii)
def test_argument_that_is_not_utf8_is_refused(tidelog: Run, args: tuple[str, ...]) -> None:
    done = tidelog(*args)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: Invalid value for")
    if "is not UTF-8: give text" not in line:  # of a number or a choice
        assert "x\\udcff" in line


def test_every_kind_of_parameter_is_tried() -> None:
    found = list(parameters())
    assert len(found) > 150
    for wanted in (
        ("audit", "--id", BAD),
        ("archive", "create", "--source", BAD),
        ("archive", "create", "--date-format", BAD),
        ("archive", "backfill", "--from", BAD),
        ("pump", BAD),
        ("--home", BAD),
    ):
        assert wanted in found


def test_file_with_a_name_that_is_not_utf8_is_read(tidelog: Run, tmp_path: Path) -> None:
    (tmp_path / BAD).write_bytes(b"1\n2\n")
    assert tidelog("topic", "create", "t").code == 0
    assert tidelog("produce", "t", str(tmp_path / BAD)).code == 0
    assert tidelog("playback", "t", *ALL_TIMES_OPTIONS).out == b"1\n2\n"
    (tmp_path / f"{BAD}.ids").write_bytes(b"a\n")
    done = tidelog("delete", "t", "--ids-file", str(tmp_path / f"{BAD}.ids"), "--reason", "x")
    assert len(done.err.splitlines()) <= 1


@pytest.mark.parametrize("name", ["nope/x.prom", "file/x.prom"])
def test_metrics_file_that_cannot_be_written_is_refused_before_work(
    tidelog: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert tidelog("topic", "create", "t").code == 0
    assert tidelog("archive", "create", "a", "--source", "topic:t").code == 0
    for command in (("archive", "run", "a", "--no-spark"), ("scribe", "--once")):
        done = tidelog(*command, "--metrics-file", str(tmp_path / name))
        assert done.code == 2
        (line,) = done.err.splitlines()
        assert line == f"error: metrics file `{tmp_path / name}`: its folder is not there: make it"


def test_folder_that_is_the_metrics_file_is_an_error_of_one_line(
    tidelog: Run, tmp_path: Path
) -> None:
    (tmp_path / "x.prom").mkdir()
    assert tidelog("topic", "create", "t").code == 0
    done = tidelog("scribe", "--once", "--metrics-file", str(tmp_path / "x.prom"))
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
