"""Tokens of the server as Python code uses them: ``home.tokens``."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.context import Context
from tidelog.coordination.tokens import (
    create_token,
    list_tokens,
    read_uses,
    revoke_token,
    rotate_token,
)
from tidelog.model.times import duration_ms
from tidelog.model.token import Grant, Scope, Token

__all__ = ["Tokens"]


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
        self, token_id: str, overlap: str | int = "1h", *, who: str = ""
    ) -> tuple[Token, str]:
        """Returns a token with the same grants and label, and its text.

        The old one expires after ``overlap``. Raises ``NotFoundError`` and ``ConflictError``.

        >>> old, _ = home.tokens.create(["read"])
        >>> new, text = home.tokens.rotate(old.id, overlap="10m")
        >>> new.grants == old.grants
        True
        """
        return rotate_token(self._context, token_id, duration_ms(overlap), who)

    def revoke(self, token_id: str, *, who: str = "") -> Token:
        """Removes a token and returns it; servers refuse it within seconds. ``NotFoundError``.

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
