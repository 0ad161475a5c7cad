"""Who may do what: tokens with scopes, and a home that never had one, on this machine alone.

A server is open only if all of this holds: the home has never had a token, the server listens on
loopback, and no proxy is in front of it. An open server answers programs on the machine, but not
web pages that a browser on it shows: a request from a page of another site, through a proxy, or led
here by a name of another host is refused. Only topics with ``--public-pixel`` take pixels of pages.

Tokens are read from the home every few seconds by a thread of their own, and at once when an
unknown one is shown: a new token works immediately, and a revoked one for some seconds more. Reads
end in the order in which they began, so no older read brings a revoked token back. A home that
cannot be reached changes nothing. Once closed, a server stays closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from starlette.types import Scope as AsgiScope

from tidelog.clock import Clock
from tidelog.coordination.tokens import KnownTokens
from tidelog.errors import TidelogError
from tidelog.model.token import Scope, Token, token_hash
from tidelog.server.http.errors import ForbiddenError, TooManyError, UnauthorizedError
from tidelog.server.http.limits import CLIENT, CLIENT_SHARE, RATE, Rates, client_of
from tidelog.server.options import ServeOptions

__all__ = ["ADMISSION", "HOME", "REFRESH_S", "SOME_TOPIC", "Admission", "Gate", "bearer_of"]

REFRESH_S = 5.0  # after which a revoked token is refused at the latest
ADMISSION = "tidelog.admission"  # in the scope of a request
HOME = None  # in place of a topic: the home as a whole
# In place of a topic: any that the token may; the answer has only those. No path names this one.
SOME_TOPIC = "/"
_AT_MOST_EVERY_S = 1.0  # tokens are read for the sake of unknown ones
_SHOWN_MAX = 200  # bytes of what is looked at as a token
_TEXT = re.compile(rb"tidelog_[0-9a-f]{12}_[0-9a-f]{64}")  # of a token
_UNKNOWN_MAX = 100  # requests that wait for a read, a quarter of one address; more are refused
_HOSTS_KEPT = 100
_FORWARDED = frozenset(  # headers that proxies add; no local program has a reason to
    (
        b"cdn-loop",
        b"fastly-client-ip",
        b"forwarded",
        b"true-client-ip",
        b"via",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-real-ip",
    )
)
_FORWARDED_KINDS = (b"cf-", b"x-envoy-", b"x-forwarded", b"x-original-")  # how others begin
_WITH_PORT = re.compile(rb"\[([0-9A-Fa-f:.%]+)\](?::[0-9]+)?|([0-9.]+):[0-9]+")
_OWN_SITE = (None, b"same-origin", b"none")  # none: typed by a person

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Admission:
    """How a request was let in."""

    token: Token | None  # None: the server is open, or the topic's pixel is public
    client: str  # whose limits it counts towards: a token's id, or an address
    is_live: Callable[[], bool] | None = None  # whether its session still is; None: it has none
    is_public: bool = False  # a public pixel's: it needs no token, then or later

    @property
    def who(self) -> str:
        """Returns the name for audits."""
        return f"token {self.token.id}" if self.token is not None else self.client or "http"

    def allows(self, scope: Scope, topic: str | None) -> bool:
        """Returns whether it covers this too."""
        return self.token is None or self.token.allows(scope, topic)


class Gate:
    """Lets requests in, or refuses them."""

    def __init__(
        self, options: ServeOptions, read_tokens: Callable[[], KnownTokens], clock: Clock
    ) -> None:
        self._options = options
        self._read_tokens = read_tokens
        self._pool = ThreadPoolExecutor(1, "tidelog-tokens")
        self._clock = clock
        self._rate = RATE if options.rate is None else options.rate
        self._rates = Rates(self._rate, clock)
        self._tokens: dict[str, Token] = {}
        self._uses: dict[str, int] = {}  # when tokens were used since that was last stored
        self._is_closed = not options.may_be_open
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None  # a read that has not begun
        self._unknown: Counter[str] = Counter()  # that wait for a read, by address
        self._hosts: set[bytes] = set()  # names that have been found to be this machine

    @property
    def has_tokens(self) -> bool:
        """Returns whether the home has any token that may be used now."""
        now_ms = self._clock.now_ms()
        return any(not token.is_expired(now_ms) for token in self._tokens.values())

    @property
    def is_open(self) -> bool:
        """Returns whether no token is needed."""
        return not self._is_closed

    async def refresh(self) -> None:
        """Reads the tokens again. Raises if the home cannot be reached."""
        loop = asyncio.get_running_loop()
        self._read_s = self._clock.monotonic_s()
        known = await loop.run_in_executor(self._pool, self._read_tokens)
        self._tokens = {token.sha256: token for token in known.tokens}
        self._is_closed = self._is_closed or known.is_closed

    def stay_closed(self) -> None:
        """Requires tokens from now on, although the home shows none."""
        self._is_closed = True

    def now_ms(self) -> int:
        """Returns the time by the server's clock."""
        return self._clock.now_ms()

    def take_uses(self) -> dict[str, int]:
        """Returns when tokens were used since the last call, by their ids."""
        taken, self._uses = self._uses, {}
        return taken

    def put_back_uses(self, uses: Mapping[str, int]) -> None:
        """Notes uses that could not be stored, for the next call."""
        self._uses = {**uses, **self._uses}

    def close(self) -> None:
        """Stops reading tokens, without waiting for a read."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def address(self, scope: AsgiScope, headers: Headers) -> str:
        """Returns where a request comes from; behind a proxy, what the proxy says."""
        if self._options.behind_proxy:
            told = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()
            if told:
                found = _WITH_PORT.fullmatch(told)  # as some proxies tell it
                return (found[found.lastindex or 0] if found else told)[:64].decode("latin-1")
        client = scope.get("client")
        return client[0] if client else ""

    async def admit(
        self,
        scope: AsgiScope,
        headers: Headers,
        wanted: Scope,
        topic: str | None,
        shown: str | None = None,
    ) -> Admission:
        """Admits a request that may do this to a topic (or ``HOME``, or ``SOME_TOPIC``).

        ``shown`` is a token from a query or a form; a header wins.

        Raises ``UnauthorizedError``, ``ForbiddenError`` or ``TooManyError``.
        """
        if not self._is_closed:
            return self._admit_local(scope, headers)
        token = await self._token(scope, headers, shown)
        return self._admit_token(scope, headers, token, (wanted, topic))

    def admit_session(
        self, scope: AsgiScope, headers: Headers, sha256: str, wanted: Scope
    ) -> Admission:
        """Admits a request of a console's session, by the hash of the token that began it.

        Raises ``UnauthorizedError``, ``ForbiddenError`` or ``TooManyError``.
        """
        if not self._is_closed:
            return self._admit_local(scope, headers)
        return self._admit_token(scope, headers, self._tokens.get(sha256), (wanted, HOME))

    def admit_page(self, scope: AsgiScope, headers: Headers) -> Admission:
        """Admits whatever a web page sends to a public pixel. Raises ``TooManyError``."""
        client = client_of(self.address(scope, headers))
        self._count(client)
        return replace(_admitted(None, client), is_public=True)

    def count_visit(self, scope: AsgiScope, headers: Headers) -> None:
        """Counts a request that needs no token, by its address. Raises ``TooManyError``."""
        if self._is_closed or self._options.rate is not None:
            self._count(client_of(self.address(scope, headers)))

    def check(self, admission: Admission) -> None:
        """Raises ``UnauthorizedError`` if what admitted a request no longer exists.

        Answers that last, such as tails, call this again and again.
        """
        if admission.is_live is not None and not admission.is_live():
            raise UnauthorizedError("console: this session has ended: log in again")
        token = admission.token
        if token is None:
            if self._is_closed and not admission.is_public:
                raise UnauthorizedError("request: this server asks for tokens now: show one")
            return
        found = self._tokens.get(token.sha256)
        if found is None or found.is_expired(self._clock.now_ms()):
            raise UnauthorizedError(f"token `{token.id}`: was revoked, or has expired")

    def _admit_local(self, scope: AsgiScope, headers: Headers) -> Admission:
        self._check_local(scope, headers)
        client = client_of(self.address(scope, headers))
        self.count_visit(scope, headers)  # programs of the machine have a limit only on request
        return _admitted(None, client)

    def _admit_token(
        self,
        scope: AsgiScope,
        headers: Headers,
        token: Token | None,
        wanted: tuple[Scope, str | None],
    ) -> Admission:
        now_ms = self._clock.now_ms()
        right, topic = wanted
        if token is None or token.is_expired(now_ms):
            self._count(client_of(self.address(scope, headers)))
            where = "`?token=TOKEN` or " if right == "pixel" else ""
            raise UnauthorizedError(
                "request: has no token, or one that is unknown or expired: send "
                f"{where}`Authorization: Bearer TOKEN`; "
                f"`tidelog token create --{right}` creates one"
            )
        if right == "pixel":  # all visitors of a page share its token
            self._count(f"{token.id} {client_of(self.address(scope, headers))}")
        else:
            self._count(token.id)
        may = token.allows_some(right) if topic == SOME_TOPIC else token.allows(right, topic)
        if not may:
            where = (
                "" if topic == SOME_TOPIC else f" topic `{topic[:80]}`" if topic else " the home"
            )
            name = f" {topic[:80]}" if topic and topic != SOME_TOPIC else ""
            alone = "" if topic else " without a topic, which is for all"
            raise ForbiddenError(
                f"token `{token.id}`: has no scope `{right}` for{where or ' any topic'}: use one "
                f"created with `--{right}{name}`{alone}",
                token=token.id,
            )
        self._uses[token.id] = now_ms
        return _admitted(token, token.id)

    def _count(self, client: str) -> None:
        wait_s = self._rates.take(client)
        if wait_s:
            raise TooManyError(
                f"client: sends more than {self._rate:g} requests a second: wait {wait_s} s",
                retry_after_s=wait_s,
            )

    async def _token(self, scope: AsgiScope, headers: Headers, shown: str | None) -> Token | None:
        text = bearer_of(headers)
        if text is None:
            text = b"" if shown is None else shown.encode("utf-8", "replace")
        text = text.strip()
        if not text or len(text) > _SHOWN_MAX:
            return None
        hashed = token_hash(text)
        found = self._tokens.get(hashed)
        if found is None and _TEXT.fullmatch(text):
            client = client_of(self.address(scope, headers))
            if not self._may_wait(client):
                return None
            self._unknown[client] += 1
            try:
                await self._read_again()
            except TidelogError:
                return None  # as unknown as before
            finally:
                self._unknown[client] -= 1
                self._unknown += Counter()  # drops those that are 0
            found = self._tokens.get(hashed)
        return found

    def _may_wait(self, client: str) -> bool:
        """Returns whether one more request of this address may wait for a read of tokens."""
        share = _UNKNOWN_MAX // CLIENT_SHARE
        return self._unknown[client] < share and self._unknown.total() < _UNKNOWN_MAX

    async def _read_again(self) -> None:
        """Waits for a read of tokens that begins from now on; requests share it."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._refresh_later())
        await asyncio.shield(self._reading)

    async def _refresh_later(self) -> None:
        pause_s = self._read_s + _AT_MOST_EVERY_S - self._clock.monotonic_s()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._reading = None  # requests that come from now on need another read
        await self.refresh()

    def _check_local(self, scope: AsgiScope, headers: Headers) -> None:
        """Refuses proxies, and web pages, which reach loopback through their browser."""
        if _is_forwarded(headers) or _is_from_nginx(scope, headers):
            raise ForbiddenError(
                "request: comes through a proxy, and this server has no tokens: create one by "
                "`tidelog token create`, and start it with --behind-proxy"
            )
        host = headers.get(b"host", b"")
        if host not in self._hosts:
            if not _is_local(host, self._options.host):
                raise ForbiddenError(
                    "request: is for another host: without tokens this server answers to "
                    "localhost alone: create one by `tidelog token create`"
                )
            if len(self._hosts) < _HOSTS_KEPT:
                self._hosts.add(host)
        origin = headers.get(b"origin")
        foreign = origin is not None and origin.partition(b"://")[2] != host
        if headers.get(b"sec-fetch-site") not in _OWN_SITE and not _is_visit(scope, headers):
            foreign = True
        if foreign:
            raise ForbiddenError(
                "request: comes from a web page of another site: without tokens this server takes "
                "only pixels of topics with --public-pixel from there: create a token by `tidelog "
                "token create`"
            )


