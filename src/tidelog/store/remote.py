"""Stores behind S3, Google Cloud Storage and Azure, through obstore.

obstore's own repeats are switched off: after a lost reply they would take the first attempt's
object for somebody else's. ``RetryingStore`` repeats instead, and reads back what is unsure.

Copies are create-only on the server: on S3 by a multipart upload whose completion is conditional,
which Amazon and the gateways that we test against honour.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
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
    check_data,
    check_key,
    check_range,
    exists_already,
    not_found,
    replaced_meanwhile,
)

try:
    from obstore.auth.boto3 import Boto3CredentialProvider
except ImportError:  # boto3 comes with the `aws` extra
    Boto3CredentialProvider = None  # type: ignore[assignment,misc]

__all__ = ["RemoteStore", "open_azure", "open_google", "open_s3"]

_TIMEOUT = timedelta(seconds=60)  # one request, 8 MiB over a slow line
_CONNECT_TIMEOUT = timedelta(seconds=5)
_NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_LIST_CHUNK = 1_000
_ERRORS = (exceptions.BaseError, OSError)  # obstore raises Python's own where there is one
_REFUSED = ("401 Unauthorized", "403 Forbidden")
_NEVER_SENT = ("error trying to connect", "tcp connect error", "dns error", "Connection refused")


def open_s3(address: Address, environ: Mapping[str, str]) -> RemoteStore:
    """``s3://bucket/prefix?region=…&endpoint=…&path_style=true|false``."""
    options = address.take_options(("endpoint", "path_style", "region"))
    endpoint = options.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL")
    path_style = options.get("path_style", "true" if endpoint else "false")
    if path_style not in ("true", "false"):
        raise InvalidError(
            f"store `{address.text}`: path_style is `{path_style}`: give true or false"
        )
    region = options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    config: Any = {"region": region or "us-east-1", "copy_if_not_exists": "multipart"}
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidError(f"store `{address.text}`: endpoint `{endpoint}` is no http(s) URL")
        config["endpoint"] = endpoint
    with _refused(address.text):
        store = S3Store(
            _bucket(address),
            prefix=_prefix(address),
            config=config,
            virtual_hosted_style_request=path_style == "false",
            client_options=_client_options(bool(endpoint and endpoint.startswith("http://"))),
            retry_config=_NO_RETRY,
            credential_provider=_aws_credentials(address),
        )
    return RemoteStore(store, address.text)


def open_google(address: Address, _environ: Mapping[str, str]) -> RemoteStore:
    """``gs://bucket/prefix``, with application default credentials."""
    address.take_options(())
    with _refused(address.text):
        store = GCSStore(
            _bucket(address),
            prefix=_prefix(address),
            client_options=_client_options(False),
            retry_config=_NO_RETRY,
        )
    return RemoteStore(store, address.text)


def open_azure(address: Address, _environ: Mapping[str, str]) -> RemoteStore:
    """``az://container/prefix?account=NAME&endpoint=…``."""
    options = address.take_options(("account", "endpoint"))
    endpoint = options.get("endpoint", "")
    config: Any = {}
    if "account" in options:
        config["account_name"] = options["account"]
    if endpoint:
        config["endpoint"] = endpoint
    with _refused(address.text):
        store = AzureStore(
            _bucket(address),
            prefix=_prefix(address),
            config=config,
            client_options=_client_options(endpoint.startswith("http://")),
            retry_config=_NO_RETRY,
        )
    return RemoteStore(store, address.text)


