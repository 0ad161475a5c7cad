"""Stores on S3, Google Cloud Storage and Azure, through obstore.

obstore's own retries are switched off: after a lost reply they would mistake the first attempt's
object for another writer's. ``RetryingStore`` retries instead, and reads back what is unknown.

Copies are create-only on the server: on S3 by a multipart upload whose completion is conditional,
which Amazon and the gateways that we test against honor.

The timeout of a request depends on its size: 10 s, and a second more for each MiB, rounded up to 10
s times a power of two. A read also ends when nothing arrives for 10 s. A reply counts only as a
whole: it must have as many bytes as it says, and the etag that every store sends. Objects are read
by range even if all of one is wanted: then the reply says how large the object is, too.

**Errors** of obstore and boto3 are translated here, once, for every remote store:

- Refused for good (rights, credentials, clock, region, size, bucket): ``InvalidError`` or
  ``NotFoundError`` at once, with what to do. A retry will not help.
- Refused for now (load, another conditional write in progress) or never sent: nothing was written,
  so it is ``UnavailableError``. A retry may help.
- Anything else, even a reply that is not the store's own: a write may have landed, so it is
  ``UnknownOutcomeError``; a read is ``UnavailableError``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from tidelog.errors import (
    InternalError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model import limits
from tidelog.model.address import Address
from tidelog.store.base import (
    ObjectInfo,
    Store,
    Upload,
    check_data,
    check_key,
    check_range,
    exists_already,
    not_found,
    replaced_meanwhile,
)

__all__ = [
    "CONNECT_TIMEOUT_S",
    "NO_RETRY",
    "REQUEST_TIMEOUT_S",
    "SDK_ERRORS",
    "Clients",
    "ObjectStore",
    "RemoteStore",
    "broken_reply",
    "bucket_of",
    "code_of",
    "gist",
    "open_azure",
    "open_google",
    "prefix_of",
    "reporting",
    "store_error",
]

try:
    from botocore import exceptions as sdk

    SDK_ERRORS: tuple[type[Exception], ...] = (sdk.ClientError, sdk.BotoCoreError)
except ImportError:  # boto3 comes with the `aws` extra
    SDK_ERRORS = ()


STORE_ERRORS = (exceptions.BaseError, OSError)  # obstore raises Python's own if there is one

_NEVER_SENT = (
    "error trying to connect",
    "tcp connect error",
    "dns error",
    "Connection refused",
    "Could not connect to the endpoint",
    "Connect timeout on endpoint",
)
_WHOLE_INSTEAD = "non-partial response"  # in obstore's words
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
            f"store `{url}`: the bucket does not exist: create it, or fix the URL", store=url
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
        "is between this machine and the store"
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


CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0  # of a small request, and of the silence in a large reply
_BYTES_PER_S = 1 << 20  # a slow line: large requests get a second more for each of these
_COPY_TIMEOUT_S = 60.0  # the server moves the bytes; it replies when it is done
NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_LIST_CHUNK = 1_000

ObjectStore = S3Store | GCSStore | AzureStore
_Connect = Callable[[Any], ObjectStore]  # from client options to a client


def open_google(address: Address, _environ: Mapping[str, str]) -> RemoteStore:
    """Opens ``gs://bucket/prefix``, with application default credentials."""
    address.take_options(())

    def connect(client_options: Any) -> ObjectStore:
        with reporting(address.text):
            return GCSStore(
                bucket_of(address),
                prefix=prefix_of(address),
                client_options=client_options,
                retry_config=NO_RETRY,
            )

    return RemoteStore(Clients(connect, {}), address.text)


def open_azure(address: Address, _environ: Mapping[str, str]) -> RemoteStore:
    """Opens ``az://container/prefix?account=NAME&endpoint=…``."""
    options = address.take_options(("account", "endpoint"))
    endpoint = options.get("endpoint", "")
    config: Any = {}
    if "account" in options:
        config["account_name"] = options["account"]
    if endpoint:
        config["endpoint"] = endpoint

    def connect(client_options: Any) -> ObjectStore:
        with reporting(address.text):
            return AzureStore(
                bucket_of(address),
                prefix=prefix_of(address),
                config=config,
                client_options=client_options,
                retry_config=NO_RETRY,
            )

    return RemoteStore(
        Clients(connect, {"allow_http": endpoint.startswith("http://")}), address.text
    )


