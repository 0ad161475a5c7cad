"""Who may do what: tokens, and where there are none, this machine alone.

A home without tokens that listens on loopback is open to whoever is on the machine, but not to web
pages that a browser on it shows: a request that comes from a page, or that was led here by a name
of somebody else, is refused. The pixel is meant for pages, and asks for neither.

Tokens are read from the home every few seconds, and at once when an unknown one is shown, so a new
token works immediately and a revoked one for some seconds more. A home that cannot be reached
changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from starlette.types import Scope as AsgiScope

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.model.token import Scope, Token, token_hash
from tidelog.server.http.errors import ForbiddenError, TooManyError, UnauthorizedError
from tidelog.server.http.limits import Rates, client_of
from tidelog.server.options import ServeOptions

__all__ = ["REFRESH_S", "Gate"]

REFRESH_S = 5.0  # after which a revoked token is refused at the latest
_AT_MOST_EVERY_S = 1.0  # tokens are read for the sake of unknown ones
_SHOWN_MAX = 200  # bytes of what is looked at as a token
_HOSTS_KEPT = 100

Headers = Mapping[bytes, bytes]


class Gate:
    """Lets requests in, or refuses them."""

    def __init__(
        self,
        options: ServeOptions,
        read_tokens: Callable[[], list[Token]],
        pool: Executor,
        clock: Clock,
    ) -> None:
        self._options = options
        self._read_tokens = read_tokens
        self._pool = pool
        self._clock = clock
        self._rates = Rates(options.rate, clock)
        self._tokens: dict[str, Token] = {}
        self._read_s = float("-inf")
        self._hosts: set[bytes] = set()  # names that have been found to be this machine

    @property
    def has_tokens(self) -> bool:
        """Whether the home has any."""
        return bool(self._tokens)

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return not self._tokens and self._options.is_loopback

    async def refresh(self) -> None:
        """Read the tokens again. Raises where the home cannot be reached."""
        loop = asyncio.get_running_loop()
        self._read_s = self._clock.monotonic_s()
        tokens = await loop.run_in_executor(self._pool, self._read_tokens)
        self._tokens = {token.sha256: token for token in tokens}

    def address(self, scope: AsgiScope, headers: Headers) -> str:
        """Where a request comes from; behind a proxy, what the proxy says."""
        if self._options.behind_proxy:
            told = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()
            if told:
                return told[:64].decode("latin-1")
        client = scope.get("client")
        return client[0] if client else ""

    async def admit(
        self, scope: AsgiScope, headers: Headers, wanted: Scope, shown: str | None = None
    ) -> Token | None:
        """Let a request in that may do this: by which token, or None where none is needed.

        ``shown`` is a token from its query, or from a cookie of the console.

        ``UnauthorizedError``, ``ForbiddenError``, ``TooManyError``.
        """
        if not self._tokens and self._options.is_loopback:
            self._check_local(headers)
            self._count(client_of(self.address(scope, headers)))
            return None
        token = await self._token(headers, shown)
        if token is None:
            self._count(client_of(self.address(scope, headers)))
            raise UnauthorizedError(
                "request: shows no token that is known here: send `Authorization: Bearer TOKEN`, "
                "made by `tidelog token create`"
            )
        self._count(token.id)
        if wanted not in token.scopes:
            raise ForbiddenError(
                f"token `{token.id}`: may not {wanted}: use one that was made with --{wanted}",
                token=token.id,
            )
        return token

    def admit_page(self, scope: AsgiScope, headers: Headers) -> None:
        """Let in whatever a web page sends. ``TooManyError``."""
        self._count(client_of(self.address(scope, headers)))

    def _count(self, client: str) -> None:
        wait_s = self._rates.take(client)
        if wait_s:
            raise TooManyError(
                f"client: sends more than {self._options.rate:g} requests a second: "
                f"wait {wait_s} s",
                retry_after_s=wait_s,
            )

    async def _token(self, headers: Headers, shown: str | None) -> Token | None:
        kind, _, text = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            text = b"" if shown is None else shown.encode("utf-8", "replace")
        text = text.strip()
        if not text or len(text) > _SHOWN_MAX:
            return None
        hashed = token_hash(text)
        found = self._tokens.get(hashed)
        if found is None and self._clock.monotonic_s() - self._read_s > _AT_MOST_EVERY_S:
            try:
                await self.refresh()
            except TidelogError:
                return None  # as unknown as before
            found = self._tokens.get(hashed)
        return found

    def _check_local(self, headers: Headers) -> None:
        """Refuse web pages, as they can reach loopback through the browser that shows them."""
        host = headers.get(b"host", b"")
        if host not in self._hosts:
            if not _is_local(host, self._options.host):
                raise ForbiddenError(
                    "request: is for another host: without tokens this server answers to "
                    "localhost alone: make one by `tidelog token create`"
                )
            if len(self._hosts) < _HOSTS_KEPT:
                self._hosts.add(host)
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != host:
            raise ForbiddenError(
                "request: comes from a web page of another site: without tokens this server "
                "takes only its pixel from there: make one by `tidelog token create`"
            )


def _is_local(host: bytes, own: str) -> bool:
    """Whether a ``Host`` header names this machine by a name that nobody else can lead here."""
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