class RemoteStore:
    """Objects in a bucket, below a prefix."""

    def __init__(self, store: S3Store | GCSStore | AzureStore, url: str) -> None:
        self._store = store
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        check_data(key, data)
        try:
            done = obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as exc:
            raise exists_already(key) from exc
        except _ERRORS as exc:
            raise self._error(key, exc, writes=True) from exc
        return done["e_tag"] or ""

    def replace(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        check_data(key, data)
        try:
            done = obstore.put(self._store, key, data, mode={"e_tag": etag}, use_multipart=False)
        except exceptions.PreconditionError as exc:
            found = self.head(key).etag
            raise replaced_meanwhile(key, etag, found) from exc
        except _ERRORS as exc:
            raise self._error(key, exc, writes=True) from exc
        return done["e_tag"] or ""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        try:
            if start == 0 and end is None:
                return bytes(obstore.get(self._store, key).bytes())
            if end == start:
                self.head(key)
                return b""
            wanted: Any = {"offset": start} if end is None else (start, end)
            return bytes(obstore.get(self._store, key, options={"range": wanted}).bytes())
        except _ERRORS as exc:
            if start > 0 and _beyond_the_end(exc):
                return self.get(key)[start:end]
            raise self._error(key, exc) from exc

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            return _info(obstore.head(self._store, key))
        except _ERRORS as exc:
            raise self._error(key, exc) from exc

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        try:
            chunks = obstore.list(
                self._store, folder or None, offset=start_after or None, chunk_size=_LIST_CHUNK
            )
            for chunk in chunks:
                for meta in chunk:
                    info = _info(meta)
                    if info.key.startswith(prefix) and info.key > start_after:
                        yield info
        except _ERRORS as exc:
            raise self._error(prefix or "/", exc) from exc

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        if not wanted:
            return
        try:
            obstore.delete(self._store, wanted)
        except FileNotFoundError:
            self._delete_each(wanted)
        except _ERRORS as exc:
            raise self._error(wanted[0], exc) from exc

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        check_key(target)
        try:
            obstore.copy(self._store, source, target, overwrite=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as exc:
            raise exists_already(target) from exc
        except FileNotFoundError as exc:
            raise self._error(source, exc) from exc
        except _ERRORS as exc:
            raise self._error(target, exc, writes=True) from exc

    def presign(self, key: str, expires_s: int) -> str:
        check_key(key)
        if not 0 < expires_s <= limits.PRESIGN_SECONDS_MAX:
            raise InvalidError(
                f"object `{key}`: a URL for {expires_s} s: give 1 to {limits.PRESIGN_SECONDS_MAX} s"
            )
        try:
            return obstore.sign(self._store, "GET", key, timedelta(seconds=expires_s))
        except _ERRORS as exc:
            raise self._error(key, exc) from exc

    def _delete_each(self, keys: Iterable[str]) -> None:
        """Where a store counts a missing object as an error, go one by one past it."""
        for key in keys:
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                continue
            except _ERRORS as exc:
                raise self._error(key, exc) from exc

    def _error(self, key: str, exc: Exception, writes: bool = False) -> TidelogError:
        """Our error for one of obstore's; ``writes`` when the call may have changed something."""
        said = _gist(exc)
        if "NoSuchBucket" in str(exc):
            return NotFoundError(
                f"store `{self._url}`: there is no such bucket: create it, or fix the URL"
            )
        if isinstance(exc, FileNotFoundError):
            return not_found(key)
        if isinstance(
            exc,
            PermissionError | exceptions.PermissionDeniedError | exceptions.UnauthenticatedError,
        ) or any(status in str(exc) for status in _REFUSED):
            return InvalidError(
                f"store `{self._url}`: access to `{key}` refused ({said}): "
                "check the credentials in the environment and their rights"
            )
        if isinstance(exc, exceptions.InvalidPathError | exceptions.NotSupportedError):
            return InternalError(f"store `{self._url}`: `{key}`: {said}")
        if writes and not any(word in str(exc) for word in _NEVER_SENT):
            return UnknownOutcomeError(
                f"object `{key}`: no answer from `{self._url}` ({said}): read it back, then decide"
            )
        return UnavailableError(f"store `{self._url}`: no answer ({said}): try again")


def _bucket(address: Address) -> str:
    if not address.host or address.port is not None:
        raise InvalidError(
            f"store `{address.text}`: names no bucket: give {address.scheme}://bucket/prefix"
        )
    return address.host


def _prefix(address: Address) -> str | None:
    prefix = address.path.strip("/")
    if prefix:
        check_key(prefix)
    return prefix or None


def _client_options(allow_http: bool) -> Any:
    return {"allow_http": allow_http, "timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}


def _aws_credentials(address: Address) -> Any:
    """boto3's chain (profiles, single sign-on, roles) where it is installed, else obstore's own."""
    if Boto3CredentialProvider is None:
        return None
    try:
        return Boto3CredentialProvider()
    except ValueError as exc:
        raise InvalidError(
            f"store `{address.text}`: no AWS credentials found: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from exc


@contextlib.contextmanager
def _refused(text: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as exc:
        raise InvalidError(f"store `{text}`: {_gist(exc)}: fix the URL or the environment") from exc


def _beyond_the_end(exc: Exception) -> bool:
    """Whether a range began after the object's end; numbers in ids and times must not fool us."""
    said = str(exc)
    return "InvalidRange" in said or bool(re.search(r"status(?: code)?: 416\b", said))


def _gist(exc: Exception) -> str:
    """What a person needs of obstore's long messages: the server's own words, or the first line."""
    said = re.search("<Code>([^<]*)</Code>(?:<Message>([^<]*)</Message>)?", str(exc))
    if said:
        return ": ".join(part for part in said.groups() if part)[:200]
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(exc).__name__


def _info(meta: Any) -> ObjectInfo:
    modified_ms = int(meta["last_modified"].timestamp() * 1000)
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", modified_ms)


_: type[Store] = RemoteStore
