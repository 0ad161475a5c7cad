"""SQLite's own corners: many processes, kills, locks, forks, file systems."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import a_catalog
from tidelog.catalog import sqlite as sqlite_module
from tidelog.catalog import sqlite_connections
from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import InvalidError, NotFoundError, UnavailableError, UnknownOutcomeError


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path}/catalog.sqlite"
    a_catalog(url, create=True).close()
    return url


def test_the_file_survives_power_cuts(url: str) -> None:
    catalog = a_catalog(url)
    with catalog._connections.use() as connection:  # type: ignore[attr-defined]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    catalog.close()


def test_a_missing_file_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"tidelog init` \(`tidelog.create_home` in Python\)"):
        a_catalog(f"sqlite://{tmp_path}/gone.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_locked_file_is_unavailable_after_the_time_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "_BUSY_MS", 50)
    catalog = a_catalog(url)
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UnavailableError, match="kept it locked"):
        catalog.write("p", Put("a", b"1"), write_id="w1")
    other.execute("ROLLBACK")
    other.close()
    catalog.write("p", Put("a", b"1"), write_id="w1")
    catalog.close()


_OTHER_PROCESS = """
import sys
from tests.support.homes import a_catalog
from tidelog.catalog.base import Put
catalog = a_catalog(sys.argv[1])
for name in sys.argv[2:]:
    catalog.write("p", Put(name, b""), write_id=name)
print(*(row.row for row in catalog.scan("p")))
catalog.close()
"""


def _in_another_process(url: str, *names: str) -> list[str]:
    """Writes rows, and returns the names of all."""
    command = [sys.executable, "-c", _OTHER_PROCESS, url, *names]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_process_that_lost_its_locks_is_refused_and_undoes_nothing(
    url: str, tmp_path: Path
) -> None:
    catalog = a_catalog(url)
    catalog.write("p", Put("a", b""), write_id="a")
    (tmp_path / "catalog.sqlite").read_bytes()  # closing the file drops this process's locks
    assert _in_another_process(url, "b") == ["a", "b"]
    for _ in range(2):
        with pytest.raises(InvalidError, match="lost its locks"):
            catalog.write("p", Put("c", b""), write_id="c")
        with pytest.raises(InvalidError, match="lost its locks"):
            catalog.get("p", "b")
    catalog.close()
    with pytest.raises(InvalidError, match="lost its locks"):
        a_catalog(url)
    assert _in_another_process(url, "d") == ["a", "b", "d"]


def test_commit_into_a_deleted_log_is_not_acknowledged(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, write = a_catalog(url), sqlite_module._write_once

    def then_delete(*given: Any) -> None:
        write(*given)
        (tmp_path / "catalog.sqlite-wal").unlink()

    monkeypatch.setattr(sqlite_module, "_write_once", then_delete)
    with pytest.raises(UnknownOutcomeError, match="lost its locks"):
        catalog.write("p", Put("a", b""), write_id="a")


def test_full_disk_is_named_and_nothing_is_written(url: str) -> None:
    catalog = a_catalog(url)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    with catalog._connections.use() as connection:  # type: ignore[attr-defined]
        connection.execute("PRAGMA max_page_count = 8")
    with pytest.raises(UnavailableError, match="the disk is full, nothing was written"):
        catalog.write("p", Put("b", bytes(200_000)), write_id="w2")
    assert catalog.get("p", "b") is None
    with catalog._connections.use() as connection:  # type: ignore[attr-defined]
        connection.execute("PRAGMA max_page_count = 100000")
    catalog.write("p", Put("b", bytes(200_000)), write_id="w2")
    catalog.close()


def test_threads_have_connections_of_their_own_and_close_ends_all(url: str) -> None:
    catalog = a_catalog(url)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(catalog.get("p", "a"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert None not in found
    catalog.close()
    catalog.close()
    assert catalog.get("p", "a") is not None  # and opens again when it is used again
    catalog.close()


def test_a_forked_child_works_on_its_own(url: str) -> None:
    catalog = a_catalog(url)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    child = os.fork()
    if child == 0:
        try:
            catalog.write("p", Put("b", b"2", ABSENT), write_id="w2")
        except BaseException:  # noqa: BLE001 - the exit code tells
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert catalog.get("p", "b") is not None
    catalog.close()


WRITER = """
import sys
sys.path.insert(0, {root!r})
from tests.support.homes import a_catalog
from tidelog.catalog.base import Put
catalog = a_catalog(sys.argv[1])
number = 0
while True:
    number += 1
    value = str(number).encode()
    catalog.write("p", *[Put(f"{{sys.argv[2]}}/{{n}}", value) for n in range(5)],
                  write_id=f"{{sys.argv[2]}}-{{number}}")
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.long)])
def test_a_killed_writer_leaves_whole_writes_and_all_that_it_told(url: str, kills: int) -> None:
    root = str(Path(__file__).parents[2])
    catalog = a_catalog(url)
    for attempt in range(kills):
        command = [sys.executable, "-c", WRITER.format(root=root), url, f"w{attempt}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.01 * (attempt % 4))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        told = [int(line) for line in rest.split()]
        values = {int(row.value) for row in catalog.scan("p", f"w{attempt}/", f"w{attempt}0")}
        assert len(values) == 1, "the five rows of a write were torn apart"
        assert values.pop() >= max(told, default=1)
    catalog.close()


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:50 / /srv/shared\\040disk rw,relatime shared:1 - nfs4 server:/x rw\n"
    )
    kind = sqlite_module._file_system
    assert kind(Path("/srv/shared disk/a/b.sqlite"), mounts) == "nfs4"
    assert kind(Path("/srv/other/b.sqlite"), mounts) == "ext4"
    assert kind(Path("/srv/x"), tmp_path / "gone") == ""
    monkeypatch.setattr(sqlite_module, "_file_system", lambda path: kind(path, mounts))
    with pytest.raises(InvalidError, match="network file system"):
        a_catalog("sqlite:///srv/shared%20disk/catalog.sqlite", create=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://host/path", "absolute path"),
        ("sqlite:relative", "absolute path"),
        ("sqlite:///x?mode=ro", "unknown option `mode`"),
        ("sqlit:///x", "did you mean `sqlite`"),
        ("memory:?x=1", "it takes none"),
    ],
)
def test_malformed_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        a_catalog(url)


def test_connection_of_an_ended_thread_waits_for_no_fork(tmp_path: Path) -> None:
    """The garbage collector drops it in any thread, which may hold what the fork waits for."""
    process = sqlite_connections._process
    raw = sqlite3.connect(tmp_path / "c.sqlite", check_same_thread=False)
    held = [sqlite_connections._ThreadConnection(tmp_path / "c.sqlite", raw)]
    collecting = threading.Thread(target=held.clear, daemon=True)
    with process.closing:  # as during a fork
        collecting.start()
        collecting.join(30)
        assert not collecting.is_alive()
        raw.execute("SELECT 1")
    process.close_dropped()
    with pytest.raises(sqlite3.ProgrammingError):
        raw.execute("SELECT 1")
