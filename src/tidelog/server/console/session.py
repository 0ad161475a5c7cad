"""Who looks at the console, and what their forms must prove.

A person shows a token once, in a form, and the browser keeps it in a cookie that scripts cannot
read and that no other site can make it send. Each request is let in by the gate, as all others are,
so a token that is revoked ends its sessions too. Where no token is needed there is no cookie.

A form changes something only when it carries a mark that is made of the session's token, or of a
secret of this process where there is none, and when the browser says that our own page sent it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import Receive
from starlette.types import Scope as AsgiScope

from tidelog.errors import InvalidError
from tidelog.model.token import Token
from tidelog.server.http.auth import Gate
from tidelog.server.http.errors import ForbiddenError, MediaTypeError
from tidelog.server.http.limits import Bodies
from tidelog.server.options import ServeOptions

__all__ = ["COOKIE", "Session", "Sessions", "cookie_of"]

COOKIE = "tidelog_console"
_FORM_BYTES_MAX = 65_536
_FORM_TYPE = b"application/x-www-form-urlencoded"
_FIELDS_MAX = 2_000

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who was let in."""

    token: Token | None  # None: none is needed
    form_mark: str  # what their forms must carry

    @property
    def may_write(self) -> bool:
        """Whether they may change anything: pages are read first, so both rights are needed."""
        return self.token is None or {"read", "write"} <= set(self.token.scopes)


class Sessions:
    """Lets people in, and looks at their forms."""

    def __init__(self, gate: Gate, options: ServeOptions, secret: str) -> None:
        self._gate = gate
        self._options = options
        self._secret = secret
        self._bodies = Bodies(_FORM_BYTES_MAX)

    async def enter(self, scope: AsgiScope, headers: Headers, shown: str | None = None) -> Session:
        """The session of a request. ``UnauthorizedError``, ``ForbiddenError``, ``TooManyError``.

        ``shown`` is a token from a form; else the cookie counts, and no header does.
        """
        text = cookie_of(headers, COOKIE) if shown is None else shown
        plain = {name: value for name, value in headers.items() if name != b"authorization"}
        token = await self._gate.admit(scope, plain, "read", text)
        key = self._secret if token is None else text
        mark = hmac.new(key.encode(), b"tidelog console form", "sha256").hexdigest()
        return Session(token, mark)

    async def form(self, receive: Receive, headers: Headers) -> dict[str, str]:
        """The fields of a form that our own page sent. ``ForbiddenError``, ``InvalidError``."""
        self._check_origin(headers)
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != _FORM_TYPE:
            raise MediaTypeError(f"form: is no {_FORM_TYPE.decode()}: send it from its page")
        body = await self._bodies.read(receive, headers)
        try:
            pairs = parse_qsl(
                body.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict"
            )
        except ValueError as exc:
            raise InvalidError("form: is not well-formed: send it from its page") from exc
        return dict(pairs)

    def check_mark(self, session: Session, form: Mapping[str, str]) -> None:
        """Refuse a form that does not belong to this session. ``ForbiddenError``."""
        given = form.get("form_mark", "").encode()
        if not hmac.compare_digest(given, session.form_mark.encode()):
            raise ForbiddenError(
                "form: does not belong to this session, or is older than the server: load its "
                "page again, and send it from there"
            )

    def cookie(self, scope: AsgiScope, headers: Headers, text: str) -> str:
        """The header that sets, or with an empty text removes, the cookie."""
        told = headers.get(b"x-forwarded-proto", b"") if self._options.behind_proxy else b""
        secure = "; Secure" if b"https" in (told, scope.get("scheme", "").encode()) else ""
        gone = "" if text else "; Max-Age=0"
        return f"{COOKIE}={text}; Path=/; HttpOnly; SameSite=Strict{secure}{gone}"

    def _check_origin(self, headers: Headers) -> None:
        """Both headers come from the browser itself, and no page can change them."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        host = headers.get(b"host", b"")
        if self._options.behind_proxy:
            host = headers.get(b"x-forwarded-host", host)
        foreign = site not in (None, b"same-origin")
        if origin is not None and origin.partition(b"://")[2] != host:
            foreign = True
        if foreign or (site is None and origin is None):
            raise ForbiddenError(
                "form: was not sent by a page of this console: open the page here, and send it "
                "from there"
            )


def cookie_of(headers: Headers, name: str) -> str:
    """The value of a cookie; empty where there is none."""
    for pair in headers.get(b"cookie", b"").split(b";"):
        given, _, value = pair.strip().partition(b"=")
        if given == name.encode():
            return value.decode("latin-1")
    return ""
