"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_run import Run, run_here
from tidelog import Home
from tidelog.home import create_home, open_home
from tidelog.settings import load_settings


@pytest.fixture
def tidelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Run:
    """Runs a command in this process, in a folder of its own."""
    return run_here(monkeypatch, capsysbinary, tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A home that nobody has open."""
    folder = tmp_path / "home"
    create_home(load_settings(str(folder), {}, tmp_path))[0].close()
    return folder


@pytest.fixture
def home(place: Path) -> Iterator[Home]:
    """The home of ``place``, open."""
    with open_home(place) as opened:
        yield opened
