"""Pages of tokens: created, listed and revoked."""

from __future__ import annotations

from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.token import ALL_TOPICS, SCOPES, Grant, check_token_id
from tidelog.server.console.session import Answer, Shown, Visit

__all__ = ["TokenPages"]


class TokenPages:
    """What is shown of tokens. Never their text, but once, to who made them."""

    def __init__(self, home: Home) -> None:
        self._tokens = home.tokens

    def tokens(self, visit: Visit) -> Answer:
        """``GET /console/tokens``"""
        return self._show(visit)

    def create(self, visit: Visit) -> Answer:
        """``POST /console/tokens``: only admins create tokens, as they may do all of it"""
        topics = visit.text("topics") or ALL_TOPICS
        grants = [Grant(scope, topics) for scope in SCOPES if visit.form.get(scope)]
        if not grants:
            raise InvalidError("token: may do nothing: choose one scope or more")
        expires = visit.text("expires") or None
        token, text = self._tokens.create(
            grants, label=visit.text("label"), expires=expires, who=visit.session.who
        )
        return self._show(visit, text=text, made=token)

    def revoke(self, visit: Visit) -> Answer:
        """``POST /console/tokens/revoke``: asks first, and with ``sure`` does it"""
        token_id = visit.text("id")
        check_token_id(token_id)
        tokens = {token.id: token for token in self._tokens.list()}
        if token_id not in tokens or visit.form.get("sure"):
            token = self._tokens.revoke(token_id, who=visit.session.who)
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
            "tokens": self._tokens.list(),
            "used": self._tokens.last_used(),
            "own": visit.session.token,
            "is_open": visit.session.token is None,
            "scopes": SCOPES,
            "text": "",
            "made": None,
            "revoked": None,
        }
        return Shown("tokens.html", {**values, **more})