def bearer_of(headers: Headers) -> bytes | None:
    """Returns what a request shows as a token in its header; None for other kinds, or none."""
    kind, _, text = headers.get(b"authorization", b"").partition(b" ")
    return text if kind.lower() == b"bearer" else None


def _admitted(token: Token | None, client: str) -> Admission:
    """Returns an admission; from now on the task of the request works for this client."""
    CLIENT.set(client)
    return Admission(token, client)


def _is_visit(scope: AsgiScope, headers: Headers) -> bool:
    """Returns whether a person follows a link to a page of the console; that changes nothing."""
    path: str = scope["path"]
    return (
        scope["method"] == "GET"
        and (path == "/" or path.startswith("/console"))
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest") == b"document"
    )


def _is_forwarded(headers: Headers) -> bool:
    """Returns whether a request has a header that a proxy adds."""
    if not _FORWARDED.isdisjoint(headers):
        return True
    return any(name.startswith(_FORWARDED_KINDS) for name in headers)


def _is_from_nginx(scope: AsgiScope, headers: Headers) -> bool:
    """Returns whether it looks like nginx's default forward: our own host, and no other trace."""
    return scope.get("http_version") == "1.0" and headers.get(b"connection", b"") == b"close"


def _is_local(host: bytes, own: str) -> bool:
    """Returns whether a ``Host`` header has a name of this machine that no other can have."""
    if not host:
        return True  # HTTP/1.0; no browser sends that
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name.lower() in ("localhost", own.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
