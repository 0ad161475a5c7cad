"""Plays events to an HTTP server: each lot in a POST of JSON lines, one after another.

Any 2xx response means that the piece arrived. No response, 408, 425, 429 and 5xx are retried, after
the time that the server asks for. Any other status ends the playback. A server may respond before
it has read the body and then close: its response is read although the body was not sent.

Each POST has an ``Idempotency-Key`` made of the playback, the number of its lot and a digest of its
body. A server that supports such keys stores nothing twice, also when the playback is resumed.
There is one exception. If events of the unfinished lot were deleted or updated before the resume,
its other events may be stored twice.

The server's token comes from ``TIDELOG_HTTP_TOKEN``. Redirects and proxies are not used.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
from urllib.parse import urlsplit

import pyarrow as pa

from tidelog.codec.event_json import batch_lines
from tidelog.connectors.sink import (
    PIECE_BYTES,
    PIECE_EVENTS,
    Lot,
    PlaybackSink,
    SinkContext,
    lot_pieces,
)
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.address import Address

__all__ = ["HttpPlaybackSink", "check_http", "open_http"]


TOKEN = "TIDELOG_HTTP_TOKEN"  # noqa: S105 - the name of a variable


_TIMEOUT_S = 30.0


_DIGEST_DIGITS = 16  # of a key, which may have 255 characters


_TOO_LARGE = 413


_FIX = "fix the address or the target"


_LOGIN = f"set {TOKEN} to a token that may append there"


_LOGIN_STATUS = {401, 403}


_PASSING_STATUS = {408, 425, 429}  # besides 5xx


_WAIT_MAX_S = 60.0  # longest wait a server may ask for


def check_http(address: Address) -> None:
    """Raises ``InvalidError`` for an address that is not valid for a request."""
    if not address.host:
        raise InvalidError(f"sink `{address.text}`: names no host: give https://host/path")
    if not address.text.isascii() or re.search(r"[\s\x00-\x1f\x7f]", address.text):
        raise InvalidError(
            f"sink `{address.text}`: has characters that a URL cannot hold: quote them"
        )


def open_http(address: Address, setting: SinkContext) -> HttpPlaybackSink:
    """Opens the sink at ``http(s)://host/path``. Connects with the first lot."""
    return HttpPlaybackSink(address, setting)


class HttpPlaybackSink:
    """One address. Messages contain only its host, because a path may be a secret."""

    lot_events = PIECE_EVENTS
    lot_bytes = PIECE_BYTES

    def __init__(
        self, address: Address, setting: SinkContext, timeout_s: float = _TIMEOUT_S
    ) -> None:
        parts = urlsplit(address.text)
        self._name = f"`{parts.scheme}://{parts.netloc}`"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._setting = setting
        self._headers = {"Content-Type": "application/x-ndjson", "User-Agent": "tidelog"}
        if token := setting.environ.get(TOKEN):
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection = http.client.HTTPSConnection(
                parts.netloc, timeout=timeout_s, context=context
            )

    def put(self, lot: Lot) -> None:
        for number, piece in enumerate(lot_pieces(lot.batch)):  # several, if values have grown
            body = batch_lines(piece)
            try:
                self._post(body, self._key(lot, number, body))
            except InvalidError as exc:
                raise _of_piece(exc, piece) from exc

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        self._connection.close()

    def _key(self, lot: Lot, number: int, body: bytes) -> str:
        """Returns a key for exactly these events: others under one key are refused forever."""
        digest = hashlib.sha256(body).hexdigest()[:_DIGEST_DIGITS]
        return f"{self._setting.id}-{lot.number}-{number}-{digest}"

    def _post(self, body: bytes, key: str) -> None:
        """Sends until it arrives. Raises ``UnavailableError`` after too many attempts."""
        delays = self._setting.backoff.delays_s(self._setting.random)
        while True:
            refused, wait_s = self._try(body, key)
            if refused is None:
                return
            delay_s = next(delays, None)
            if delay_s is None:
                raise UnavailableError(f"sink at {self._name}: {refused}: resume when it answers")
            self._setting.clock.sleep(max(delay_s, wait_s))

    def _try(self, body: bytes, key: str) -> tuple[str | None, float]:
        """Returns why it has not arrived, if so, and how long the server asks us to wait."""
        headers = {**self._headers, "Idempotency-Key": key}
        is_sent = True
        try:
            try:
                self._connection.request("POST", self._path, body, headers)
            except ConnectionError:  # closed while we sent: its response is still to be read
                if self._connection.sock is None:
                    raise
                is_sent = False
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self._connection.close()  # the next attempt opens a new connection
            return f"no answer ({' '.join(str(exc).split()) or type(exc).__name__})", 0.0
        if not is_sent:
            self._connection.close()
        if 200 <= answer.status < 300:
            return (None if is_sent else "closed the connection inside of a body"), 0.0
        said = f"answered {answer.status} {answer.reason}"
        if answer.status not in _PASSING_STATUS and answer.status < 500:
            hint = "give the address it leads to" if 300 <= answer.status < 400 else _FIX
            hint = _LOGIN if answer.status in _LOGIN_STATUS else hint
            raise InvalidError(f"sink at {self._name}: {said}: {hint}", status=answer.status)
        return said, _seconds(answer.headers.get("Retry-After", ""))


def _of_piece(refused: InvalidError, piece: pa.RecordBatch) -> InvalidError:
    """Returns the same error and, if a body is too large, which events are in it."""
    status = refused.context.get("status")
    if status != _TOO_LARGE:
        return refused
    topic, partition, offset = (
        piece.column(name)[0].as_py() for name in ("topic", "partition", "offset")
    )
    which = f"event at `{topic}/{partition}` offset {offset}"
    if piece.num_rows > 1:
        which = f"{piece.num_rows} events from `{topic}/{partition}` offset {offset} on"
    said = str(refused).removesuffix(f": {_FIX}")
    hint = "raise its limit for a body (`tidelog serve --body-max`), then play on"
    return InvalidError(f"{which}: {said}: {hint}", status=status)


def _seconds(text: str) -> float:
    return min(float(text), _WAIT_MAX_S) if text.isdecimal() else 0.0


_: type[PlaybackSink] = HttpPlaybackSink
