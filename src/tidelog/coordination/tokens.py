"""Tokens of the server: creates, rotates, revokes and lists them, and notes their last use.

They are rows of the registry. The first token also puts a guard, a row and an object, which are
never deleted: a home that has had a token is never open again, even after the last token is
revoked, or with a catalog from before it. Servers note when each token was used, at most once a
minute, in a partition apart from the tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.context import Context
from tidelog.coordination.audit import record_action
from tidelog.coordination.registry import add_name, remove_name
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnknownOutcomeError,
    contained,
)
from tidelog.model import defaults, layout
from tidelog.model.times import duration_ms
from tidelog.model.token import (
    LABEL_MAX,
    Grant,
    Scope,
    Token,
    TokenGuard,
    TokenUse,
    check_token_id,
    grants_of,
    token_hash,
)
from tidelog.model.topic import decode_row, encode_row
from tidelog.store.base import object_exists, put_fresh

__all__ = [
    "KnownTokens",
    "Tokens",
    "close_home",
    "create_token",
    "has_guard",
    "is_closed_home",
    "list_tokens",
    "note_uses",
    "read_tokens",
    "read_uses",
    "revoke_token",
    "rotate_token",
]


class Tokens:
    """The tokens of a home: what clients of its server may do."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def create(
        self,
        grants: Iterable[Grant | Scope],
        *,
        label: str = "",
        expires: str | int | None = None,
        who: str = "",
    ) -> tuple[Token, str]:
        """Returns a new token and its text, which the home does not keep.

        ``grants`` are scopes such as ``append``, for all topics, or :class:`Grant` with a pattern
        of topics. ``expires`` is how long it is valid, such as ``90d``; by default for ever. The
        first token closes the home to requests without one. ``who`` is for the audit; by default
        the user of this process. Raises ``InvalidError``.

        >>> token, text = home.tokens.create([tidelog.Grant("append", "orders")], label="web")
        >>> token.label
        'web'
        """
        expires_ms = None
        if expires is not None:
            expires_ms = self._context.clock.now_ms() + duration_ms(expires)
        return create_token(self._context, grants, label, expires_ms, who)

    def rotate(
        self, token_id: str, overlap: str | int = defaults.ROTATION_OVERLAP, *, who: str = ""
    ) -> tuple[Token, str]:
        """Returns a token with the same grants, label and lifetime, and its text.

        The old one expires after ``overlap``, or earlier if its own end or that of an overlap
        before is sooner. Raises ``NotFoundError`` and ``ConflictError``.

        >>> old, _ = home.tokens.create(["read"])
        >>> new, text = home.tokens.rotate(old.id, overlap="10m")
        >>> new.grants == old.grants
        True
        """
        return rotate_token(self._context, token_id, duration_ms(overlap), who)

    def revoke(self, token_id: str, *, who: str = "") -> Token:
        """Removes a token and returns it; servers refuse it within seconds.

        Raises ``NotFoundError`` if there is no such token.

        >>> token, _ = home.tokens.create(["read"])
        >>> home.tokens.revoke(token.id).id == token.id
        True
        """
        return revoke_token(self._context, token_id, who)

    def list(self) -> list[Token]:
        """Returns all tokens, the oldest first, also those that have expired.

        >>> home.tokens.list()
        []
        """
        return list_tokens(self._context)

    def last_used(self) -> dict[str, int]:
        """Returns when each token was last used, in milliseconds since 1970, by its id.

        Servers note it once a minute. A token that was never used is not in it.

        >>> home.tokens.last_used()
        {}
        """
        return read_uses(self._context)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """All tokens of a home, and whether it is closed to requests without one."""

    tokens: tuple[Token, ...]
    is_closed: bool


def create_token(
    context: Context,
    grants: Iterable[Grant | Scope],
    label: str = "",
    expires_ms: int | None = None,
    who: str = "",
) -> tuple[Token, str]:
    """Creates a token. Returns what the home stores, and the token's text, which is not stored.

    A scope means a grant of it for all topics. ``who`` is for the home's audit. Raises
    ``InvalidError`` for grants, a label or a time that cannot be.
    """
    wanted = grants_of(grants)
    if not wanted:
        raise InvalidError(
            "token: may do nothing: give it --append, --read, --amend, --erase, --admin or --pixel"
        )
    if len(label) > LABEL_MAX or not label.isprintable():
        raise InvalidError(f"token: label: give up to {LABEL_MAX} characters on one line")
    now_ms = context.clock.now_ms()
    if expires_ms is not None and expires_ms <= now_ms:
        raise InvalidError("token: expires before it is created: give a time to come")
    token_id = context.ids.new()[:12]
    text = f"tidelog_{token_id}_{context.random.getrandbits(256):064x}"
    token = Token(token_id, token_hash(text.encode()), wanted, now_ms, label, expires_ms)
    guard = TokenGuard(now_ms)
    note = ", ".join(map(str, wanted)) + (f" ({label})" if label else "")
    record_action(context, "token create", f"token {token_id}", note, who)
    close_home(context)
    add_name(
        context,
        Put(layout.token_row(token_id), encode_row(token), ABSENT),
        also=(Put(layout.TOKEN_GUARD, encode_row(guard)),),
    )
    return token, text


