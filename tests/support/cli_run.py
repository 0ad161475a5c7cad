"""The command line as tests run it: in this process where that will do, and in one of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tidelog.cli.main import main

TIDELOG = [sys.executable, "-c", "from tidelog.cli.main import run; run()"]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: bytes
    err: str

    def rows(self) -> list[dict[str, Any]]:
        """What it printed as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]


def run_here(
    monkeypatch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[bytes], folder: Path
) -> Run:
    """Runs ``main`` in this process, with ``folder`` as the current one."""
    monkeypatch.chdir(folder)

    def run(*args: str, stdin: bytes = b"", terminal: bool = False) -> Done:
        monkeypatch.setattr(sys, "argv", ["tidelog", *args])
        monkeypatch.setattr(sys, "stdin", _Stdin(stdin, terminal))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        captured.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        out, err = captured.readouterr()
        return Done(int(code), out, err.decode())

    return run


class _Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def start(*args: str, **more: Any) -> subprocess.Popen[bytes]:
    """A process of its own; what it says is read by the test."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*TIDELOG, *args], **{**piped, **more})


def finish(process: subprocess.Popen[bytes]) -> Done:
    """Wait for its end."""
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err.decode())
