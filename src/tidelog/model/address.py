"""Addresses of stores and catalogs: parsed in one place, and never with a secret in them.

An address may be printed, logged and passed on in a config string. So one with a password, or with
an option that looks like a secret, is refused. Credentials come from the environment or from the
provider's own chain.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from tidelog.errors import InvalidError

__all__ = [
    "Address",
    "address_below",
    "format_address",
    "nearest",
    "parse_address",
    "recorded_name",
]

# Azure's `sas` must be a word of its own: `sasl.mechanisms` is not a secret.
_SECRET = re.compile("secret|passw(or)?d|token|credential|access_key|(?<![a-z])sas(?![a-z])")

_BY_NAMES = ("kafka", "kinesis", "scylla")  # schemes whose paths are names of topics and streams
_RECORDED = ("topic", "archive", "file", *_BY_NAMES)  # whose names cannot hold a secret
_RECORDED_MAX = 400  # characters of a name


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL."""

    scheme: str
    host: str  # may list several, with commas
    port: int | None
    path: str  # decoded; with its leading slash if there is one
    options: dict[str, str]
    text: str

    @property
    def name(self) -> str:
        """Returns what it names, without the options and hosts to reach it by."""
        if self.scheme not in _BY_NAMES:
            return self.path
        return self.path.lstrip("/") or self.host

    def take_options(self, known: Iterable[str]) -> dict[str, str]:
        """Returns the options. Raises ``InvalidError`` for an unknown one."""
        names = sorted(known)
        for name in self.options:
            if name not in names:
                takes = f"it takes {', '.join(names)}" if names else "it takes none"
                raise InvalidError(
                    f"address `{self.text}`: unknown option `{name}`{nearest(name, names)}: {takes}"
                )
        return dict(self.options)


def parse_address(text: str, plain_scheme: str | None = None) -> Address:
    """Parses a URL. Text without a scheme is a path of ``plain_scheme``, if that is given."""
    _check_path(text, text)
    scheme, colon, _ = text.partition(":")
    if plain_scheme and text and (not colon or not _is_scheme(scheme)):
        return Address(plain_scheme, "", None, str(Path(text).absolute()), {}, text)
    try:
        parts = urlsplit(text)
    except ValueError as exc:
        raise InvalidError(f"address: {exc}: give scheme://host:port/path?option=value") from exc
    if not parts.scheme:
        raise InvalidError(
            f"address `{text}`: has no scheme: give topic:NAME, file:PATH, or "
            "scheme://host/path?option=value"
        )
    if "@" in parts.netloc:
        raise InvalidError(
            f"address `{parts.scheme}://…`: names a user or password: leave it out, "
            "credentials come from the environment"
        )
    options = _options(text, parts.scheme, parts.query)
    port = _port(text, parts.netloc)
    if parts.fragment:
        raise InvalidError(f"address `{text}`: has a fragment (#…): leave it out, or write %23")
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    path = unquote(parts.path)
    _check_path(text, path)
    return Address(parts.scheme.lower(), host, port, path, options, text)


def recorded_name(url: str) -> str:
    """Returns what an audit records of a URL: its scheme, and what it names.

    Only the scheme of one whose path may hold a secret, or whose name is too long for a record.
    """
    address = parse_address(url)
    is_recorded = address.scheme in _RECORDED and len(address.name) <= _RECORDED_MAX
    return f"{address.scheme}:{address.name if is_recorded else ''}"


def _check_path(text: str, path: str) -> None:
    """Raises ``InvalidError`` for characters that no file system, and no server, can have."""
    try:
        is_whole = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # other surrogates than those of bytes that are not UTF-8
        is_whole = False
    if not is_whole:
        raise InvalidError(f"address {text!a}: has NUL or half of a character: leave it out")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean `x`?)`` if a known name is similar, otherwise an empty string.

    The name itself may be known by now: it can be created right after it was not found.
    """
    close = difflib.get_close_matches(name, sorted(set(known) - {name}), n=1, cutoff=0.6)
    return f" (did you mean `{close[0]}`?)" if close else ""


def format_address(scheme: str, host: str, path: str, options: dict[str, str]) -> str:
    """Returns the text of an address; the inverse of :func:`parse_address`."""
    query = f"?{urlencode(options, safe=':/')}" if options else ""
    return f"{scheme}://{host}{path}{query}"


def address_below(store: str, path: str) -> str:
    """Returns the address of a folder or object in a store, without the options of the store."""
    return f"{store.partition('?')[0].rstrip('/')}/{path}"


def _is_scheme(text: str) -> bool:
    return len(text) > 1 and text[0].isalpha() and all(c.isalnum() or c in "+-." for c in text)


def _port(text: str, netloc: str) -> int | None:
    """Returns the port after the last host; several hosts share one."""
    _, colon, tail = netloc.rpartition(":")
    if not colon or netloc.endswith("]"):
        return None
    if not tail.isdecimal() or not 0 < int(tail) < 65_536:
        raise InvalidError(
            f"address `{text}`: `{tail}` is not a valid port: give a number up to 65535"
        )
    return int(tail)


def _options(text: str, scheme: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if _SECRET.search(name.lower()):
            raise InvalidError(
                f"address `{scheme}://…`: option `{name}` looks like a secret: leave it out, "
                "credentials come from the environment"
            )
        if name in options:
            raise InvalidError(f"address `{text}`: option `{name}` is given twice: give it once")
        if not value:
            raise InvalidError(f"address `{text}`: option `{name}` is empty: give it a value")
        options[name] = value
    return options
