"""A running ``tidelog up`` as tests see it: its JSON lines, its parts, its end; and its home."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tests.servers.base import free_port
from tests.support.cli_run import TIDELOG
from tidelog import Home
from tidelog.archive.archive import committed_files, find_archive
from tidelog.cli.main import cli

Record = dict[str, Any]
SECONDS_MAX = 90


class Up:
    """One process, and what it has told so far."""

    def __init__(self, home: Path, *args: str) -> None:
        # A port of our own: one that the system gives may be another's while a part is down.
        port = str(free_port())
        self.process = subprocess.Popen(
            # Without Spark: one of its sessions takes longer to start than most tests.
            [*TIDELOG, "--home", str(home), "up", "--port", port, "--no-spark", "--json", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=home.parent,
        )
        self.records: list[Record] = []
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._hear)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.records.append(json.loads(line))

    def _hear(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.errors.append(line.decode())

    def wait(self, wanted: Callable[[Record], bool], seconds: float = 90) -> Record:
        """The first record that fits, also one that has come already."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for record in list(self.records):
                if wanted(record):
                    return record
            assert self.process.poll() is None, "".join(self.errors)
            time.sleep(0.05)
        raise AssertionError(f"not told in {seconds} s: {self.records[-5:]} {self.errors}")

    def part(self, name: str, state: str = "running", **fields: Any) -> Record:
        """Wait until a part is in a state, with other fields as given."""

        def fits(record: Record) -> bool:
            said = (record.get("part"), record.get("state"))
            return said == (name, state) and all(record[key] == fields[key] for key in fields)

        return self.wait(fits)

    @property
    def url(self) -> str:
        """Where the console is."""
        return str(self.wait(lambda record: "console" in record)["console"]).rstrip("/")

    def pids(self) -> list[int]:
        """Of the programs that run."""
        newest = {r["part"]: r["pid"] for r in list(self.records) if "part" in r and r["pid"]}
        return list(newest.values())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        code = self.process.wait(90)
        for reader in self._readers:
            reader.join()
        return code


@contextlib.contextmanager
def upped(home: Path, *args: str) -> Iterator[Up]:
    """A process that is stopped in the end, if it still runs."""
    up = Up(home, *args)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGKILL)


def post(url: str, topic: str, value: str) -> None:
    """Append one event over HTTP; returns when it is durable."""
    request = urllib.request.Request(
        f"{url}/topics/{topic}/events",
        data=json.dumps({"value": value}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status < 300


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def tidelog(place: Path, *args: str) -> None:
    """A command on a home, which must succeed."""
    done = CliRunner().invoke(cli, ["--home", str(place), *args])
    assert done.exit_code == 0, (done.output, done.exception)


def archived(home: Home, name: str) -> int:
    """How many events an archive has."""
    found = find_archive(home.context, name)
    return sum(
        file.events for _, file in committed_files(home.context, found) if file.kind == "data"
    )


def eventually(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
