"""A certificate authority of the test's own, and a server certificate for 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """The authority's certificate, for clients, and what a server needs."""

    authority: Path
    context: ssl.SSLContext


def make_certificates(folder: Path) -> Certificates:
    """Make them with openssl in a folder."""
    authority, key = folder / "ca.pem", folder / "ca.key"
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test CA"),
        *("-keyout", str(key), "-out", str(authority)),
        *("-addext", "basicConstraints=critical,CA:TRUE"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    server, server_key, request = folder / "server.pem", folder / "server.key", folder / "csr.pem"
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"),
        *("-keyout", str(server_key), "-out", str(request)),
    )
    names = folder / "names.cnf"
    names.write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n"
        "extendedKeyUsage=serverAuth\n"
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(key)),
        *("-CAcreateserial", "-days", "2", "-out", str(server), "-extfile", str(names)),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, server_key)
    return Certificates(authority, context)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
