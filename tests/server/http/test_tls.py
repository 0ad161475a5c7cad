"""HTTPS by certificate files, which change while the server runs."""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import Certificates, make_certificates
from tests.support.serving import serving
from tidelog import InvalidError


def certificate_of(address: tuple[str, int], known: Certificates) -> bytes | None:
    context = ssl.create_default_context(cafile=str(known.authority))
    with (
        socket.create_connection(address, timeout=30) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


def test_files_that_change_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.server.app.REFRESH_S", 0.1)
    folders = [tmp_path / name for name in ("a", "b", "used", "home")]
    for folder in folders:
        folder.mkdir()
    first, second = make_certificates(folders[0]), make_certificates(folders[1])
    cert, key = folders[2] / "cert.pem", folders[2] / "key.pem"
    shutil.copy(first.certificate, cert)
    shutil.copy(first.key, key)
    with serving(folders[3], tls_cert=str(cert), tls_key=str(key)) as served:
        assert served.url.startswith("https://")
        port = int(served.url.rpartition(":")[2])
        trusted = ssl.create_default_context(cafile=str(first.authority))
        with httpx.Client(base_url=served.url, verify=trusted, timeout=60) as client:
            assert client.post("/topics/t/events", json={"value": "x"}).status_code == 201
        before = certificate_of(("127.0.0.1", port), first)
        shutil.copy(second.certificate, cert)  # does not fit the key: the old one stays
        time.sleep(2.5)
        assert certificate_of(("127.0.0.1", port), first) == before
        shutil.copy(second.key, key)
        until = time.monotonic() + 60
        while True:
            try:
                assert certificate_of(("127.0.0.1", port), second) != before
                break
            except ssl.SSLError:
                assert time.monotonic() < until
                time.sleep(0.2)
        with pytest.raises((OSError, httpx.TransportError)):
            httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10)


def test_files_that_are_missing_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidError, match="certificate"),
        serving(tmp_path, tls_cert=str(tmp_path / "none"), tls_key=str(tmp_path / "none")),
    ):
        pass
    with pytest.raises(InvalidError, match="both"), serving(tmp_path / "b", tls_cert="x"):
        pass
