"""Headers of a request by name: one that is given twice never loses a value without a word.

Paths and queries of requests: routes that match the whole path, and both are text.

What a path names is read, updated and erased, so a path names exactly one thing. Starlette's own
routes end at ``$``, which also matches before a last newline, and ``.`` does not match newlines;
and percent-encoded bytes that are not UTF-8 arrive here as U+FFFD. Both would let a
request for one id reach the event of another. In a query such bytes would change what is stored or
searched for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.routing import Route
from starlette.types import Scope

from tidelog.errors import InvalidError
from tidelog.server.http.errors import Pair

__all__ = [
    "SINGLE",
    "WholeRoute",
    "check_host",
    "check_path",
    "check_query",
    "headers_of",
]

SINGLE = frozenset(
    (
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"last-event-id",
        b"origin",
        b"referer",
        b"user-agent",
    )
)
_OWN = b"tidelog-"  # how the names of headers begin that are Tidelog's


def headers_of(pairs: Sequence[Pair]) -> dict[bytes, bytes]:
    """Return headers by name; values of a name that may be a list are joined with commas.

    ``InvalidError`` for two values where only one can count.
    """
    found = dict(pairs)
    return found if len(found) == len(pairs) else _joined(pairs)


def _joined(pairs: Sequence[Pair]) -> dict[bytes, bytes]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    for name, given in values.items():
        if len(given) > 1 and (name in SINGLE or name.startswith(_OWN)):
            shown = name.decode("latin-1").title()
            raise InvalidError(f"header `{shown}`: is given {len(given)} times: give it once")
    return {
        name: (b"; " if name == b"cookie" else b", ").join(given) for name, given in values.items()
    }


_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
_ANY, _NO_SLASH = r"[\s\S]*", "[^/]+"
_REPLACED = "\ufffd"
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")


class WholeRoute(Route):
    """A route whose parameters take any character, and that matches nothing but the whole path.

    ``{name}`` takes no slash and is not empty; ``{name:path}`` takes all that follows.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.path_regex = _pattern(path)


def check_host(scope: Scope) -> None:
    """Refuse HTTP/1.1 without a ``Host``, and one that is not a host. ``InvalidError``."""
    given = [value for name, value in scope["headers"] if name == b"host"]
    if not given and scope["http_version"] == "1.1":
        raise InvalidError("request: HTTP/1.1 without a Host header: give one")
    if not all(map(_HOST.fullmatch, given)):
        raise InvalidError("header `Host`: is not a host with or without a port: fix it")


def check_path(scope: Scope) -> None:
    """Refuse a path that is not UTF-8: it names nothing. ``InvalidError``."""
    path: str = scope["path"]
    if _REPLACED not in path:  # U+FFFD itself, or bytes that are not text
        return
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError as exc:
        raise InvalidError(
            f"path `{path[:80]}`: is not UTF-8: percent-encode the UTF-8 bytes of names and ids"
        ) from exc


def check_query(scope: Scope) -> None:
    """Refuse a query that is not percent-encoded UTF-8. ``InvalidError``."""
    query: bytes = scope.get("query_string") or b""
    try:
        if not query.isascii():
            raise ValueError("not ASCII")
        if b"%" in query:
            unquote_to_bytes(query).decode()
    except ValueError as exc:
        raise InvalidError(
            "query: is not UTF-8 with percent-encoding: percent-encode the UTF-8 bytes of each text"
        ) from exc


def _pattern(path: str) -> re.Pattern[str]:
    found, at = "", 0
    for match in _PARAMETER.finditer(path):
        found += re.escape(path[at : match.start()])
        found += f"(?P<{match[1]}>{_ANY if match[2] else _NO_SLASH})"
        at = match.end()
    return re.compile(found + re.escape(path[at:]) + r"\Z")
