"""Headers of a request by name: one that is given twice never loses a value without a word."""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.errors import InvalidError
from tidelog.server.answers import Pair

__all__ = ["SINGLE", "headers_of"]

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
