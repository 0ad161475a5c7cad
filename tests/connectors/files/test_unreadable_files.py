"""A file that cannot be read stops only its own source partition, and says why."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_run import Run, run_here
from tidelog.connectors.by_url import open_source
from tidelog.connectors.source import SourcePartition, SourceRange, bounds_apart
from tidelog.errors import InvalidError, TidelogError

LONG = b"/".join([b"d" * 200] * 5)
NAMES = [
    (b"b\xffd.txt", "b%FFd.txt", "is not UTF-8"),
    (b"b%FFd\xff.txt", "b%25FFd%FF.txt", "is not UTF-8"),
    (b"d\xe9\xe9/x.txt", "d%E9%E9%2Fx.txt", "is not UTF-8"),
    (b"two\nlines.txt", "two%0Alines.txt", "has a control character"),
    (b"l" * 241, "l" * 241, "has 241 bytes (limit 240): rename it"),
    (LONG + b"/x.txt", LONG.decode().replace("/", "%2F") + "%2Fx.txt", "nearer to it"),
]


@pytest.fixture
def tidelog(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Run:
    return run_here(monkeypatch, capfdbinary, tmp_path)


def put(folder: Path, name: bytes, data: bytes) -> bytes:
    path = os.fsencode(folder) + b"/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


def looked_at(folder: Path) -> tuple[dict[str, str], dict[str, TidelogError]]:
    """The end of each source partition, or its error."""
    source = open_source(f"file:{folder}", environ={})
    errors: dict[SourcePartition, TidelogError] = {}
    found = bounds_apart(source, source.partitions(), errors)
    for each, error in errors.items():
        with pytest.raises(type(error)):
            list(source.read(SourceRange(each, "0", "1")))
    return (
        {each.text: bounds.end for each, bounds in found.items()},
        {each.text: error for each, error in errors.items()},
    )


@pytest.mark.parametrize(
    ("name", "partition", "reason"),
    NAMES,
    ids=["byte", "escape", "folder", "control", "long", "deep"],
)
def test_a_name_that_no_key_can_be_stops_only_its_file(
    tmp_path: Path, name: bytes, partition: str, reason: str
) -> None:
    put(tmp_path / "in", b"good.txt", b"1\n2\n")
    put(tmp_path / "in", name, b"3\n")
    ends, errors = looked_at(tmp_path / "in")
    assert ends == {"in/good.txt": "2"}
    assert list(errors) == [f"in/{partition}"]
    message = str(errors[f"in/{partition}"])
    assert reason in message
    assert "decode" not in message
    message.encode()
    assert message.isprintable()


def test_hidden_names_are_not_looked_at(tmp_path: Path) -> None:
    put(tmp_path / "in", b"good.txt", b"1\n")
    put(tmp_path / "in", b"_\xff", b"")
    put(tmp_path / "in", b".\xff/x", b"")
    assert looked_at(tmp_path / "in") == ({"in/good.txt": "1"}, {})


def test_a_file_of_an_archive_that_cannot_be_read_stops_its_source_partition(
    tmp_path: Path,
) -> None:
    """Else its offsets would be passed as if they had no events."""
    value = b'{"offset":0,"value":"x"}\n'
    put(tmp_path / "in", b"t/dt=a/1_0_00000000000000000001.jsonl", value)
    put(tmp_path / "in", b"t/dt=\xff/1_0_00000000000000000000.jsonl", value)
    put(tmp_path / "in", b"\xff/dt=a/1_0_00000000000000000000.jsonl", value)
    put(tmp_path / "in", b"good.txt", b"1\n")
    ends, errors = looked_at(tmp_path / "in")
    assert ends == {"in/good.txt": "1"}
    assert sorted(errors) == ["in/%FF%2Fdt=a%2F1_0_00000000000000000000.jsonl", "t/0"]
    assert "dt=%FF/1_0_" in str(errors["t/0"])


def test_links_in_a_circle_stop_only_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    put(folder, b"good.txt", b"1\n")
    put(folder, b"sub/x.txt", b"2\n")
    put(tmp_path, b"elsewhere/y.txt", b"3\n")
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "sub" / "root").symlink_to("/")
    (folder / "other").symlink_to(tmp_path / "elsewhere")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    ends, errors = looked_at(folder)
    assert ends == {"in/good.txt": "1", "in/other%2Fy.txt": "1", "in/sub%2Fx.txt": "1"}
    assert sorted(errors) == ["in/one", "in/sub%2Froot", "in/sub%2Fup", "in/two"]
    for error in errors.values():
        assert isinstance(error, InvalidError)
        assert "is a symbolic link that leads back to itself" in str(error)
        assert "decode" not in str(error)


def test_a_rotated_name_that_cannot_be_read_stops_only_itself(tmp_path: Path) -> None:
    """Files are compared with those that they may be rotations of."""
    folder = tmp_path / "in"
    put(folder, b"app.log", b"1\n")
    (folder / "app.log.1").symlink_to(folder / "app.log.1")
    ends, errors = looked_at(folder)
    assert ends == {"in/app.log": "1"}
    assert list(errors) == ["in/app.log.1"]


def test_archive_continues_beside_a_bad_name_and_its_status_shows_it(
    tidelog: Run, tmp_path: Path
) -> None:
    bad = put(tmp_path / "in", b"b\xffd.txt", b"bad\n")
    put(tmp_path / "in", b"good.txt", b"1\n")
    assert tidelog("init").code == 0
    assert tidelog("archive", "create", "a", "--source", f"file:{tmp_path}/in").code == 0
    ran = tidelog("archive", "run", "a", "--no-spark")
    assert ran.code != 0
    assert "file `in/b%FFd.txt`: its name is not UTF-8" in ran.err
    assert "Traceback" not in ran.err
    put(tmp_path / "in", b"good.txt", b"1\n2\n")
    assert tidelog("archive", "run", "a", "--no-spark").code != 0
    status = tidelog("archive", "status", "a")
    shown = status.out.decode() + status.err
    assert "in/b%FFd.txt: has failed since" in shown
    assert "a: 2 events read, " in shown
    assert "Generation 1: 2 files" in shown

    os.rename(bad, os.fsencode(tmp_path / "in" / "b-d.txt"))
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    shown = tidelog("archive", "status", "a").out.decode()
    assert "a: 3 events read, " in shown
    assert "3 files written so far" in shown


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, bool], None]:
    """Take the right to read a folder, or give it back, also for a user that has all rights."""
    denied: set[str] = set()
    scan = os.scandir

    def scandir(path: Path) -> Any:
        if str(path) in denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)

    def change(folder: Path, is_denied: bool) -> None:
        (denied.add if is_denied else denied.discard)(str(folder))

    return change


def test_a_folder_without_rights_stops_only_its_files(
    tidelog: Run, tmp_path: Path, deny: Callable[[Path, bool], None]
) -> None:
    folder = tmp_path / "in"
    put(folder, b"good.txt", b"1\n")
    put(folder, b"sub/x.txt", b"2\n")
    put(folder, b"sub0", b"3\n")
    assert tidelog("init").code == 0
    assert tidelog("archive", "create", "a", "--source", f"file:{folder}").code == 0
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    deny(folder / "sub", True)
    ends, errors = looked_at(folder)
    assert ends == {"in/good.txt": "1", "in/sub0": "1"}
    assert list(errors) == ["in/sub"]
    put(folder, b"sub/x.txt", b"2\n4\n")
    put(folder, b"sub/new.txt", b"5\n")
    put(folder, b"good.txt", b"1\n6\n")
    ran = tidelog("archive", "run", "a", "--no-spark")
    assert ran.code != 0
    assert "folder `in/sub`: no permission to read what is in it: change its rights" in ran.err
    status = tidelog("archive", "status", "a")
    shown = status.out.decode() + status.err
    assert "in/sub%2Fx.txt: has failed since" in shown
    assert "in/sub: has failed since" in shown
    assert "a: 4 events" in shown, "the others go on"
    assert tidelog("archive", "run", "a", "--no-spark", "--accept-loss").code != 0, "no loss"
    deny(folder / "sub", False)
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    status = tidelog("archive", "status", "a")
    shown = status.out.decode() + status.err
    assert "has failed since" not in shown
    assert "a: 6 events" in shown


def test_folder_of_an_archive_without_rights_stops_its_topic(
    tmp_path: Path, deny: Callable[[Path, bool], None]
) -> None:
    """Else offsets that are in the folder would be passed as if they had no events."""
    value = (
        b'{"topic":"t","partition":0,"offset":%d,"timestamp":"2026-01-01T00:00:00Z","id":null,'
        b'"key":null,"value":"x","type":null,"headers":[]}\n'
    )
    put(tmp_path / "in", b"t/dt=a/1_0_00000000000000000001.jsonl", value % 1)
    put(tmp_path / "in", b"t/dt=b/1_0_00000000000000000000.jsonl", value % 0)
    put(tmp_path / "in", b"u/dt=a/1_0_00000000000000000000.jsonl", value % 0)
    put(tmp_path / "in", b"_hidden/x", b"")
    deny(tmp_path / "in" / "t" / "dt=b", True)
    deny(tmp_path / "in" / "_hidden", True)
    ends, errors = looked_at(tmp_path / "in")
    assert ends == {"u/0": "1"}
    assert sorted(errors) == ["in/t%2Fdt=b", "t/0"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user that can drop its rights")
def test_a_user_without_rights_reads_what_it_may(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    put(folder, b"good.txt", b"1\n")
    for name, mode in (("none", 0o000), ("list", 0o744)):
        put(folder, name.encode() + b"/x.txt", b"2\n")
        (folder / name).chmod(mode)
    for each in (folder, *folder.parents):
        if str(each) not in ("/", "/tmp"):
            each.chmod(0o755)
    found: list[str] = []
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            ends, errors = looked_at(folder)
            os.write(write, f"{ends} {sorted(errors)}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        found.append(answer.read())
    assert found == ["{'in/good.txt': '1'} ['in/list', 'in/none']"]
