"""Sends notifications to a webhook, an SNS topic or a Lambda function.

A target makes one attempt (see ``NotifyTarget``). It raises ``InvalidError`` if a retry will not
help, and ``UnavailableError`` if it may. The caller decides when to retry. Other packages can add a
target through the entry point group ``tidelog.targets``; its callable takes an address and the
environment. A target sends any struct as JSON: archives use the same targets for their folders.

- ``https://host/path``: a POST of ``{"topic": …, "partition": …, "offset": …}``. Any 2xx is
  success; 408, 425, 429 and 5xx may be temporary. Redirects are not followed, and proxies not used.
  The whole answer must arrive within a few seconds. With ``TIDELOG_NOTIFY_SECRET`` in the
  environment, ``Tidelog-Signature: t=SECONDS,v1=HEX`` signs ``SECONDS.BODY`` by HMAC-SHA256.
  Addresses of this machine, of its link, and of the metadata of clouds are refused at the
  connection, whatever name leads there, unless ``TIDELOG_NOTIFY_LOCAL`` is 1.
- ``sns:arn:aws:sns:REGION:ACCOUNT:NAME?endpoint=…``: the same JSON as the message. Credentials come
  from the environment, or from the SDK's own chain.
- ``lambda:arn:aws:lambda:REGION:ACCOUNT:function:NAME?endpoint=…``: the same JSON as the event of
  an asynchronous call, which Lambda itself retries. The ARN may end with a version or an alias.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import importlib.util
import ipaddress
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import InvalidError, TidelogError, UnavailableError
from tidelog.log.notifier import NotifyTarget
from tidelog.model.address import Address, nearest, parse_address
from tidelog.plugins import find_plugins

__all__ = [
    "TARGET_SCHEMES",
    "LambdaTarget",
    "SnsTarget",
    "WebhookTarget",
    "check_target",
    "open_target",
    "shown_target",
]

TARGET_SCHEMES = ("http", "https", "lambda", "sns")

_TIMEOUT_S = 5.0  # of a target; a claim on a partition lasts as long
_CONNECT_TIMEOUT_S = 3.0  # a server in another region accepts a connection well within this
_PASSING_STATUS = {408, 425, 429}  # besides 5xx: the same request may succeed later
_PASSING_CODES = {  # of AWS: new credentials are on their way, or a function is being updated
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "ResourceConflictException",
}
_IPV4_AT_END = tuple(  # networks of IPv6 whose addresses lead to one of IPv4
    map(ipaddress.ip_network, ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
_NEVER_A_WEBHOOK = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # this machine, to some systems
            "100.100.100.200/32",  # metadata of Alibaba Cloud
            "168.63.129.16/32",  # the same of Azure
            "192.0.0.0/24",  # of Oracle Cloud
            "fd00:ec2::/32",  # of AWS, by IPv6
            "fd20:ce::254/128",  # of Google Cloud, by IPv6
        ),
    )
)
_ARNS = {
    "sns": re.compile(r"arn:aws[a-z-]*:sns:([a-z0-9-]+):[0-9]{12}:[A-Za-z0-9_-]{1,256}"),
    "lambda": re.compile(
        r"arn:aws[a-z-]*:lambda:([a-z0-9-]+):[0-9]{12}:function:[A-Za-z0-9_-]{1,64}"
        r"(?::[A-Za-z0-9$_-]{1,128})?"
    ),
}
_ARN_FORMS = {
    "sns": "not the ARN of a topic: give sns:arn:aws:sns:REGION:ACCOUNT:NAME",
    "lambda": "not the ARN of a function: give lambda:arn:aws:lambda:REGION:ACCOUNT:function:NAME",
}


def check_target(url: str) -> None:
    """Raises ``InvalidError`` if an address names no target; does not open it."""
    address = _parse(url)
    if address.scheme in ("http", "https"):
        _check_webhook(address)
    elif address.scheme in _ARNS:
        _region(address)
    elif not find_plugins("tidelog.targets", address.scheme):
        raise _unknown_scheme(address)


def open_target(url: str, environ: Mapping[str, str]) -> NotifyTarget:
    """Returns the target of a URL, which connects when it first sends. Raises ``InvalidError``."""
    address = _parse(url)
    if address.scheme in ("http", "https"):
        secret = environ.get("TIDELOG_NOTIFY_SECRET", "")
        return WebhookTarget(
            address, secret=secret, local=environ.get("TIDELOG_NOTIFY_LOCAL") == "1"
        )
    if address.scheme == "sns":
        return SnsTarget(address, environ)
    if address.scheme == "lambda":
        return LambdaTarget(address, environ)
    for entry in find_plugins("tidelog.targets", address.scheme):
        target: NotifyTarget = entry.load()(address, environ)
        return target
    raise _unknown_scheme(address)


class WebhookTarget:
    """An HTTP endpoint. Messages contain only its host, since a path may be a secret."""

    def __init__(
        self,
        address: Address,
        timeout_s: float = _TIMEOUT_S,
        *,
        secret: str = "",
        local: bool = False,
        clock: Clock | None = None,
    ) -> None:
        _check_webhook(address)
        parts = urlsplit(address.text)
        self._parts = parts
        self._host = parts.netloc.rpartition("@")[2]  # a user may be a secret
        self._name = f"webhook at `{address.scheme}://{self._host}`"
        self._timeout_s = timeout_s
        self._secret = secret.encode()
        self._local = local
        self._clock = clock or SystemClock()

    def send(self, notification: msgspec.Struct) -> None:
        body = msgspec.json.encode(notification)
        try:
            status, reason = self._post(body)
        except (OSError, http.client.HTTPException) as exc:
            raise UnavailableError(f"{self._name}: no answer: {_line(exc)}: try again") from exc
        if not 200 <= status < 300:
            raise self._refusal(status, reason)

    def _post(self, body: bytes) -> tuple[int, str]:
        """Returns the status of the reply. A timer ends the connection of a slow one."""
        until_s = self._clock.monotonic_s() + self._timeout_s
        parts = self._parts
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with contextlib.closing(connection), contextlib.ExitStack() as stack:

            def connect(address: tuple[str, int], *_: Any) -> socket.socket:
                raw = self._connect(address, until_s)
                # Before the handshake of TLS, which makes another socket of this one.
                watched = stack.enter_context(raw.dup())
                left_s = max(0.0, until_s - self._clock.monotonic_s())
                timer = threading.Timer(left_s, _end, [watched])
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
                return raw

            connection._create_connection = connect  # type: ignore[attr-defined]
            try:
                connection.request("POST", path, body, self._headers(body))
                answer = connection.getresponse()
                return answer.status, " ".join(answer.reason.split())[:200]
            except (OSError, http.client.HTTPException) as exc:
                if self._clock.monotonic_s() >= until_s:
                    raise TimeoutError(f"timed out after {self._timeout_s:g} s") from exc
                raise

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": "tidelog"}
        if self._parts.username is not None:
            user = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        if self._secret:
            now_s = self._clock.now_ms() // 1000
            signed = hmac.new(self._secret, b"%d." % now_s + body, "sha256").hexdigest()
            headers["Tidelog-Signature"] = f"t={now_s},v1={signed}"
        return headers

    def _connect(self, address: tuple[str, int], until_s: float) -> socket.socket:
        """Connects to an address that was checked, so that a name cannot lead elsewhere."""
        found = _addresses(address, until_s - self._clock.monotonic_s())
        error: OSError | None = None
        for family, kind, protocol, _name, place in found:
            if not self._local and _is_local(str(place[0])):
                raise InvalidError(
                    f"{self._name}: is an address of this machine, its link or its cloud's "
                    "metadata: give another one, "
                    "or set TIDELOG_NOTIFY_LOCAL=1"
                )
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            raw = socket.socket(family, kind, protocol)
            try:
                raw.settimeout(min(left_s, _CONNECT_TIMEOUT_S))
                raw.connect(place)
                raw.settimeout(self._timeout_s)
            except OSError as exc:
                raw.close()
                error = exc
            else:
                return raw
        raise error or OSError(f"`{address[0]}` has no address that answers in time")

    def _refusal(self, status: int, reason: str) -> TidelogError:
        said = f"{self._name}: answered {status} {reason}"
        if status in _PASSING_STATUS or status >= 500:
            return UnavailableError(f"{said}: try again", status=status)
        if 300 <= status < 400:
            return InvalidError(f"{said}: give the address it leads to", status=status)
        return InvalidError(f"{said}: fix the topic's target, or the server", status=status)


class _AwsTarget(ABC):
    """A service of AWS; loads the SDK and creates its client when it first sends."""

    def __init__(
        self, address: Address, environ: Mapping[str, str], timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._service: Any = address.scheme  # the SDK names each of its own
        self._arn = address.path
        self._region = _region(address)
        self._endpoint = address.options.get("endpoint")
        self._timeout_s = timeout_s
        keys: dict[str, Any] = {
            "aws_access_key_id": environ.get("AWS_ACCESS_KEY_ID"),
            "aws_secret_access_key": environ.get("AWS_SECRET_ACCESS_KEY"),
            "aws_session_token": environ.get("AWS_SESSION_TOKEN"),
        }
        self._keys = keys if keys["aws_access_key_id"] else {}
        self._client: Any = None
        if importlib.util.find_spec("boto3") is None:
            raise InvalidError(
                f"{self._service} target is not installed: pip install 'tidelog[aws]'"
            )

    def send(self, notification: msgspec.Struct) -> None:
        from botocore import exceptions as sdk  # noqa: PLC0415 - an extra, and slow to load
        from botocore.parsers import ResponseParserError  # noqa: PLC0415 - the same

        away = (
            sdk.HTTPClientError,  # a reply that is late or cut off
            sdk.ConnectionError,  # also a connection that takes too long
            sdk.CredentialRetrievalError,  # their provider is away
            sdk.MetadataRetrievalError,
            ResponseParserError,
        )
        name = f"{self._service} `{self._arn}`"
        try:
            if self._client is None:
                self._client = self._connect()
            self._call(self._client, msgspec.json.encode(notification))
        except sdk.ClientError as exc:
            raise self._refusal(exc, exc.response) from exc
        except away as exc:
            raise UnavailableError(f"{name}: no answer: {_line(exc)}: try again") from exc
        except (sdk.BotoCoreError, ValueError) as exc:
            raise InvalidError(
                f"{name}: cannot be reached: {_line(exc)}: "
                "fix the topic's target, or the AWS credentials"
            ) from exc

    @abstractmethod
    def _call(self, client: Any, message: bytes) -> None:
        """Sends a message with a client of the service."""

    def _connect(self) -> Any:
        from botocore.config import Config  # noqa: PLC0415 - an extra, and slow to load

        from tidelog.aws_session import aws_session  # noqa: PLC0415 - the same

        config = Config(
            connect_timeout=min(_CONNECT_TIMEOUT_S, self._timeout_s),
            read_timeout=self._timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        session = aws_session(region_name=self._region, **self._keys)
        return session.client(self._service, endpoint_url=self._endpoint, config=config)

    def _refusal(self, exc: Exception, response: Mapping[str, Any]) -> TidelogError:
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = f"{self._service} `{self._arn}`: {_line(exc)}"
        passing = status in _PASSING_STATUS or status >= 500 or code in _PASSING_CODES
        if passing or "Throttl" in code:
            return UnavailableError(f"{said}: try again", code=code)
        return InvalidError(f"{said}: fix the topic's target, or the permission", code=code)


class SnsTarget(_AwsTarget):
    """An SNS topic, whose subscribers get the notification."""

    def _call(self, client: Any, message: bytes) -> None:
        client.publish(TopicArn=self._arn, Message=message.decode())


class LambdaTarget(_AwsTarget):
    """A Lambda function, which is called without waiting for what it returns."""

    def _call(self, client: Any, message: bytes) -> None:
        client.invoke(FunctionName=self._arn, InvocationType="Event", Payload=message)


def shown_target(url: str) -> str:
    """Returns a target as it may be shown: path, query and user of a webhook may be secrets."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return url
    rest = "/…" if parts.path.strip("/") or parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{rest}"


