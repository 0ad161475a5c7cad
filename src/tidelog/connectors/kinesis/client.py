"""Kinesis clients: parses addresses, retries calls, and explains errors.

The address has the region, endpoint and stream. Credentials come from the environment or the SDK's
own chain. The SDK's retries are off: this module retries throttled and unanswered calls, with
growing waits and a bounded number of attempts.

Times of Kinesis come from the ``Date`` of its responses, so a wrong clock here does no harm.

The SDK reads a body that is not JSON as one without any fields, such as the page of a proxy. So a
response without the field that its operation always has counts as none (:func:`check_response`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as sdk
from botocore.config import Config

from tidelog.aws_session import NO_CREDENTIALS, aws_session
from tidelog.clock import Clock, SystemClock, system_random
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import Address
from tidelog.model.event import check_timestamp
from tidelog.model.times import Backoff

__all__ = [
    "HASH_KEY",
    "SEQUENCE",
    "SUB_SEQUENCE",
    "Kinesis",
    "KinesisAddress",
    "KinesisShard",
    "StreamInfo",
    "arrived_ms",
    "check_response",
    "parse_kinesis_address",
    "shard_id",
]

# Headers of events that came from Kinesis.
SEQUENCE = "kinesis.sequence"
SUB_SEQUENCE = "kinesis.sub-sequence"
HASH_KEY = "kinesis.hash-key"

_CONNECT_TIMEOUT_S = 3
_READ_TIMEOUT_S = 20  # a response may have 10 MB
_CONNECTIONS_MAX = 32  # threads that share one client without waiting for a connection
_BACKOFF = Backoff(attempts=10, base_ms=200, max_ms=5_000)  # half a minute in total
_STREAM_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SHARD_ID = re.compile(r"shardId-(\d{12,})")
_OPTIONS = ("endpoint_url", "region")
# The same request may succeed in a moment.
_PASSING = (
    "ConcurrentModificationException",
    "InternalFailure",
    "InternalFailureException",
    "KMSThrottlingException",
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "ResourceInUseException",  # a stream that is being created or changed
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)
# The field that a response to each operation has.
_RESPONSE_FIELD = {
    "DescribeStreamSummary": "StreamDescriptionSummary",
    "GetRecords": "Records",
    "GetShardIterator": "ShardIterator",
    "ListShards": "Shards",
    "PutRecords": "Records",
}


@dataclass(frozen=True)
class KinesisAddress:
    """A stream; plain values."""

    url: str
    stream: str
    region: str | None
    endpoint: str | None
    keys: dict[str, Any] = field(repr=False)  # by the SDK's names; empty: the SDK's own chain
    role: str = "source"  # its name in error messages

    @property
    def what(self) -> str:
        """Returns its name for error messages."""
        return f"kinesis stream `{self.stream}`"


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream is. A later stream may have the same name."""

    arn: str
    created_ms: int
    retention_ms: int
    record_bytes_max: int

    @property
    def incarnation(self) -> str:
        """Returns an id that no other stream has, whatever its name."""
        return f"{self.arn}@{self.created_ms}"


@dataclass(frozen=True, slots=True)
class KinesisShard:
    """A shard, from the list of the stream."""

    number: int
    first_hash: int
    last_hash: int
    parents: tuple[int, ...] = ()
    last_sequence: int | None = None  # of a closed shard; no record has a greater one

    @property
    def is_closed(self) -> bool:
        return self.last_sequence is not None


