"""Damage of large new values, and of cut objects, is an error for every reader and for verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tidelog
from tidelog import Event, Home
from tidelog.errors import CorruptError
from tidelog.home import create_home

BIG = bytes(range(256)) * 100  # too large for a row


def _object(folder: Path, kind: str) -> Path:
    (found,) = (each for each in folder.rglob("*") if each.is_file() and f"/{kind}/" in str(each))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home, _ = create_home(tmp_path / "home")
    with home:
        home.create_topic("t")
        home.append("t", [Event(b"a", id="a", key=b"k"), Event(b"b", id="b", key=b"k")])
        home.update("t", "b", BIG)
    return tmp_path / "home"


def _flip(data: bytes) -> bytes:
    return data[:1000] + bytes([data[1000] ^ 4]) + data[1001:]


READERS: dict[str, Callable[[Home], object]] = {
    "read": lambda home: list(home.read("t")),
    "playback": lambda home: list(home.playback("t", "earliest", "latest")),
    "get": lambda home: home.get("t", "b"),
    "consumer": lambda home: home.consumer("t", "c").poll(),
    "sql": lambda home: home.sql("select * from t").read_all(),
    "compile": lambda home: home.compile("t"),
}


@pytest.mark.parametrize(
    "change", [_flip, lambda data: data[:-1], lambda _: b""], ids=["flip", "cut", "empty"]
)
@pytest.mark.parametrize("reader", READERS)
def test_damaged_new_value_is_never_read(
    folder: Path, reader: str, change: Callable[[bytes], bytes]
) -> None:
    path = _object(folder, "amendments")
    assert path.read_bytes() == BIG
    path.chmod(0o600)
    path.write_bytes(change(BIG))
    with tidelog.open(folder) as home:
        with pytest.raises(CorruptError, match=path.name):
            READERS[reader](home)
        (error,) = (each for each in home.verify("t").findings if each.severity == "error")
        assert path.name in error.what
        assert "checksum" in error.what
    path.write_bytes(BIG)  # from a copy
    with tidelog.open(folder) as home:
        assert [event.value for event in home.read("t")] == [b"a", BIG]
        assert not home.verify("t").errors


@pytest.mark.parametrize("size", [0, 8, 400])
def test_lookup_in_a_cut_object_reports_damage(folder: Path, size: int) -> None:
    path = _object(folder, "segments")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:size])
    with tidelog.open(folder) as home:
        for look in (
            lambda: home.get("t", "a"),
            lambda: home.delete("t", ["a"]),
            lambda: home.update("t", "a", b"new"),
            lambda: home.append("t", [Event(b"c", id="c")], if_absent=True),
        ):
            with pytest.raises(CorruptError):
                look()
        assert home.verify("t").errors
