"""A certificate authority of the test's own, and a server certificate for 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """The authority's certificate, for clients, and what a server needs.

    ``certificate`` and ``key`` are the server's, and prove a client as well.
    """

    authority: Path
    context: ssl.SSLContext
    certificate: Path
    key: Path


def make_certificates(folder: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> Certificates:
    """Make them with openssl in a folder; ``names`` are those of the server."""
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
    extensions = folder / "names.cnf"
    extensions.write_text(
        f"subjectAltName={names}\nbasicConstraints=CA:FALSE\n"
        "extendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(key)),
        *("-CAcreateserial", "-days", "2", "-out", str(server), "-extfile", str(extensions)),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, server_key)
    return Certificates(authority, context, server, server_key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
