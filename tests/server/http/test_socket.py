"""A unix socket for a proxy: who may connect, what is left of it, and that it is never open."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import serving
from tidelog import Home, InvalidError, UnavailableError
from tidelog.server.options import ServeOptions
from tidelog.server.run import _bound


def test_a_server_on_a_unix_socket_serves_its_proxy(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    made: list[str] = []

    def first(home: Home) -> None:
        made.append(home.tokens.create(["append", "read"])[1])

    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # as a process that was killed leaves it
    with serving(tmp_path, socket=str(path), first=first) as served:
        assert served.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        shown = {"authorization": f"Bearer {made[0]}", "x-forwarded-for": "9.9.9.9"}
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://log.example") as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/topics").status_code == 401
            assert client.get("/topics", headers=shown).status_code == 200
            sent = client.post("/topics/t/events", content=b"x", headers=shown)
            assert sent.status_code == 201
        assert served.values() == [b"x"]
        with (
            pytest.raises(UnavailableError, match="another process listens"),
            serving(tmp_path / "b", home=served.home, socket=str(path)),
        ):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_socket_of_a_later_process_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"

    def first(home: Home) -> None:
        home.tokens.create(["read"])

    with serving(tmp_path, socket=str(path), first=first), socket.socket(socket.AF_UNIX) as later:
        os.unlink(path)
        later.bind(str(path))
    assert path.exists()


def test_a_unix_socket_is_never_open_and_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with pytest.raises(InvalidError, match="token create"), serving(tmp_path, socket=str(path)):
        pass
    assert not path.exists()
    path.write_text("kept")
    with (
        pytest.raises(
            InvalidError, match=r"^serve: socket `[^`]*`: is a file, not a socket: choose"
        ),
        serving(tmp_path / "b", socket=str(path)),
    ):
        pass
    assert path.read_text() == "kept"
    for wrong in (tmp_path / "none" / "s.sock", "x" * 300, "a\0b"):
        with (
            pytest.raises(InvalidError, match="choose another path"),
            serving(tmp_path / str(len(str(wrong))), socket=str(wrong)),
        ):
            pass


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(InvalidError, match="--socket"):
        ServeOptions(socket="")
    with pytest.raises(InvalidError, match="--socket"):
        ServeOptions(socket="s", tls_cert="c", tls_key="k")
    assert ServeOptions(socket="s").behind_proxy
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidError, match="rate"):
            ServeOptions(rate=rate)


def test_one_of_several_servers_that_start_at_once_gets_the_socket(tmp_path: Path) -> None:
    """Also from its first moment on, when it does not accept yet."""
    path = str(tmp_path / "s.sock")
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)  # as a process that was killed leaves it
        ready, tried = threading.Barrier(4), threading.Barrier(4)

        def start(ready: threading.Barrier, tried: threading.Barrier) -> bool:
            ready.wait(60)
            try:
                with _bound(ServeOptions(socket=path)) as listener:
                    tried.wait(60)
                    return listener.getsockname() == path
            except UnavailableError:
                tried.wait(60)
                return False

        with ThreadPoolExecutor(4) as pool:
            began = [pool.submit(start, ready, tried) for _ in range(4)]
            assert sorted(each.result() for each in began) == [False, False, False, True]
        assert not os.path.exists(path)


def test_an_address_of_a_server_that_starts_is_in_use() -> None:
    with _bound(ServeOptions(port=0)) as first:
        options = ServeOptions(port=first.getsockname()[1])
        with pytest.raises(UnavailableError, match="choose another --port"), _bound(options):
            pass