def _end(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


def _addresses(address: tuple[str, int], timeout_s: float) -> list[Any]:
    """Looks a name up in its own thread, since that has no timeout. Raises ``TimeoutError``."""
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except OSError as exc:
            found.append(exc)

    thread = threading.Thread(target=look, name="tidelog-lookup", daemon=True)
    thread.start()
    thread.join(max(0.0, timeout_s))
    if not found:
        raise TimeoutError(f"`{address[0]}` was not looked up in time")
    if isinstance(found[0], OSError):
        raise found[0]
    return list(found[0])


def _is_local(address: str) -> bool:
    """Returns whether an address is of this machine, of its link, or of the cloud it runs in."""
    found: ipaddress.IPv4Address | ipaddress.IPv6Address
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):  # one of IPv4 may be in it
        is_at_end = any(found in network for network in _IPV4_AT_END)
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if is_at_end else found.sixtofour
        found = inner or found
    if any(found in network for network in _NEVER_A_WEBHOOK):
        return True
    return found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast


def _parse(url: str) -> Address:
    """Parses the address; an ARN has colons where a host has its port."""
    for scheme in _ARNS:
        if url.startswith(f"{scheme}://"):
            url = f"{scheme}:" + url.removeprefix(f"{scheme}://")
    return parse_address(url)


