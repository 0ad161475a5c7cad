"""Pages of tokens: created, listed and revoked."""

from __future__ import annotations

from tidelog.coordination.tokens import create_token, list_tokens, revoke_token
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.times import duration_ms
from tidelog.model.token import ALL_TOPICS, SCOPES, Grant, check_token_id
from tidelog.server.console.request import Answer, Shown, Visit

__all__ = ["TokenPages"]


class TokenPages:
    """What is shown of tokens. Never their text, but once, to who made them."""

    def __init__(self, home: Home) -> None:
        self._context = home.context

    def tokens(self, visit: Visit) -> Answer:
        """``GET /console/tokens``"""
        return self._show(visit)

    def create(self, visit: Visit) -> Answer:
        """``POST /console/tokens``: only admins create tokens, as they may do all of it"""
        topics = visit.text("topics") or ALL_TOPICS
        grants = [Grant(scope, topics) for scope in SCOPES if visit.form.get(scope)]
        if not grants:
            raise InvalidError("token: may do nothing: choose one scope or more")
        lasts = visit.text("expires")
        expires_ms = visit.now_ms + duration_ms(lasts) if lasts else None
        token, text = create_token(self._context, grants, visit.text("label"), expires_ms)
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
        }
        return Shown("revoke.html", values)

    def _show(self, visit: Visit, **more: object) -> Answer:
        values = {
            "tokens": list_tokens(self._context),
            "own": visit.session.token,
            "is_open": visit.session.token is None,
            "scopes": SCOPES,
            "text": "",
            "made": None,
            "revoked": None,
        }
        return Shown("tokens.html", {**values, **more})
