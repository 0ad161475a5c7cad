"""What the tests of playback share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_run import Run, run_here


@pytest.fixture
def tidelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Run:
    """Runs a command in this process, in a folder of its own."""
    return run_here(monkeypatch, capsysbinary, tmp_path)
