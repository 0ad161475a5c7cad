"""Pages of tokens: made, listed and revoked; and the way in and out of the console."""

from __future__ import annotations

from typing import get_args

from tidelog.coordination.tokens import create_token, list_tokens, revoke_token
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.token import Scope, check_token_id
from tidelog.server.console.request import Answer, Shown, Visit
from tidelog.server.options import ServeOptions

__all__ = ["TokenPages"]


class TokenPages:
    """What is shown of tokens. Never their text, but once, to who made them."""

    def __init__(self, home: Home, options: ServeOptions) -> None:
        self._context = home.context
        self._options = options

    def tokens(self, visit: Visit) -> Answer:
        """``GET /console/tokens``"""
        return self._show(visit)

    def create(self, visit: Visit) -> Answer:
        """``POST /console/tokens``: who makes one can do all that it may"""
        scopes = [scope for scope in get_args(Scope) if visit.form.get(scope)]
        if not scopes:
            raise InvalidError("token: may do nothing: choose reading, writing, or both")
        token, text = create_token(self._context, scopes, visit.text("label"))
        return self._show(visit, text=text, made=token)

    def revoke(self, visit: Visit) -> Answer:
        """``POST /console/tokens/revoke``: asks first, and with ``sure`` does it"""
        token_id = visit.text("id")
        check_token_id(token_id)
        tokens = {token.id: token for token in list_tokens(self._context)}
        if token_id not in tokens or visit.form.get("sure"):
            token = revoke_token(self._context, token_id)
            return self._show(visit, revoked=token)
        own = visit.session.token
        values = {
            "token": tokens[token_id],
            "is_own": own is not None and own.id == token_id,
            "is_last": len(tokens) == 1,
            "is_loopback": self._options.is_loopback,
        }
        return Shown("revoke.html", values)

    def _show(self, visit: Visit, **more: object) -> Answer:
        values = {
            "tokens": list_tokens(self._context),
            "own": visit.session.token,
            "is_loopback": self._options.is_loopback,
            "text": "",
            "made": None,
            "revoked": None,
        }
        return Shown("tokens.html", {**values, **more})
