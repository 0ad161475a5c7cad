"""Translates the errors of obstore and boto3, once, for every remote store.

- Refused for good (rights, credentials, clock, region, size, bucket): ``InvalidError`` or
  ``NotFoundError`` at once, with what to do. A retry will not help.
- Refused for now (load, another conditional write in progress) or never sent: nothing was written,
  so it is ``UnavailableError``. A retry may help.
- Anything else, even a reply that is not the store's own: a write may have landed, so it is
  ``UnknownOutcomeError``; a read is ``UnavailableError``.
"""

from __future__ import annotations

import re

from obstore import exceptions

from tidelog.errors import (
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.store.base import not_found

try:
    from botocore import exceptions as sdk

    SDK_ERRORS: tuple[type[Exception], ...] = (sdk.ClientError, sdk.BotoCoreError)
except ImportError:  # boto3 comes with the `aws` extra
    SDK_ERRORS = ()

__all__ = [
    "SDK_ERRORS",
    "STORE_ERRORS",
    "broken_reply",
    "code_of",
    "gist",
    "is_beyond_the_end",
    "is_try_again",
    "status_of",
    "store_error",
]

STORE_ERRORS = (exceptions.BaseError, OSError)  # obstore raises Python's own if there is one

_NEVER_SENT = (
    "error trying to connect",
    "tcp connect error",
    "dns error",
    "Connection refused",
    "Could not connect to the endpoint",
    "Connect timeout on endpoint",
)
_PROVIDER = "External AWS credential provider"  # obstore's name for it
_PROVIDER_AWAY = (
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "CredentialRetrievalError",
    "EndpointConnectionError",
    "MetadataRetrievalError",
    "ReadTimeoutError",
)
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_TRY_AGAIN = {"ConditionalRequestConflict", "OperationAborted"}
# Refused with a 4xx status although the same request may succeed later: the body was late or
# damaged on its way, or the server is busy.
_PASSING = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "Throttling",
    "TooManyRequests",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_PASSING_STATUS = {408, 409, 425, 429}
_NO_CREDENTIALS = ("Unable to locate credentials", "Partial credentials", "Error when retrieving")


def store_error(url: str, key: str, exc: Exception, writes: bool = False) -> TidelogError:
    """Returns our error for a library's; ``writes`` if the call may have changed something."""
    if code_of(exc) == "NoSuchBucket" or "NoSuchBucket" in str(exc):
        return NotFoundError(
            f"store `{url}`: there is no such bucket: create it, or fix the URL", store=url
        )
    if isinstance(exc, FileNotFoundError) and not _is_foreign_404(exc):
        return not_found(key)
    if isinstance(exc, exceptions.InvalidPathError | exceptions.NotSupportedError):
        return InternalError(f"store `{url}`: `{key}`: {gist(exc)}")
    lasting = _lasting_error(url, key, exc)
    if lasting is not None:
        return lasting
    if writes and not (_was_refused(exc) or _never_sent(exc)):
        return UnknownOutcomeError(
            f"object `{key}`: no answer from `{url}` ({gist(exc)}): read it back, then decide"
        )
    return UnavailableError(f"store `{url}`: no answer ({gist(exc)}): try again")


def broken_reply(url: str, key: str, fault: str) -> UnavailableError:
    """Returns the error for a reply that is cut off, or that the store did not send."""
    return UnavailableError(
        f"store `{url}`: the reply for `{key}` is damaged: {fault}: try again, and check what "
        "stands between this machine and the store"
    )


def is_try_again(exc: Exception) -> bool:
    """Returns whether S3 refused a conditional write because another one was in progress."""
    return code_of(exc) in _TRY_AGAIN or (
        status_of(exc) == 409 and code_of(exc) != "BlobAlreadyExists"
    )


def is_beyond_the_end(exc: Exception) -> bool:
    """Returns whether a range began after the object's end; ignores numbers in ids and times."""
    return code_of(exc) == "InvalidRange" or status_of(exc) == 416


def code_of(exc: Exception) -> str | None:
    """Returns the server's code for an error; None if it sent none."""
    if SDK_ERRORS and isinstance(exc, sdk.ClientError):
        return exc.response["Error"].get("Code")
    said = re.search(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>", str(exc))
    return said[1] if said else None


def status_of(exc: Exception) -> int | None:
    """Returns the HTTP status of a refusal; None if there was none."""
    if SDK_ERRORS and isinstance(exc, sdk.ClientError):
        return exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    said = re.search(r"status(?: code)?: (\d{3})\b", str(exc))
    return int(said[1]) if said else None


def gist(exc: Exception) -> str:
    """Returns what a person needs of a long message: the server's own words, or the first line."""
    said = re.search("<Code>([^<]*)</Code>(?:<Message>([^<]*)</Message>)?", str(exc))
    if said:
        return ": ".join(part for part in said.groups() if part)[:200]
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(exc).__name__


def _lasting_error(url: str, key: str, exc: Exception) -> InvalidError | None:
    """Returns the error if a retry will not help, with its remedy; None if it may."""
    code, status, said = code_of(exc), status_of(exc), gist(exc)
    remedy = None
    if code in _CLOCK:
        what, remedy = "the time in our requests", "this machine's clock is wrong: set it"
    elif code in _EXPIRED:
        what = "these credentials"
        remedy = "they have expired: renew them, or use a profile or role that renews itself"
    elif code in _REGION or "incorrectly configured region" in str(exc):
        what = "this region"
        remedy = "the bucket is in another one: add ?region=… to the store's URL"
    elif code == "EntityTooLarge":
        what, remedy = f"the size of `{key}`", "write smaller objects: lower segment_bytes"
    elif _is_forbidden(exc, status) and not _never_sent(exc):
        what = f"access to `{key}`"
        remedy = "check the credentials in the environment and their rights"
    elif status is not None and 400 <= status < 500 and not _was_refused(exc) and status != 404:
        what, remedy = f"the request for `{key}`", "check the store's URL and its settings"
    if remedy is None:
        return None
    return InvalidError(f"store `{url}`: refuses {what} ({said}): {remedy}", store=url, code=code)


def _is_forbidden(exc: Exception, status: int | None) -> bool:
    kinds = (
        PermissionError,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
    )
    return (
        isinstance(exc, kinds)
        or status in (401, 403)
        or any(word in str(exc) for word in _NO_CREDENTIALS)
    )


def _never_sent(exc: Exception) -> bool:
    """Returns whether the store, or the provider of our credentials, was not reached."""
    said = str(exc)
    if _PROVIDER in said:
        return any(word in said for word in _PROVIDER_AWAY)
    return any(word in said for word in _NEVER_SENT)


def _was_refused(exc: Exception) -> bool:
    """Returns whether the server said that it did nothing, and may do it later."""
    return code_of(exc) in _PASSING | _TRY_AGAIN or status_of(exc) in _PASSING_STATUS


def _is_foreign_404(exc: Exception) -> bool:
    """Returns whether "not found" came with a body that is not the store's, or only a part."""
    said = re.search(r"404 Not Found: ?(.*)", str(exc))
    body = said[1].strip() if said else ""
    return bool(body) and code_of(exc) is None
