"""Sessions of the console: who looks, what a form must prove, and the pages of tokens.

A person shows a token once, in a form, and gets a session of its own: a random id in a cookie that
scripts cannot read and that no other site can make the browser send. The token itself is in no
cookie. A session ends when it is logged out, unused for long, old, or when its token is revoked or
expires; and with the process. On an open server there is no cookie.

A form changes something only when it carries a mark that is made of the session's id, or of a
secret of this process where there is none, and when the browser says that our own page sent it.

Requests and answers of pages are plain values here, without HTTP.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive
from starlette.types import Scope as AsgiScope

from tidelog.clock import Clock
from tidelog.errors import InvalidError
from tidelog.home import Home
from tidelog.model.token import ALL_TOPICS, SCOPES, Grant, Scope, Token, check_token_id, token_hash
from tidelog.server.api.sql import QueryEnd
from tidelog.server.http.auth import HOME, Admission, Gate
from tidelog.server.http.errors import ForbiddenError, MediaTypeError, TooManyError
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.request import TransferBudget, content_type
from tidelog.server.options import ServeOptions

__all__ = [
    "COOKIE",
    "SESSION_IDLE_S",
    "SESSION_S",
    "Answer",
    "Data",
    "Handler",
    "Redirect",
    "Session",
    "Sessions",
    "ShownPage",
    "TokenPages",
    "Visit",
    "cookie_of",
]

COOKIE = "tidelog_console"
SESSION_S = 12 * 3_600.0  # after which a person logs in again
SESSION_IDLE_S = 2 * 3_600.0  # the same, where no page was looked at
_SESSIONS_MAX = 10_000  # of one process; the one that is unused for longest ends
_TOKEN_SESSIONS_MAX = 100  # the same of one token, so that no token ends the sessions of others
_LOGINS_MAX, _LOGINS_S = 30, 60.0  # of one token, in this time
_FORM_BYTES_MAX = 262_144
_FORMS_BYTES_MAX = 8 << 20  # of all together
_FORM_TYPE = b"application/x-www-form-urlencoded"
_FIELDS_MAX = 2_000
_SMALL_FORM = 4_096  # bytes: up to this size the loop itself reads it, in less than a millisecond

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Session:
    """A person who was admitted."""

    token: Token | None  # None: none is needed
    form_mark: str  # what their forms must carry

    def may(self, scope: Scope, topic: str | None = None) -> bool:
        """Returns whether they may do this to a topic, or without one to the home as a whole."""
        return self.token is None or self.token.allows(scope, topic)

    @property
    def who(self) -> str:
        """Returns the name for audits; empty if no token is needed."""
        return "" if self.token is None else f"token {self.token.id}"

    @property
    def may_change(self) -> bool:
        """Returns whether they may change anything at all."""
        changing: tuple[Scope, ...] = ("append", "amend", "erase", "admin")
        return self.token is None or any(map(self.token.allows_some, changing))


@dataclass(slots=True)
class _Login:
    """What the process knows about a session with a token."""

    sha256: str  # of the token
    began_s: float
    used_s: float


class Sessions:
    """Admits people, and checks their forms."""

    def __init__(
        self,
        gate: Gate,
        options: ServeOptions,
        threads: ServerThreads,
        new_secret: Callable[[], str],
        clock: Clock,
    ) -> None:
        self._gate = gate
        self._threads = threads
        self._options = options
        self._new_secret = new_secret
        self._secret = new_secret()
        self._now_s = clock.monotonic_s
        self._recent: dict[str, list[float]] = {}  # when each token began sessions
        self._logins: dict[str, _Login] = {}  # by the hash of a session's id, the oldest first
        self._bodies = TransferBudget(_FORM_BYTES_MAX, clock, _FORMS_BYTES_MAX)

    def enter(self, scope: AsgiScope, headers: Headers) -> tuple[Session, Admission]:
        """Returns the session of a request, by its cookie alone.

        Raises ``UnauthorizedError``, ``ForbiddenError`` or ``TooManyError``.
        """
        text = cookie_of(headers, COOKIE)
        hashed = token_hash(text.encode())
        login = self._login(hashed)
        sha256 = "" if login is None else login.sha256
        admission = self._gate.admit_session(scope, headers, sha256, "read")
        if login is not None:
            login.used_s = self._now_s()
        if admission.token is not None:
            admission = replace(admission, is_live=lambda: self._login(hashed) is not None)
        key = self._secret if admission.token is None else text
        mark = hmac.new(key.encode(), b"tidelog console form", "sha256").hexdigest()
        return Session(admission.token, mark), admission

    def _login(self, hashed: str) -> _Login | None:
        """Returns a session that has not ended; forgets one that is old, or unused for long."""
        login, now_s = self._logins.get(hashed), self._now_s()
        if login is not None and (
            now_s - login.used_s > SESSION_IDLE_S or now_s - login.began_s > SESSION_S
        ):
            self._logins.pop(hashed, None)  # threads look as well
            return None
        return login

    async def login(self, scope: AsgiScope, headers: Headers, shown: str) -> tuple[str, Admission]:
        """Begins a session with a token from a form. Returns its id; empty if none is needed.

        Raises ``UnauthorizedError``, ``ForbiddenError`` or ``TooManyError``.
        """
        plain = {name: value for name, value in headers.items() if name != b"authorization"}
        admission = await self._gate.admit(scope, plain, "read", HOME, shown)
        if admission.token is None:
            return "", admission
        self._count_login(admission.token.id)
        self._make_room(admission.token.sha256)
        text, now_s = self._new_secret(), self._now_s()
        login = _Login(admission.token.sha256, now_s, now_s)
        self._logins[token_hash(text.encode())] = login
        return text, admission

    def _make_room(self, sha256: str) -> None:
        """Ends the session that is unused for longest if a token, or the process, has too many."""
        live = [each for each in list(self._logins) if self._login(each) is not None]
        own = [each for each in live if self._logins[each].sha256 == sha256]
        if len(own) >= _TOKEN_SESSIONS_MAX or len(live) >= _SESSIONS_MAX:
            ending = own if len(own) >= _TOKEN_SESSIONS_MAX else live
            del self._logins[min(ending, key=lambda each: self._logins[each].used_s)]

    def _count_login(self, token_id: str) -> None:
        """Refuses very many logins with one token: each is a record of the audit."""
        now_s = self._now_s()
        recent = [at_s for at_s in self._recent.pop(token_id, ()) if now_s - at_s < _LOGINS_S]
        self._recent[token_id] = recent
        if len(recent) >= _LOGINS_MAX:
            raise TooManyError(
                f"token `{token_id}`: has logged in {_LOGINS_MAX} times in a minute: wait",
                retry_after_s=int(_LOGINS_S),
            )
        recent.append(now_s)

    def logout(self, headers: Headers) -> None:
        """Ends the session of a request, if it has one."""
        self._logins.pop(token_hash(cookie_of(headers, COOKIE).encode()), None)

    def check_form(self, headers: Headers) -> None:
        """Refuses what no page of ours sends. Raises ``ForbiddenError`` or ``MediaTypeError``."""
        self._check_origin(headers)
        if content_type(headers) != _FORM_TYPE:
            raise MediaTypeError(f"form: is no {_FORM_TYPE.decode()}: send it from its page")

    async def form(self, scope: AsgiScope, receive: Receive, headers: Headers) -> dict[str, str]:
        """Returns the fields of a form that :meth:`check_form` accepts. Raises ``InvalidError``."""
        with self._bodies.buffer(self._gate.address(scope, headers)) as buffer:
            body = await buffer.read(receive, headers)
            if len(body) <= _SMALL_FORM:
                return _fields(body)
            return await self._threads.run(_fields, body)

    def check_mark(self, session: Session, form: Mapping[str, str]) -> None:
        """Raises ``ForbiddenError`` for a form that does not belong to this session."""
        given = form.get("form_mark", "").encode()
        if not hmac.compare_digest(given, session.form_mark.encode()):
            raise ForbiddenError(
                "form: does not belong to this session, or is older than the server: load its "
                "page again, and send it from there"
            )

    def cookie(self, scope: AsgiScope, headers: Headers, text: str) -> str:
        """Returns the header that sets the cookie, or with an empty text removes it."""
        told = headers.get(b"x-forwarded-proto", b"") if self._options.behind_proxy else b""
        secure = "; Secure" if b"https" in (told, scope.get("scheme", "").encode()) else ""
        gone = "" if text else "; Max-Age=0"
        return f"{COOKIE}={text}; Path=/; HttpOnly; SameSite=Strict{secure}{gone}"

    def _check_origin(self, headers: Headers) -> None:
        """Checks two headers that browsers set themselves, and that no page can change."""
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


def _fields(body: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict"
        )
    except ValueError as exc:
        raise InvalidError("form: is not well-formed: send it from its page") from exc
    return dict(pairs)


def cookie_of(headers: Headers, name: str) -> str:
    """Returns the value of a cookie; empty if there is none."""
    for pair in headers.get(b"cookie", b"").split(b";"):
        given, _, value = pair.strip().partition(b"=")
        if given == name.encode():
            return value.decode("latin-1")
    return ""


_TEXT_MAX = 4_096  # characters of a field


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, as pages see it."""

    path: Mapping[str, str]  # the parameters in the path
    query: Mapping[str, str]
    form: Mapping[str, str]  # empty for all but forms that were sent
    session: Session
    now_ms: int
    url: str  # path and query
    query_end: QueryEnd = field(default_factory=QueryEnd)  # ends its SQL when the client leaves

    def text(self, name: str, default: str = "") -> str:
        """Returns a field of the query or form, stripped of blanks. Raises ``InvalidError``."""
        return self.exact(name, default).strip()

    def exact(self, name: str, default: str = "") -> str:
        """Returns a field as it was sent: it selects events to erase. Raises ``InvalidError``."""
        return self.long(name, _TEXT_MAX, default)

    def long(self, name: str, most: int, default: str = "") -> str:
        """Returns a field as it was sent, with its own limit. Raises ``InvalidError``."""
        given = self.form.get(name, self.query.get(name, default))
        if len(given) > most:
            raise InvalidError(f"{name}: has more than {most} characters: give fewer")
        return given

    def number(self, name: str, default: int, most: int = 2**63 - 1) -> int:
        """Returns a field that is a whole number from 0 on. Raises ``InvalidError``."""
        given = self.text(name)
        if not given:
            return default
        if given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= most:
            return int(given)
        raise InvalidError(f"{name} `{given[:80]}`: give a whole number from 0 to {most}")


@dataclass(frozen=True, slots=True)
class ShownPage:
    """A page: a template and what it shows."""

    template: str
    values: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect to another page, with a cookie if one is set."""

    to: str
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """An answer that is not a page: JSON for the script, or a file."""

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = ShownPage | Redirect | Data
Handler = Callable[[Visit], Answer]


class TokenPages:
    """Pages of tokens. A token's text is shown once, to the person who created it."""

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
        return ShownPage("revoke.html", values)

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
        return ShownPage("tokens.html", {**values, **more})
