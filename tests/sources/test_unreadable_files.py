"""A file that cannot be read stops only its own source partition, and says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import Run, run_here
from tidelog.errors import InvalidError, TidelogError
from tidelog.sources import Range, SourcePartition, open_source
from tidelog.sources.base import bounds_apart

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
            list(source.read(Range(each, "0", "1")))
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
    assert "in/b%FFd.txt: fails since" in shown
    assert "a: generation 1, 2 events in 2 files" in shown

    os.rename(bad, os.fsencode(tmp_path / "in" / "b-d.txt"))
    assert tidelog("archive", "run", "a", "--no-spark").code == 0
    assert "3 events in 3 files" in tidelog("archive", "status", "a").out.decode() + status.err