def _check_webhook(address: Address) -> None:
    if not address.host:
        raise InvalidError(f"target `{address.text}`: names no host: give https://host/path")
    if not address.text.isascii() or re.search(r"[\s\x00-\x1f\x7f]", address.text):
        raise InvalidError(
            f"target `{address.text}`: has characters that a URL cannot hold: quote them"
        )


def _region(address: Address) -> str:
    """Returns the region of an ARN. Raises ``InvalidError`` for one of another kind."""
    options = address.take_options(("endpoint",))
    arn = _ARNS[address.scheme].fullmatch(address.path)
    if address.scheme == "sns" and address.path.endswith(".fifo"):
        raise InvalidError(
            f"target `{address.text}`: is a FIFO topic, which would drop repeats: "
            "give a standard topic"
        )
    if arn is None:
        raise InvalidError(f"target `{address.text}`: is {_ARN_FORMS[address.scheme]}")
    endpoint = options.get("endpoint", "http://")
    if "@" in endpoint or not endpoint.startswith(("http://", "https://")):
        raise InvalidError(
            f"target `{address.scheme}:{address.path}`: its endpoint is not an http or https "
            "address: give http://host:port or https://host:port, without user or password"
        )
    return arn[1]


def _unknown_scheme(address: Address) -> InvalidError:
    return InvalidError(
        f"target `{address.text}`: unknown scheme `{address.scheme}`"
        f"{nearest(address.scheme, TARGET_SCHEMES)}: give one of {', '.join(TARGET_SCHEMES)}"
    )


def _line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


_webhook: type[NotifyTarget] = WebhookTarget
_sns: type[NotifyTarget] = SnsTarget
_lambda: type[NotifyTarget] = LambdaTarget
