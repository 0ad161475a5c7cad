"""A token of the server: what it may do, for which topics, until when, and its hash.

A token has grants: each is a scope for the topics that match a pattern. ``admin`` includes all
other scopes for its topics. ``pixel`` is the smallest: it appends through the pixel and cannot
choose ids, since such a token is in the source of web pages.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections.abc import Iterable
from typing import Literal, cast, get_args

from tidelog.errors import InvalidError
from tidelog.model.decoding import Persisted

__all__ = [
    "ALL_TOPICS",
    "LABEL_MAX",
    "SCOPES",
    "Grant",
    "Scope",
    "Token",
    "TokenGuard",
    "TokenUse",
    "check_token_id",
    "grants_of",
    "token_hash",
]

Scope = Literal["pixel", "append", "read", "amend", "erase", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ALL_TOPICS = "*"
LABEL_MAX = 200  # characters
_PATTERN_MAX = 300  # characters
_PATTERN = re.compile(r"[A-Za-z0-9._*?-]+")
_ID = re.compile(r"[0-9a-f]{12}")
_INCLUDES: dict[Scope, frozenset[Scope]] = {
    "append": frozenset(("append", "pixel")),
    "admin": frozenset(SCOPES),
}


class Grant(Persisted, frozen=True):
    """One scope, for the topics that match a pattern: ``*`` any characters, ``?`` one."""

    scope: Scope
    topics: str = ALL_TOPICS

    def allows(self, scope: Scope, topic: str | None) -> bool:
        """Returns whether it allows this for a topic; None means the whole home."""
        if scope != self.scope and scope not in _INCLUDES.get(self.scope, ()):
            return False
        if self.topics == ALL_TOPICS:
            return True
        return topic is not None and _matcher(self.topics).match(topic) is not None

    def __str__(self) -> str:
        return self.scope if self.topics == ALL_TOPICS else f"{self.scope}:{self.topics}"

    @classmethod
    def parse(cls, text: str) -> Grant:
        """Returns the grant of ``SCOPE`` or ``SCOPE:PATTERN``. Raises ``InvalidError``."""
        scope, _, topics = text.partition(":")
        return cls(cast(Scope, scope), topics or ALL_TOPICS).checked()

    def checked(self) -> Grant:
        """Returns the grant. Raises ``InvalidError`` for an unknown scope, or for a pattern that no
        topic can match.
        """
        if self.scope not in SCOPES:
            raise InvalidError(
                f"scope `{str(self.scope)[:80]}`: unknown: give one of {', '.join(SCOPES)}"
            )
        if len(self.topics) > _PATTERN_MAX or not _PATTERN.fullmatch(self.topics):
            raise InvalidError(
                f"scope `{self.scope}`: pattern `{self.topics[:80]}`: give the name of a topic, "
                "with * for any characters and ? for one"
            )
        return self


class Token(Persisted, frozen=True):
    """What the home stores about a token. Its text is shown once and never stored."""

    id: str
    sha256: str  # of the whole text, in hex; its secret has 256 random bits
    grants: tuple[Grant, ...]
    created_ms: int
    label: str = ""
    expires_ms: int | None = None  # its own end; None: never
    overlap_ends_ms: int | None = None  # if another token replaces it

    @property
    def ends_ms(self) -> int | None:
        """When it is refused: its own end or that of the overlap, whichever is sooner."""
        ends = [each for each in (self.expires_ms, self.overlap_ends_ms) if each is not None]
        return min(ends, default=None)

    def allows(self, scope: Scope, topic: str | None = None) -> bool:
        """Returns whether one of its grants allows this; None means the whole home."""
        return any(grant.allows(scope, topic) for grant in self.grants)

    def allows_some(self, scope: Scope) -> bool:
        """Returns whether there may be a topic for which it allows this."""
        return any(
            grant.scope == scope or scope in _INCLUDES.get(grant.scope, ()) for grant in self.grants
        )

    def is_expired(self, now_ms: int) -> bool:
        """Returns whether it has expired."""
        ends_ms = self.ends_ms
        return ends_ms is not None and now_ms >= ends_ms


class TokenGuard(Persisted, frozen=True):
    """Records that the home has had a token: no server of it is ever open again."""

    since_ms: int


class TokenUse(Persisted, frozen=True):
    """When a server last admitted a request with a token."""

    at_ms: int


def grants_of(given: Iterable[Grant | Scope]) -> tuple[Grant, ...]:
    """Returns grants in order, without duplicates; a scope means all topics.

    Raises ``InvalidError`` for a grant that is not valid.
    """
    found = {(each if isinstance(each, Grant) else Grant(each)).checked(): None for each in given}
    return tuple(sorted(found, key=lambda each: (SCOPES.index(each.scope), each.topics)))


def token_hash(text: bytes) -> str:
    """Returns the hash of a token. A plain hash is enough for 256 random bits."""
    return hashlib.sha256(text).hexdigest()


def check_token_id(token_id: str) -> None:
    """Raises ``InvalidError`` for an invalid token id, such as the token's own text."""
    if not _ID.fullmatch(token_id):
        raise InvalidError(
            "token id: is not 12 hexadecimal digits: give the id that `tidelog token list` shows, "
            "not the token"
        )


@functools.lru_cache(maxsize=1_000)
def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))
