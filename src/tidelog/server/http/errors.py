"""Errors and answers: which error gets which status, and how both are sent."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Send

from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)

__all__ = [
    "EVERY_ANSWER",
    "STATUSES",
    "BusyError",
    "DisconnectedError",
    "ForbiddenError",
    "HeadError",
    "HttpError",
    "MediaTypeError",
    "MethodError",
    "Pair",
    "SlowError",
    "TooLargeError",
    "TooManyError",
    "UnauthorizedError",
    "answer",
    "answer_error",
    "encode",
    "shape",
    "status_of",
]

_RETRY_AFTER_S = 1  # where nothing better is known

Pair = tuple[bytes, bytes]

EVERY_ANSWER: tuple[Pair, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers that an answer has unless it has its own."""


class HttpError(TidelogError):
    """An error that only HTTP has a status for."""

    status = 400
    kind = "refused"


class UnauthorizedError(HttpError):
    """No token, or none that is known."""

    status = 401
    kind = "unauthorized"


class ForbiddenError(HttpError):
    """A token, or a page, that may not do this."""

    status = 403
    kind = "forbidden"


class SlowError(HttpError):
    """A body that came too slowly while others needed its place."""

    status = 408
    kind = "timeout"


class MethodError(HttpError):
    """A path that takes other methods."""

    status = 405
    kind = "method_not_allowed"


class TooLargeError(HttpError):
    """A body or an event beyond its limit."""

    status = 413
    kind = "too_large"


class MediaTypeError(HttpError):
    """A body of a kind that the server does not read."""

    status = 415
    kind = "unsupported_media_type"


class TooManyError(HttpError):
    """A client beyond its rate."""

    status = 429
    kind = "too_many_requests"


class HeadError(HttpError):
    """A URL or headers beyond their limit."""

    status = 431
    kind = "headers_too_large"


class BusyError(HttpError):
    """More than this server takes at once."""

    status = 503
    kind = "unavailable"


class DisconnectedError(Exception):
    """The client has closed the connection, so no answer is sent."""


STATUSES: tuple[tuple[type[TidelogError], int], ...] = (
    (ConflictError, 409),
    (FencedError, 409),
    (AlreadyExistsError, 409),
    (NotFoundError, 404),
    (InvalidError, 400),
    (PartialAppendError, 504),  # 503 always means that nothing was stored
    (UnavailableError, 503),
    (UnknownOutcomeError, 504),
    (TidelogError, 500),
)
_TOLD = {  # what clients are told where the message is about the inside of the home
    503: "the store or the catalog of this home is out of reach, or too slow: try again",
    504: "it is unknown whether this was stored: read back, or repeat it with an Idempotency-Key",
    500: "something is wrong on the server: its operator finds the reason on its standard error",
}
_OF_FORWARD = {
    503: "the target of this name is out of reach, or too slow: nothing was sent: try again",
    504: "it is unknown whether the target of this name has these events: send them again",
}
_PARTIAL = (
    "a part of the events is stored: those that have a position; the indexes of those that may be "
    "stored are in `unknown`; send only the others again"
)
_KEPT = ("positions", "unknown")  # of an error's context, where its message stays inside
_LIST = ("see `tidelog topic list`", "see `GET /topics`")  # a client may have no command line
_encoder = msgspec.json.Encoder(enc_hook=str)


def encode(value: Any) -> bytes:
    """Returns a value as JSON."""
    return _encoder.encode(value)


def status_of(error: TidelogError) -> int:
    """Returns the HTTP status of an error; 410 for offsets that were trimmed."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, NotFoundError) and "start" in error.context:
        return 410
    return next(status for kind, status in STATUSES if isinstance(error, kind))


def shape(error: TidelogError) -> dict[str, Any]:
    """Returns an error as it is shown to a client.

    An error that a client cannot fix has a general message, without names of the inside.
    """
    shown = error.as_json()
    status = status_of(error)
    if status >= 500 and not isinstance(error, HttpError):
        kept = {name: error.context[name] for name in _KEPT if name in error.context}
        told = _PARTIAL if isinstance(error, PartialAppendError) else _TOLD[status]
        if "forward" in error.context:
            told = _OF_FORWARD[status]
        shown["error"] |= {"message": told, "context": kept}
    shown["error"]["message"] = str(shown["error"]["message"]).replace(*_LIST)
    return shown


async def answer(send: Send, status: int, headers: list[Pair], body: bytes) -> None:
    """Sends a whole answer; adds its length to ``headers``."""
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, error: TidelogError) -> int:
    """Sends an error in its one shape. Returns its status."""
    status = status_of(error)
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    if status in (429, 503):
        wait_s = error.context.get("retry_after_s", _RETRY_AFTER_S)
        headers.append((b"retry-after", b"%d" % wait_s))
    elif status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif status == 405:
        headers.append((b"allow", str(error.context["allow"]).encode()))
    elif status in (408, 413, 431):  # the rest of the request is not waited for
        headers.append((b"connection", b"close"))
    await answer(send, status, headers, encode(shape(error)))
    return status
