"""Tokens of the server: made, listed and revoked, as rows of the registry."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.catalog.base import ABSENT, Put, Row
from tidelog.context import Context
from tidelog.coordination.registry import add_name, remove_name
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.token import LABEL_MAX, Scope, Token, check_token_id, token_hash

__all__ = ["create_token", "list_tokens", "revoke_token"]


def create_token(context: Context, scopes: Iterable[Scope], label: str = "") -> tuple[Token, str]:
    """Make a token: what is kept of it, and its text, which nobody can tell again."""
    wanted = tuple(sorted(set(scopes)))
    if not wanted:
        raise InvalidError("token: may do nothing: give it --read, --write, or both")
    if len(label) > LABEL_MAX or not label.isprintable():
        raise InvalidError(f"token: label: give up to {LABEL_MAX} characters on one line")
    token_id = context.ids.new()[:12]
    text = f"tidelog_{token_id}_{context.random.getrandbits(256):064x}"
    token = Token(token_id, token_hash(text.encode()), wanted, context.clock.now_ms(), label)
    add_name(context, Put(layout.token_row(token_id), encode_row(token), ABSENT))
    return token, text


def list_tokens(context: Context) -> list[Token]:
    """All tokens, the oldest first."""
    rows = context.catalog.scan(layout.REGISTRY, layout.token_row(""), "token0")
    return sorted(map(_decode, rows), key=lambda token: (token.created_ms, token.id))


def revoke_token(context: Context, token_id: str) -> Token:
    """Remove a token; servers refuse it within seconds. ``NotFoundError``."""
    check_token_id(token_id)
    row = context.catalog.get(layout.REGISTRY, layout.token_row(token_id))
    if row is None:
        raise NotFoundError(f"token `{token_id}`: not found: see `tidelog token list`")
    remove_name(context, row.row, lambda _: True)  # ids are not used again
    return _decode(row)


def _decode(row: Row) -> Token:
    return decode_row(row.value, Token, f"registry row `{row.row}`")
