"""TLS to CQL servers: the options of an address, and why a handshake failed.

The options have the same names as in addresses of Kafka. The driver passes on only the text of a
handshake error, so we repeat the handshake ourselves if it could not connect.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.errors import InvalidError

__all__ = ["TLS_OPTIONS", "CqlTls", "handshake_trouble", "parse_tls", "tls_context", "tls_options"]

_PROTOCOL = "security.protocol"
_AUTHORITY = "ssl.ca.location"
_CERTIFICATE = "ssl.certificate.location"
_KEY = "ssl.key.location"
_NAME_CHECK = "ssl.endpoint.identification.algorithm"
TLS_OPTIONS = (_PROTOCOL, _AUTHORITY, _CERTIFICATE, _KEY, _NAME_CHECK)

_PROBE_TIMEOUT_S = 3.0
_OPTIONS_REQUEST = bytes([4, 0, 0, 0, 5, 0, 0, 0, 0])  # version 4, OPTIONS, empty body
_NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_WRONG_NAME = (62, 64)  # OpenSSL's codes: another host name, another IP address


@dataclass(frozen=True, slots=True)
class CqlTls:
    """Files of certificates, and whether a server's certificate must contain its host."""

    authority: str | None = None  # None: those that the system trusts
    certificate: str | None = None
    key: str | None = None
    checks_name: bool = True
    key_password: str | None = field(default=None, repr=False)


def parse_tls(
    what: str, options: Mapping[str, str], environ: Mapping[str, str], prefix: str
) -> CqlTls | None:
    """Returns the TLS options of an address; None to connect without. Raises ``InvalidError``.

    ``what`` names the address in errors. The password of the key comes from the variable
    ``<prefix>SSL_KEY_PASSWORD``.
    """
    protocol = options.get(_PROTOCOL, "plaintext").lower()
    if protocol not in ("plaintext", "ssl"):
        raise InvalidError(f"{what}: {_PROTOCOL} `{protocol}`: give ssl or plaintext")
    if protocol == "plaintext":
        idle = [name for name in TLS_OPTIONS[1:] if name in options]
        if idle:
            raise InvalidError(
                f"{what}: `{idle[0]}` has no effect without TLS: add {_PROTOCOL}=ssl"
            )
        return None
    check = options.get(_NAME_CHECK, "https").lower()
    if check not in ("https", "none"):
        raise InvalidError(
            f"{what}: {_NAME_CHECK} `{check}`: give https, or none to accept any host name"
        )
    if _KEY in options and _CERTIFICATE not in options:
        raise InvalidError(f"{what}: has `{_KEY}` without a certificate: add {_CERTIFICATE}")
    return CqlTls(
        options.get(_AUTHORITY),
        options.get(_CERTIFICATE),
        options.get(_KEY),
        check == "https",
        environ.get(f"{prefix}SSL_KEY_PASSWORD"),
    )


def tls_options(tls: CqlTls | None) -> dict[str, str]:
    """Returns the options as text again, without a secret."""
    if tls is None:
        return {}
    said = {
        _PROTOCOL: "ssl",
        _AUTHORITY: tls.authority,
        _CERTIFICATE: tls.certificate,
        _KEY: tls.key,
        _NAME_CHECK: None if tls.checks_name else "none",
    }
    return {name: text for name, text in said.items() if text is not None}


def tls_context(what: str, tls: CqlTls | None) -> ssl.SSLContext | None:
    """Returns the context for connections; None without TLS. ``InvalidError`` for bad files."""
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.authority)
    except OSError as exc:  # SSLError too
        raise _file_error(what, _AUTHORITY, tls.authority or "", exc) from exc
    context.check_hostname = tls.checks_name
    if tls.certificate is not None:
        password = tls.key_password or ""  # set, so that OpenSSL does not prompt at the terminal
        try:
            context.load_cert_chain(tls.certificate, tls.key, password)
        except OSError as exc:
            option, path = (_KEY, tls.key) if tls.key else (_CERTIFICATE, tls.certificate)
            raise _file_error(what, option, path, exc) from exc
    return context


def handshake_trouble(hosts: Sequence[str], port: int, tls: ssl.SSLContext | None) -> str | None:
    """Returns why servers and an address disagree about TLS, and what to do; None if they may
    agree.

    The first server that accepts a connection decides.
    """
    for host in hosts:
        try:
            plain = socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S)
        except OSError:
            continue
        with plain:
            trouble = _as_plain(plain) if tls is None else _as_secure(plain, host, tls)
        return f"{host} port {port} {trouble}" if trouble else None
    return None


def _as_plain(plain: socket.socket) -> str | None:
    """Returns a remedy if a server that did not answer in plain text wants TLS."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE  # nothing is sent
    try:
        anyone.wrap_socket(plain).close()
    except ssl.SSLError as exc:
        if "ALERT" not in (exc.reason or ""):
            return None
    except OSError:
        return None
    return f"expects TLS: add {_PROTOCOL}=ssl to the address"


def _as_secure(plain: socket.socket, host: str, tls: ssl.SSLContext) -> str | None:
    try:
        with tls.wrap_socket(plain, server_hostname=host) as secure:
            # A missing client certificate is refused only now. Listen before sending: a request
            # to a server that has closed the connection fails without its reason.
            with contextlib.suppress(TimeoutError):
                secure.recv(1)
            secure.sendall(_OPTIONS_REQUEST)
            secure.recv(1)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code in _WRONG_NAME:
            return (
                f"has a certificate for another host: {exc.verify_message}: use a name that is in "
                f"the certificate, or accept any with {_NAME_CHECK}=none"
            )
        return (
            f"has a certificate that is not trusted: {exc.verify_message}: give the file of its "
            f"authority with {_AUTHORITY}"
        )
    except ssl.SSLError as exc:
        return _refusal(exc)
    except OSError:
        return None
    return None


def _refusal(exc: ssl.SSLError) -> str | None:
    reason = (exc.reason or str(exc)).replace("_", " ").lower()
    if "alert" in reason and "internal" not in reason:
        return (
            f"refuses the TLS connection: {reason}: give a client certificate that it accepts "
            f"with {_CERTIFICATE} and {_KEY}"
        )
    if exc.reason in _NO_TLS:
        return f"does not speak TLS: {reason}: use its TLS port, or leave {_PROTOCOL}=ssl out"
    return None  # the server may be shutting down


def _file_error(what: str, option: str, path: str, exc: OSError) -> InvalidError:
    return InvalidError(
        f"{what}: {option} `{path}` cannot be used: {exc.strerror or exc}: give a readable PEM "
        "file, and its key's password in the environment"
    )