class _Runtime:
    """Remembers the process of obstore's threads, of which all clients share one set.

    A fork does not copy threads, so any request of a child would wait forever, even one by a client
    that the child has created.
    """

    def __init__(self) -> None:
        self._process = 0

    def check(self) -> None:
        """Raises ``InvalidError`` in a process that was forked from one that had clients."""
        process = os.getpid()
        if not self._process:
            self._process = process
        if self._process != process:
            raise InvalidError(
                "remote store: this process was forked from one that had a remote store open, and "
                "its threads are not there after a fork: start the process with multiprocessing's "
                "`spawn` or `forkserver`, or open remote stores only after the fork"
            )


_runtime = _Runtime()


class Clients:
    """obstore's clients by timeout: each has a fixed one, so there is a client for each in use."""

    def __init__(self, connect: _Connect, options: Mapping[str, Any]) -> None:
        self._connect = connect
        self._options = options
        self._made: dict[tuple[float, bool], ObjectStore] = {}
        self.for_size(0)  # reports a wrong address or certificate at once

    def for_size(self, size: int, reads: bool = False) -> ObjectStore:
        """Returns the client for a request that moves this many bytes, or ``reads`` them."""
        timeout_s = REQUEST_TIMEOUT_S
        while timeout_s < REQUEST_TIMEOUT_S + size / _BYTES_PER_S:
            timeout_s *= 2
        return self.within(timeout_s, reads)

    def within(self, timeout_s: float, reads: bool = False) -> ObjectStore:
        """Returns the client with this timeout. Raises ``InvalidError`` after a fork."""
        _runtime.check()
        found = self._made.get((timeout_s, reads))
        if found is None:
            options = {
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                **self._options,
            }
            if reads:
                options["read_timeout"] = timedelta(seconds=REQUEST_TIMEOUT_S)
            found = self._made[timeout_s, reads] = self._connect(options)
        return found


