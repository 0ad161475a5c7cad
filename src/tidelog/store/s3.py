"""What S3 needs besides obstore: credentials that are renewed in time, listings, unfinished
uploads.

obstore reads any XML as a listing, even a page of HTML, which becomes an empty listing. So pages
come through boto3, and each is checked: S3 says in every page how many keys it has and whether it
is the last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from obstore.store import S3Store

from tidelog.errors import InvalidError, TidelogError
from tidelog.model.address import Address
from tidelog.store.base import ObjectInfo, Upload
from tidelog.store.remote import (
    CONNECT_TIMEOUT_S,
    NO_RETRY,
    REQUEST_TIMEOUT_S,
    SDK_ERRORS,
    Clients,
    ObjectStore,
    RemoteStore,
    broken_reply,
    bucket_of,
    code_of,
    gist,
    prefix_of,
    reporting,
    store_error,
)

try:
    from botocore.config import Config

    from tidelog.aws_session import aws_session
except ImportError as exc:  # this module is imported only when such an address is opened
    raise InvalidError("s3 store is not installed: pip install 'tidelog[aws]'") from exc

__all__ = ["AwsCredentials", "S3Bucket", "open_s3"]

_CONNECTIONS_MAX = 16
_KMS_KEY = re.compile(r"[A-Za-z0-9:/_-]{1,2048}")
_CLASSES = (
    "STANDARD",
    "STANDARD_IA",
    "ONEZONE_IA",
    "INTELLIGENT_TIERING",
    "GLACIER_IR",
    "REDUCED_REDUNDANCY",
)
_TAG = re.compile(r"[\w .:/+@-]{1,128}=[\w .:/+@-]{0,256}")
_TAGS_MAX = 10  # S3's own limit
_SHORT_LIVED = ("probe/", "staging/")  # classes with a minimal time would cost more for these


def open_s3(address: Address, environ: Mapping[str, str]) -> RemoteStore:
    """Opens ``s3://bucket/prefix?region=…&endpoint=…&path_style=true|false&kms_key=…``.

    With ``kms_key``, the ARN or id of a key of KMS, every object is encrypted by that key. Every
    object has the ``storage_class``, except staged ones, and the ``tags``, as ``NAME=VALUE,…``.
    """
    options = address.take_options(
        ("endpoint", "kms_key", "path_style", "region", "storage_class", "tags")
    )
    endpoint = options.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL")
    path_style = options.get("path_style", "true" if endpoint else "false")
    if path_style not in ("true", "false"):
        raise InvalidError(
            f"store `{address.text}`: path_style is `{path_style}`: give true or false"
        )
    region = options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    config: Any = {"region": region or "us-east-1", "copy_if_not_exists": "multipart"}
    if "kms_key" in options:
        if not _KMS_KEY.fullmatch(options["kms_key"]):
            raise InvalidError(
                f"store `{address.text}`: kms_key is not a valid KMS key: give its ARN, its id, "
                "or alias/NAME"
            )
        config["aws_server_side_encryption"] = "aws:kms"
        config["aws_sse_kms_key_id"] = options["kms_key"]
        config["aws_sse_bucket_key_enabled"] = "true"  # one request to KMS for many objects
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidError(
                f"store `{address.text}`: endpoint `{endpoint}` is not an http or https "
                "address: give http://host:port or https://host:port"
            )
        config["endpoint"] = endpoint
    session = aws_session()
    credentials: Any = AwsCredentials(session, address.text)

    def connect(client_options: Any) -> ObjectStore:
        with reporting(address.text):
            return S3Store(
                bucket_of(address),
                prefix=prefix_of(address),
                config=config,
                virtual_hosted_style_request=path_style == "false",
                client_options=client_options,
                retry_config=NO_RETRY,
                credential_provider=credentials,
            )

    prefix = prefix_of(address)
    bucket = S3Bucket(
        session,
        address.text,
        (bucket_of(address), f"{prefix}/" if prefix else ""),
        _object_attributes(address.text, options),
        {
            "region": config["region"],
            "endpoint": endpoint,
            "addressing_style": "path" if path_style == "true" else "virtual",
        },
        (CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S),
    )
    clients = Clients(connect, _shared_options(endpoint, environ))
    return RemoteStore(clients, address.text, bucket)


@dataclass(frozen=True)
class ObjectAttributes:
    """What S3 keeps with each object of a store."""

    storage_class: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    kms_key: str = ""


def _object_attributes(url: str, options: Mapping[str, str]) -> ObjectAttributes:
    storage_class = options.get("storage_class", "")
    if storage_class and storage_class not in _CLASSES:
        raise InvalidError(
            f"store `{url}`: storage_class is `{storage_class}`: give one that can be read at "
            f"once: {', '.join(_CLASSES)}"
        )
    tags = [each for each in options.get("tags", "").split(",") if each]
    if len(tags) > _TAGS_MAX or not all(map(_TAG.fullmatch, tags)):
        raise InvalidError(
            f"store `{url}`: tags are `{options['tags']}`: give up to {_TAGS_MAX} NAME=VALUE, "
            "with commas between them"
        )
    named = dict(each.split("=", 1) for each in tags)
    return ObjectAttributes(storage_class, named, options.get("kms_key", ""))


class AwsCredentials:
    """Gives obstore the credentials of a boto3 session, with the expiry that their provider states.

    obstore asks again before that, and botocore renews them then. Keys without an expiry are given
    once.
    """

    def __init__(self, session: Any, url: str) -> None:
        found = session.get_credentials()
        if found is None:
            raise InvalidError(
                f"store `{url}`: no AWS credentials found: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        self._credentials = found

    def __call__(self) -> Any:
        frozen = self._credentials.get_frozen_credentials()  # renews them when it is time
        end: datetime | None = getattr(self._credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": end.astimezone(UTC) if end else None,  # obstore requires this zone
        }


class S3Bucket:
    """Listings and multipart uploads of a bucket, below a prefix. Every process has a client."""

    def __init__(
        self,
        session: Any,
        url: str,
        root: tuple[str, str],
        attributes: ObjectAttributes,
        client_options: Mapping[str, Any],
        timeouts_s: tuple[float, float],
    ) -> None:
        self._session = session
        self._url = url
        self._bucket, self._prefix = root
        self._attributes = attributes
        self._options = client_options
        self._timeouts_s = timeouts_s
        self._live: tuple[int, Any] | None = None

    def attributes_of(self, key: str) -> dict[str, Any]:
        """Returns the storage class and tags of an object, as obstore takes them."""
        found: dict[str, Any] = {}
        if self._attributes.storage_class and not key.startswith(_SHORT_LIVED):
            found["attributes"] = {"Storage-Class": self._attributes.storage_class}
        if self._attributes.tags:
            found["tags"] = self._attributes.tags
        return found

    def copy(self, source: str, target: str) -> None:
        """Copies an object on the server, create-only, with the attributes of the target.

        Raises the SDK's errors. An upload that is not completed is aborted, at once or by a sweep.
        """
        client, wanted = self._client(), self._attributes
        where = {"Bucket": self._bucket, "Key": self._prefix + target}
        how: dict[str, Any] = {}
        if not target.startswith(_SHORT_LIVED) and wanted.storage_class:
            how["StorageClass"] = wanted.storage_class
        if wanted.tags:
            how["Tagging"] = urlencode(wanted.tags)
        if wanted.kms_key:
            how["ServerSideEncryption"], how["SSEKMSKeyId"] = "aws:kms", wanted.kms_key
            how["BucketKeyEnabled"] = True
        upload = client.create_multipart_upload(**where, **how)["UploadId"]
        try:
            origin = {"Bucket": self._bucket, "Key": self._prefix + source}
            part = client.upload_part_copy(
                **where, CopySource=origin, PartNumber=1, UploadId=upload
            )
            parts = [{"ETag": part["CopyPartResult"]["ETag"], "PartNumber": 1}]
            client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
        except SDK_ERRORS:
            with contextlib.suppress(TidelogError):
                self._abort(where["Key"], upload)
            raise

    def list(self, folder: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yields the objects below a folder and above a key, in key order."""
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + folder}
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        while True:
            page = self._page("list_objects_v2", request, folder)
            keys = page.get("Contents", [])
            if page.get("KeyCount", len(keys)) != len(keys) or "IsTruncated" not in page:
                raise broken_reply(self._url, folder or "/", "it is not a whole listing")
            for each in keys:
                yield self._info(each)
            if not page["IsTruncated"]:
                return
            if not page.get("NextContinuationToken"):
                raise broken_reply(self._url, folder or "/", "it does not say where to continue")
            request = {
                "Bucket": self._bucket,
                "Prefix": self._prefix + folder,
                "ContinuationToken": page["NextContinuationToken"],
            }

    def abort_uploads(self, before_ms: int) -> int:
        """Aborts multipart uploads that started before a time; returns how many."""
        return sum(
            self._abort(upload["Key"], upload["UploadId"])
            for upload in self._uploads()
            if upload["Initiated"].timestamp() * 1000 < before_ms
        )

    def uploads(self) -> Iterator[Upload]:
        """Yields multipart uploads. No request returns the bytes of their parts."""
        for upload in self._uploads():
            began_ms = int(upload["Initiated"].timestamp() * 1000)
            name = upload["Key"].removeprefix(self._prefix)
            yield Upload(name, 0, began_ms, may_end=True, read=None)

    def _uploads(self) -> Iterator[dict[str, Any]]:
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix}
        while True:
            page = self._page("list_multipart_uploads", request, "")
            if "IsTruncated" not in page:
                raise broken_reply(self._url, "/", "it is not a whole listing of uploads")
            yield from page.get("Uploads", [])
            if not page["IsTruncated"]:
                return
            request["KeyMarker"] = page["NextKeyMarker"]
            request["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _abort(self, key: str, upload: str) -> bool:
        try:
            self._client().abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        except SDK_ERRORS as exc:
            if code_of(exc) == "NoSuchUpload":  # it was completed or aborted in the meantime
                return False
            raise self._error(key, exc) from exc
        return True

    def _page(self, method: str, request: dict[str, Any], what: str) -> dict[str, Any]:
        try:
            page: dict[str, Any] = getattr(self._client(), method)(**request)
        except SDK_ERRORS as exc:
            raise self._error(what or "/", exc) from exc
        except (ValueError, KeyError, TypeError) as exc:  # the SDK's parser on a foreign page
            raise broken_reply(self._url, what or "/", gist(exc)) from exc
        return page

    def _error(self, what: str, exc: Exception) -> TidelogError:
        return store_error(self._url, what, exc)

    def _info(self, each: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            each["Key"].removeprefix(self._prefix),
            each["Size"],
            each.get("ETag", ""),
            int(each["LastModified"].timestamp() * 1000),
        )

    def _client(self) -> Any:
        live = self._live
        if live is None or live[0] != os.getpid():
            connect_s, read_s = self._timeouts_s
            config = Config(
                connect_timeout=connect_s,
                read_timeout=read_s,
                max_pool_connections=_CONNECTIONS_MAX,
                retries={"total_max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": self._options["addressing_style"]},
            )
            client = self._session.client(
                "s3",
                region_name=self._options["region"],
                endpoint_url=self._options["endpoint"],
                config=config,
            )
            client.meta.events.register("before-call.s3", _stay)
            client.meta.events.register("before-parse.s3", _check_length)
            live = self._live = (os.getpid(), client)
        return live[1]


def _stay(params: dict[str, Any], **_: Any) -> None:
    """Keeps the SDK from looking for the bucket in other regions: obstore would not follow it."""
    params["context"]["s3_redirect"] = {"redirected": True}


def _check_length(response_dict: dict[str, Any], **_: Any) -> None:
    """Raises for a body that is not as long as its header says; the SDK would parse it."""
    length = response_dict["headers"].get("content-length")
    body = response_dict["body"]
    whole = length is None or not isinstance(body, bytes) or int(length) == len(body)
    if not whole and response_dict["status_code"] < 300:
        raise ValueError(f"{len(body)} of {length} bytes arrived")


def _shared_options(endpoint: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns what all clients of a store share; boto3 uses the same certificates."""
    options: dict[str, Any] = {"allow_http": bool(endpoint and endpoint.startswith("http://"))}
    bundle = environ.get("AWS_CA_BUNDLE")
    if bundle:
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as exc:
            raise InvalidError(
                f"setting AWS_CA_BUNDLE: `{bundle}` cannot be read ({exc.strerror}): fix the path"
            ) from exc
    return options
