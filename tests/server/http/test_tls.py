"""HTTPS by certificate files, which change while the server runs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.certificates import Certificates, make_certificates
from tests.support.serving import serving
from tests.support.waiting import until
from tidelog import InvalidError
from tidelog.server.http import limits
from tidelog.server.run import Certificate


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


def test_files_that_change_while_they_are_read_break_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    known, other = make_certificates(tmp_path), make_certificates(tmp_path / "other")
    certificate = Certificate(str(known.certificate), str(known.key))
    load, fitting = ssl.SSLContext.load_cert_chain, known.key.read_bytes()

    def load_and_change(context: ssl.SSLContext, *given: Any, **named: Any) -> None:
        try:
            load(context, *given, **named)
        finally:
            shutil.copy(other.key, known.key)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_change)
    known.key.write_bytes(fitting + b"\n")
    certificate.refresh()
    monkeypatch.undo()
    with pytest.raises(InvalidError, match="fix the files"):
        certificate.refresh()
    shake_hands(certificate.context)


def shake_hands(server: ssl.SSLContext) -> None:
    """Raises ``ssl.SSLError`` if a context has no certificate that it can prove."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert sides[0].getpeercert(binary_form=True)


def test_clients_that_never_end_their_handshake_keep_no_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 40)  # of which an address has 10
    (tmp_path / "home").mkdir()
    known = make_certificates(tmp_path)
    given = {"tls_cert": str(known.certificate), "tls_key": str(known.key)}
    with serving(tmp_path / "home", **given) as served, contextlib.ExitStack() as stack:
        port = int(served.url.rpartition(":")[2])
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(60)
        ]
        trusted = ssl.create_default_context(cafile=str(known.authority))
        other = httpx.HTTPTransport(local_address="127.0.0.2", verify=trusted)
        with httpx.Client(base_url=served.url, transport=other, timeout=60) as client:
            assert client.get("/topics").status_code == 200
        share = 10 + limits.ADDRESS_LINGERING_MAX
        assert [raw.recv(1) for raw in idle[share:]] == [b""] * (60 - share), "closed at once"
        with pytest.raises(OSError, match=r"reset|EOF|closed"):
            certificate_of(("127.0.0.1", port), known)
        for raw in idle:
            raw.close()
        until(lambda: answers(("127.0.0.1", port), known))


def answers(address: tuple[str, int], known: Certificates) -> bool:
    try:
        return certificate_of(address, known) is not None
    except OSError:
        return False


def test_clients_that_end_their_side_print_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = make_certificates(tmp_path)
    given = {"tls_cert": str(known.certificate), "tls_key": str(known.key)}
    context = ssl.create_default_context(cafile=str(known.authority))
    with serving(tmp_path, **given) as served:
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        for _ in range(5):
            with (
                socket.create_connection(address, timeout=30) as raw,
                context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
                contextlib.suppress(OSError),
            ):
                wrapped.sendall(b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\n")
                wrapped.sendall(b"content-length: 1\r\n\r\nx")
                wrapped.unwrap()
    assert "eof_received" not in caplog.text


def test_files_that_are_missing_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidError, match="certificate"),
        serving(tmp_path, tls_cert=str(tmp_path / "none"), tls_key=str(tmp_path / "none")),
    ):
        pass
    with pytest.raises(InvalidError, match="both"), serving(tmp_path / "b", tls_cert="x"):
        pass


def test_a_client_that_is_refused_may_send_the_rest_over_tls_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 0.2)
    known = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(known.authority))
    head = b"POST /topics/t/events HTTP/1.1\r\nhost: localhost\r\nif-match: x\r\n"
    (tmp_path / "home").mkdir()
    files = {"tls_cert": str(known.certificate), "tls_key": str(known.key)}
    with serving(tmp_path / "home", **files) as served:
        port = int(served.url.rpartition(":")[2])
        for last in (b"", b"connection: close\r\n"):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
                context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
            ):
                wrapped.sendall(head + last + b"content-length: 500000\r\n\r\n")
                for _ in range(5):
                    wrapped.sendall(b"x" * 100_000)
                    time.sleep(0.15)
                assert wrapped.recv(65_536).startswith(b"HTTP/1.1 400")
