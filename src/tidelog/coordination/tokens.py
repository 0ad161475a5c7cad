"""Tokens of the server: creates, lists, rotates and revokes them, as rows of the registry.

The first token also puts a guard row, which is never deleted: a home that has had a token is never
open again, even after the last token is revoked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.context import Context
from tidelog.coordination.registry import add_name, remove_name
from tidelog.errors import ConflictError, InvalidError, NotFoundError, UnknownOutcomeError
from tidelog.model import layout
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.token import (
    LABEL_MAX,
    Grant,
    Scope,
    Token,
    TokenGuard,
    check_token_id,
    grants_of,
    token_hash,
)

__all__ = [
    "KnownTokens",
    "create_token",
    "has_guard",
    "list_tokens",
    "read_tokens",
    "revoke_token",
    "rotate_token",
]


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
) -> tuple[Token, str]:
    """Creates a token. Returns what the home stores, and the token's text, which is not stored.

    A scope means a grant of it for all topics. Raises ``InvalidError``.
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
    add_name(
        context,
        Put(layout.token_row(token_id), encode_row(token), ABSENT),
        also=(Put(layout.TOKEN_GUARD, encode_row(guard)),),
    )
    return token, text


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


def rotate_token(context: Context, token_id: str, overlap_ms: int) -> tuple[Token, str]:
    """Creates a token with the same grants and label; the old one expires after ``overlap_ms``.

    The new one has the same lifetime as the old one. Raises ``NotFoundError``, ``ConflictError``.
    """
    row = _find(context, token_id)
    old = _decode(row)
    now_ms = context.clock.now_ms()
    if old.is_expired(now_ms):
        raise InvalidError(f"token `{token_id}`: has expired: create another one")
    lasts_ms = None if old.expires_ms is None else old.expires_ms - old.created_ms
    expires_ms = None if lasts_ms is None else now_ms + lasts_ms
    made = create_token(context, old.grants, old.label, expires_ms)
    end_ms = now_ms + overlap_ms
    if old.expires_ms is None or old.expires_ms > end_ms:
        ending = msgspec.structs.replace(old, expires_ms=end_ms)
        change = Put(row.row, encode_row(ending), expect=row.version)
        try:
            context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
        except (ConflictError, UnknownOutcomeError):
            now = context.catalog.get(layout.REGISTRY, row.row)
            if now is not None and _decode(now) != ending:  # removed is fine too
                revoke_token(context, made[0].id)
                raise
    return made


def revoke_token(context: Context, token_id: str) -> Token:
    """Removes a token; servers refuse it within seconds. Raises ``NotFoundError``."""
    row = _find(context, token_id)
    remove_name(context, row.row, lambda _: True)  # ids are not reused
    return _decode(row)


def _find(context: Context, token_id: str) -> Row:
    check_token_id(token_id)
    row = context.catalog.get(layout.REGISTRY, layout.token_row(token_id))
    if row is None:
        raise NotFoundError(f"token `{token_id}`: not found: see `tidelog token list`")
    return row


def _decode(row: Row) -> Token:
    return decode_row(row.value, Token, f"registry row `{row.row}`")