def parse_kinesis_address(
    address: Address, environ: Mapping[str, str], role: str, more: tuple[str, ...] = ()
) -> KinesisAddress:
    """Parses ``kinesis://STREAM?region=…&endpoint_url=…``. ``more`` lists further options."""
    options = address.take_options((*_OPTIONS, *more))
    if not _STREAM_NAME.fullmatch(address.host) or address.path or address.port:
        raise InvalidError(
            f"{role} `{address.text}`: names no stream: give kinesis://STREAM?region=…, up to 128 "
            "letters, digits, `_`, `.` or `-`"
        )
    endpoint = options.get("endpoint_url") or environ.get("AWS_ENDPOINT_URL_KINESIS")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InvalidError(
            f"{role} `{address.text}`: endpoint_url `{endpoint}` is not an http or https address: "
            "give http://host:port or https://host:port"
        )
    region = options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    keys = {
        "aws_access_key_id": environ.get("AWS_ACCESS_KEY_ID"),
        "aws_secret_access_key": environ.get("AWS_SECRET_ACCESS_KEY"),
        "aws_session_token": environ.get("AWS_SESSION_TOKEN"),
    }
    given = {name: text for name, text in keys.items() if text} if all(_pair(keys)) else {}
    return KinesisAddress(address.text, address.host, region, endpoint, given, role)