def close_home(context: Context) -> None:
    """Puts the object that keeps the home closed if its catalog is lost; idempotent."""
    with contextlib.suppress(AlreadyExistsError):
        put_fresh(context.store, layout.GUARD_OBJECT, b"This home has had a token.\n")


def is_closed_home(context: Context) -> bool:
    """Returns whether the store knows that the home has had a token."""
    return object_exists(context.store, layout.GUARD_OBJECT)


def note_uses(context: Context, uses: Mapping[str, int]) -> None:
    """Stores when tokens were last used, by id. Of several servers the last one wins."""
    for token_id, at_ms in uses.items():
        change = Put(token_id, encode_row(TokenUse(at_ms)))
        context.catalog.write(layout.TOKEN_USES, change, write_id=context.ids.new())


def read_uses(context: Context) -> dict[str, int]:
    """Returns when each token was last used, by id; without those that never were."""
    rows = context.catalog.scan(layout.TOKEN_USES)
    return {row.row: decode_row(row.value, TokenUse, f"row `{row.row}`").at_ms for row in rows}


def list_tokens(context: Context) -> list[Token]:
    """Returns all tokens, oldest first, including expired ones."""
    rows = context.catalog.scan(layout.REGISTRY, layout.token_row(""), "token0")
    return sorted(map(_decode, rows), key=lambda token: (token.created_ms, token.id))


def read_tokens(context: Context) -> KnownTokens:
    """Returns all tokens, and whether the home has ever had one."""
    tokens = tuple(list_tokens(context))
    is_closed = bool(tokens) or has_guard(context)
    return KnownTokens(tokens, is_closed)


def has_guard(context: Context) -> bool:
    """Returns whether the home has ever had a token."""
    return context.catalog.get(layout.REGISTRY, layout.TOKEN_GUARD) is not None


def rotate_token(
    context: Context, token_id: str, overlap_ms: int, who: str = ""
) -> tuple[Token, str]:
    """Creates a token with the same grants and label; the old one expires after ``overlap_ms``.

    The new one has the same lifetime as the old one was created with, however often that one is
    rotated. Raises ``NotFoundError``, ``ConflictError``.
    """
    row = _find(context, token_id)
    old = _decode(row)
    now_ms = context.clock.now_ms()
    if old.is_expired(now_ms):
        raise InvalidError(f"token `{token_id}`: has expired: create another one")
    lasts_ms = None if old.expires_ms is None else old.expires_ms - old.created_ms
    expires_ms = None if lasts_ms is None else now_ms + lasts_ms
    record_action(context, "token rotate", f"token {token_id}", who=who)
    made = create_token(context, old.grants, old.label, expires_ms, who)
    end_ms = now_ms + overlap_ms
    if old.ends_ms is None or old.ends_ms > end_ms:
        ending = msgspec.structs.replace(old, overlap_ends_ms=end_ms)
        change = Put(row.row, encode_row(ending), expect=row.version)
        try:
            context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            now = context.catalog.get(layout.REGISTRY, row.row)
            if now is not None and _decode(now) != ending:  # removed is fine too
                revoke_token(context, made[0].id, who)
                raise
    return made


def revoke_token(context: Context, token_id: str, who: str = "") -> Token:
    """Removes a token; servers refuse it within seconds. Raises ``NotFoundError``."""
    row = _find(context, token_id)
    record_action(context, "token revoke", f"token {token_id}", _decode(row).label, who)
    remove_name(context, row.row, lambda _: True)  # ids are not reused
    with contained("use of a token", lambda error: None):  # a few bytes that no list shows
        context.catalog.write(layout.TOKEN_USES, Delete(token_id), write_id=context.ids.new())
    return _decode(row)


def _find(context: Context, token_id: str) -> Row:
    check_token_id(token_id)
    row = context.catalog.get(layout.REGISTRY, layout.token_row(token_id))
    if row is None:
        raise NotFoundError(f"token `{token_id}`: not found: see `tidelog token list`")
    return row


def _decode(row: Row) -> Token:
    return decode_row(row.value, Token, f"registry row `{row.row}`")