class RemoteStore:
    """Objects in a bucket, below a prefix."""

    def __init__(self, clients: Clients, url: str, bucket: Any = None) -> None:
        self._clients = clients
        self._url = url
        self._bucket = bucket  # an ``S3Bucket`` on S3

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        check_data(key, data)
        client = self._clients.for_size(len(data))
        try:
            marks = self._marks(key)
            done = obstore.put(client, key, data, mode="create", use_multipart=False, **marks)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as exc:
            raise self._exists(key, exc) from exc
        except STORE_ERRORS as exc:
            raise self._error(key, exc, writes=True) from exc
        return done["e_tag"] or ""

    def replace(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        check_data(key, data)
        client = self._clients.for_size(len(data))
        try:
            how: Any = {"mode": {"e_tag": etag}, "use_multipart": False, **self._marks(key)}
            done = obstore.put(client, key, data, **how)
        except exceptions.PreconditionError as exc:
            found = self.head(key).etag
            raise replaced_meanwhile(key, etag, found) from exc
        except STORE_ERRORS as exc:
            raise self._error(key, exc, writes=True) from exc
        return done["e_tag"] or ""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        if end == start:
            self.head(key)
            return b""
        size = limits.OBJECT_BYTES_MAX if end is None else end - start
        client = self._clients.for_size(size, reads=True)
        # A reply to a range says how large the object is, so that a short one is noticed.
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        try:
            found = obstore.get(client, key, options=options)
            data = bytes(found.bytes())
        except STORE_ERRORS as exc:
            if is_beyond_the_end(exc):
                return self._beyond_the_end(key, start)
            if (start, end) == (0, None) and _WHOLE_INSTEAD in str(exc):
                return self._get_whole(client, key)
            raise self._error(key, exc) from exc
        self._check_reply(key, found.meta)
        total = found.meta["size"]
        wanted = (start, total if end is None else min(end, total))
        if tuple(found.range) != wanted or len(data) != wanted[1] - wanted[0]:
            raise broken_reply(
                self._url,
                key,
                f"expected bytes {wanted[0]} to {wanted[1]}, found {len(data)} of "
                f"{found.range[0]} to {found.range[1]}",
            )
        return data

    def _get_whole(self, client: ObjectStore, key: str) -> bytes:
        """Returns an object of a server that knows no range of a whole one."""
        try:
            found = obstore.get(client, key)
            data = bytes(found.bytes())
        except STORE_ERRORS as exc:
            raise self._error(key, exc) from exc
        self._check_reply(key, found.meta)
        if len(data) != found.meta["size"]:
            fault = f"expected {found.meta['size']} bytes, found {len(data)}"
            raise broken_reply(self._url, key, fault)
        return data

    def _beyond_the_end(self, key: str, start: int) -> bytes:
        """Returns nothing if the object ends before ``start``, as the store says."""
        size = self.head(key).size
        if size > start:
            raise broken_reply(
                self._url, key, f"{start} is beyond its end, and it has {size} bytes"
            )
        return b""

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            meta = obstore.head(self._clients.for_size(0), key)
        except STORE_ERRORS as exc:
            raise self._error(key, exc) from exc
        self._check_reply(key, meta)
        return _info(meta)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        if self._bucket is not None:
            yield from self._bucket.list(prefix, start_after)
            return
        folder, _, _ = prefix.rpartition("/")
        try:
            chunks = obstore.list(
                self._clients.for_size(0),
                folder or None,
                offset=start_after or None,
                chunk_size=_LIST_CHUNK,
            )
            for chunk in chunks:
                for meta in chunk:
                    info = _info(meta)
                    if info.key.startswith(prefix) and info.key > start_after:
                        yield info
        except STORE_ERRORS as exc:
            raise self._error(prefix or "/", exc) from exc

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        if not wanted:
            return
        try:
            obstore.delete(self._clients.for_size(0), wanted)
        except FileNotFoundError:
            self._delete_each(wanted)
        except STORE_ERRORS as exc:
            raise self._error(wanted[0], exc) from exc

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        check_key(target)
        try:
            if self._marks(target):  # obstore's copies have none of these
                self._bucket.copy(source, target)
                return
            client = self._clients.within(_COPY_TIMEOUT_S)
            obstore.copy(client, source, target, overwrite=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as exc:
            raise self._exists(target, exc) from exc
        except FileNotFoundError as exc:
            raise self._error(source, exc, writes=True) from exc
        except SDK_ERRORS as exc:
            if code_of(exc) in ("NoSuchKey", "404"):
                raise not_found(source) from exc
            if status_of(exc) == 412 or is_try_again(exc):
                raise self._exists(target, exc) from exc
            raise self._error(target, exc, writes=True) from exc
        except STORE_ERRORS as exc:
            raise self._error(target, exc, writes=True) from exc

    def presign(self, key: str, expires_s: int) -> str:
        check_key(key)
        if not 0 < expires_s <= limits.PRESIGN_SECONDS_MAX:
            raise InvalidError(
                f"object `{key}`: a URL for {expires_s} s: give 1 to {limits.PRESIGN_SECONDS_MAX} s"
            )
        try:
            client = self._clients.for_size(0)
            return obstore.sign(client, "GET", key, timedelta(seconds=expires_s))
        except STORE_ERRORS as exc:
            raise self._error(key, exc) from exc

    def _marks(self, key: str) -> dict[str, Any]:
        """Returns the storage class and tags of an object, as obstore takes them."""
        return {} if self._bucket is None else self._bucket.attributes_of(key)

    def uploads(self) -> Iterator[Upload]:
        """Yields multipart uploads on S3. Google's and Azure's stores get objects in one request.

        Their copies are one request of the server too.
        """
        yield from () if self._bucket is None else self._bucket.uploads()

    def abort_uploads(self, before_ms: int) -> int:
        return 0 if self._bucket is None else int(self._bucket.abort_uploads(before_ms))

    def _delete_each(self, keys: Iterable[str]) -> None:
        """Deletes objects one by one, for a store that counts a missing object as an error."""
        for key in keys:
            try:
                obstore.delete(self._clients.for_size(0), key)
            except FileNotFoundError:
                continue
            except STORE_ERRORS as exc:
                raise self._error(key, exc) from exc

    def _exists(self, key: str, exc: Exception) -> TidelogError:
        """Returns the error of a refused create: the object exists, or another write is in
        progress.
        """
        if self._bucket is not None and is_try_again(exc):
            return self._error(key, exc, writes=True)
        return exists_already(key)

    def _check_reply(self, key: str, meta: Any) -> None:
        if not meta["e_tag"]:
            raise broken_reply(self._url, key, "it has no etag, which every store sends")

    def _error(self, key: str, exc: Exception, writes: bool = False) -> TidelogError:
        return store_error(self._url, key, exc, writes)


def bucket_of(address: Address) -> str:
    if not address.host or address.port is not None:
        raise InvalidError(
            f"store `{address.text}`: names no bucket: give {address.scheme}://bucket/prefix"
        )
    return address.host


def prefix_of(address: Address) -> str | None:
    prefix = address.path.strip("/")
    if prefix:
        check_key(prefix)
    return prefix or None


@contextlib.contextmanager
def reporting(text: str) -> Iterator[None]:
    try:
        yield
    except STORE_ERRORS as exc:
        raise InvalidError(f"store `{text}`: {gist(exc)}: fix the URL or the environment") from exc


def _info(meta: Any) -> ObjectInfo:
    modified_ms = int(meta["last_modified"].timestamp() * 1000)
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", modified_ms)


_: type[Store] = RemoteStore