class Kinesis:
    """Calls to one stream. Safe to share among threads."""

    def __init__(
        self,
        place: KinesisAddress,
        *,
        clock: Clock | None = None,
        source: random.Random | None = None,
        connect: Callable[[KinesisAddress], Any] | None = None,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._place = place
        self._backoff = backoff
        self._clock = clock or SystemClock()
        self._random = source or system_random()
        self._client = (connect or _connect)(place)

    def describe(self) -> tuple[StreamInfo, int]:
        """Returns the stream and Kinesis's time. Raises ``NotFoundError`` if there is no stream."""
        answer = self.call("describe_stream_summary", StreamName=self._place.stream)
        found = answer["StreamDescriptionSummary"]
        info = StreamInfo(
            arn=found["StreamARN"],
            created_ms=check_timestamp(found["StreamCreationTimestamp"]),
            retention_ms=found["RetentionPeriodHours"] * 3_600_000,
            record_bytes_max=found.get("MaxRecordSizeInKiB", 1024) << 10,
        )
        return info, self.time_ms(answer)

    def shards(self) -> tuple[dict[int, KinesisShard], int]:
        """Returns all shards that Kinesis still has, by number, and Kinesis's time."""
        found: dict[int, KinesisShard] = {}
        asked: dict[str, Any] = {"StreamName": self._place.stream}
        while True:
            answer = self.call("list_shards", **asked)
            for each in map(self._shard, answer["Shards"]):
                found[each.number] = each
            if not answer.get("NextToken"):
                return dict(sorted(found.items())), self.time_ms(answer)
            asked = {"NextToken": answer["NextToken"]}

    def iterator(self, number: int, **start: Any) -> str:
        """Returns an iterator to read a shard with. Raises ``NotFoundError`` if it is deleted."""
        text: str = self.call(
            "get_shard_iterator",
            StreamName=self._place.stream,
            ShardId=shard_id(number),
            **start,
        )["ShardIterator"]
        return text

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Sends a call. Retries passing errors, then raises ``UnavailableError``."""
        delays: Iterator[float | None] = iter(self._backoff.delays_s(self._random))
        while True:
            try:
                answer: dict[str, Any] = getattr(self._client, name)(**arguments)
            except (sdk.ClientError, sdk.BotoCoreError) as exc:
                error = self._error(exc)
                delay_s = next(delays, None)
                if not isinstance(error, UnavailableError) or delay_s is None:
                    raise error from exc
                self._clock.sleep(delay_s)
            else:
                return answer

    def time_ms(self, answer: Mapping[str, Any]) -> int:
        """Returns Kinesis's time of a response, rounded down to seconds; ours if it has none."""
        text = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        try:
            return int(parsedate_to_datetime(text).timestamp()) * 1000
        except (TypeError, ValueError):
            return self._clock.now_ms()

    def _error(self, exc: Exception) -> TidelogError:
        what, line = self._place.what, " ".join(str(exc).split())
        region = getattr(getattr(self._client, "meta", None), "region_name", self._place.region)
        if isinstance(exc, NO_CREDENTIALS):
            return InvalidError(
                f"{what}: no usable AWS credentials: {line}: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or log in to your AWS profile"
            )
        answer = exc.response if isinstance(exc, sdk.ClientError) else None
        code = answer["Error"].get("Code", "") if answer else ""
        unanswered = answer is None and not isinstance(exc, sdk.ParamValidationError)
        if unanswered or code in _PASSING or _status(answer) >= 500:
            return UnavailableError(
                f"{what}: Kinesis is out of reach or too busy: {line}: try again in a while"
            )
        if code == "ResourceNotFoundException":
            return NotFoundError(
                f"{what}: is not there in region {region}: {line}: create it, or fix the address",
                stream=self._place.stream,
                region=region,
            )
        return InvalidError(
            f"{what}: Kinesis refuses the request in region {region}: {line}: check the "
            "credentials, what they are allowed, and the address",
            code=code,
            time_ms=self.time_ms(answer or {}),
        )

    def _shard(self, found: Mapping[str, Any]) -> KinesisShard:
        names = (found.get("ParentShardId"), found.get("AdjacentParentShardId"))
        last = found["SequenceNumberRange"].get("EndingSequenceNumber")
        return KinesisShard(
            number=self._number(found["ShardId"]),
            first_hash=int(found["HashKeyRange"]["StartingHashKey"]),
            last_hash=int(found["HashKeyRange"]["EndingHashKey"]),
            parents=tuple(self._number(name) for name in names if name),
            last_sequence=None if last is None else int(last),
        )

    def _number(self, name: str) -> int:
        match = _SHARD_ID.fullmatch(name)
        if match is None:
            raise InvalidError(
                f"{self._place.what}: has a shard `{name}`, and only those like "
                "shardId-000000000012 are known"
            )
        return int(match[1])


def shard_id(number: int) -> str:
    """Returns Kinesis's name of the shard with this number."""
    return f"shardId-{number:012}"


def arrived_ms(record: Mapping[str, Any]) -> int:
    """Returns when a record arrived, by Kinesis's clock."""
    moment: datetime = record["ApproximateArrivalTimestamp"]
    return check_timestamp(moment)


class BrokenResponseError(sdk.BotoCoreError):
    """What arrived is not a complete response of Kinesis."""

    fmt = "the response to {operation} is damaged: status {status}, {fault}"


def check_response(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raises for a response that is cut off or not of Kinesis, before the SDK reads it."""
    operation, status = operation_model.name, response_dict["status_code"]
    fault = None
    try:
        found = json.loads(response_dict["body"])
    except UnicodeDecodeError:
        fault = "with a body that is not text"
    except ValueError:
        fault = "with a body that is not JSON" if status < 300 else None  # an error's page will do
    else:
        wanted = _RESPONSE_FIELD.get(operation) if status < 300 else None
        if not isinstance(found, dict) or (wanted is not None and wanted not in found):
            fault = f"without {wanted or 'fields'}"
    if fault is not None:
        raise BrokenResponseError(operation=operation, status=status, fault=fault)


def _connect(place: KinesisAddress) -> Any:
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=_CONNECTIONS_MAX,
        retries={"total_max_attempts": 1, "mode": "standard"},
        tcp_keepalive=True,
    )
    try:
        session = aws_session(region_name=place.region, **place.keys)
        client: Any = session.client("kinesis", endpoint_url=place.endpoint, config=config)
    except sdk.NoRegionError as exc:
        raise InvalidError(
            f"{place.role} `{place.url}`: no AWS region: add ?region=… to the address, or set "
            "AWS_REGION"
        ) from exc
    except (sdk.BotoCoreError, ValueError) as exc:
        line = " ".join(str(exc).split())
        raise InvalidError(
            f"{place.role} `{place.url}`: cannot be opened: {line}: fix the address"
        ) from exc
    client.meta.events.register("before-parse.kinesis", check_response)
    return client


def _pair(keys: Mapping[str, str | None]) -> tuple[str | None, str | None]:
    return keys["aws_access_key_id"], keys["aws_secret_access_key"]


def _status(answer: Mapping[str, Any] | None) -> int:
    status: int = (answer or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status
