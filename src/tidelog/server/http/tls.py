"""TLS by certificate files, which are read again when they change."""

from __future__ import annotations

import os
import ssl

from tidelog.errors import InvalidError

__all__ = ["Certificate"]


class Certificate:
    """A certificate and its key; connections that begin later have the newest one."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._marks()
        self._load(self.context)

    def refresh(self) -> None:
        """Read the files again if they have changed. ``InvalidError``: the old one stays."""
        marks = self._marks()
        if marks == self._seen:
            return
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # both files fit, before one is used
        self._load(self.context)
        self._seen = marks

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as exc:
            raise InvalidError(
                f"serve: certificate `{self._cert}` with key `{self._key}`: {exc}: fix the files"
            ) from exc

    def _marks(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(path) for path in (self._cert, self._key)]
        except OSError as exc:
            raise InvalidError(
                f"serve: file `{exc.filename}`: {exc.strerror}: give a certificate and its key"
            ) from exc
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _no_password() -> str:
    raise ValueError("the key has a password")
