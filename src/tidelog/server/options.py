"""How a server is set up; plain values, checked at once."""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass

from tidelog.errors import InvalidError
from tidelog.model import defaults
from tidelog.model.topic import check_topic_name

__all__ = ["ServeOptions"]

_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_HEADERS = ("authorization", "proxy-authorization")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What an operator may choose."""

    host: str = defaults.SERVE_HOST
    port: int = defaults.SERVE_PORT  # 0: one that is free
    topic_default: str | None = None  # of a pixel that names none
    public_pixels: tuple[str, ...] = ()  # topics whose pixel needs no token
    forward: tuple[str, ...] = ()  # NAME=URL: events of this name go to Kafka or Kinesis
    keep_headers: tuple[str, ...] = ()  # of pixels, besides those that are kept always
    keep_request: bool = False  # pixels keep their method and path
    rate: float | None = None  # requests a second of one client; 0: no limit; None: the default
    body_bytes_max: int = defaults.BODY_BYTES
    behind_proxy: bool = False  # X-Forwarded-For is true, as only a proxy can reach us
    access_log: str | None = None  # a file, or `-` for standard error
    tls_cert: str | None = None  # a PEM file with the certificate and its chain
    tls_key: str | None = None  # a PEM file with its key
    audit_reads: bool = False  # count reads in the home's audit
    socket: str | None = None  # a unix socket for a proxy, in place of host and port

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port < 65_536:
            address = f"{self.host}:{self.port}"
            raise InvalidError(f"serve: address `{address}`: give a host and a port of 0 to 65535")
        if not 0 <= (self.rate or 0.0) < float("inf") or self.body_bytes_max < 1:
            raise InvalidError(
                f"serve: rate {self.rate or 0.0:g} and body-max {self.body_bytes_max}: give 0 or "
                "more requests a second, and 1 byte or more"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidError("serve: give both --tls-cert and --tls-key, or neither")
        if self.socket is not None:
            if not self.socket or self.tls_cert is not None:
                raise InvalidError("serve: give --socket a path, and let its proxy speak TLS")
            object.__setattr__(self, "behind_proxy", True)  # nothing else has a reason to use it
        lowered = tuple(name.lower() for name in self.keep_headers)
        for header in lowered:
            if not _HEADER.fullmatch(header) or header in _SECRET_HEADERS:
                raise InvalidError(
                    f"serve: header `{header[:80]}`: is none, or holds a credential: give "
                    "the names of others"
                )
        object.__setattr__(self, "keep_headers", lowered)
        for name in (self.topic_default, *self.public_pixels):
            if name is not None:
                check_topic_name(name)

        for name in self.forwards:
            check_topic_name(name)

    @property
    def forwards(self) -> dict[str, str]:
        """Returns targets' URLs by the names that are used like topics. Raises ``InvalidError``."""
        found: dict[str, str] = {}
        for text in self.forward:
            name, equals, url = text.partition("=")
            if not equals or name in found:
                raise InvalidError(
                    f"serve: forward `{text}`: give NAME=URL, each name once, such as "
                    "clicks=kinesis://clicks?region=eu-west-1"
                )
            found[name] = url
        return found

    @property
    def may_be_open(self) -> bool:
        """Returns whether the server needs no tokens as long as the home never had one."""
        return self.is_loopback and not self.behind_proxy

    @property
    def is_loopback(self) -> bool:
        """Returns whether only this machine can reach the server."""
        return _is_loopback(self.host)


@functools.cache
def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
