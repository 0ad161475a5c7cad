"""The SDK's client for DynamoDB, and its errors: all that we know about boto3.

The SDK retries nothing on its own. Its errors are translated here, once:

- The table refused (a condition, a busy row, throttling) or was never reached: nothing was written,
  so it is a conflict or ``UnavailableError``, and can be retried.
- The reply broke off, came too late, or said that the server itself failed: a write may have
  landed, so it is a lost reply.
- The table, the permission, the clock or the address is wrong: a retry will not help.

The SDK accepts whatever arrives as an answer: it reads a body that is not JSON as one without any
fields, which means "there is no such row". So every reply is checked before it is parsed
(:func:`check_reply`): only a complete reply that DynamoDB sent is an answer.
"""

from __future__ import annotations

import binascii
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidelog.catalog.update import LostReplyError
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError

try:
    from botocore import exceptions as sdk
    from botocore.config import Config
    from botocore.parsers import ResponseParserError

    from tidelog.aws_session import NO_CREDENTIALS, aws_session
except ImportError as exc:  # this module is imported only when such an address is opened
    raise InvalidError("dynamodb catalog is not installed: pip install 'tidelog[aws]'") from exc

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

__all__ = [
    "PARSER_ERRORS",
    "SDK_ERRORS",
    "BrokenReplyError",
    "ConditionsFailed",
    "check_reply",
    "connect",
    "error_code",
    "missing_error",
    "read_error",
    "write_error",
]


class BrokenReplyError(sdk.BotoCoreError):
    """What arrived is not a complete reply of DynamoDB."""

    fmt = "the reply to {operation} is damaged: {fault}"


SDK_ERRORS = (sdk.ClientError, sdk.BotoCoreError)
PARSER_ERRORS = (ResponseParserError, binascii.Error)

_CONNECT_TIMEOUT_S = 3  # a server in another region accepts a connection well within this
_READ_TIMEOUT_S = 5  # DynamoDB replies in milliseconds; a slower reply counts as lost
_CONNECTIONS_MAX = 64  # threads that share one catalog without waiting for a connection

# Nothing was written, and the same request may succeed later.
_REFUSED = {
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "ReplicatedWriteConflictException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "TransactionConflictException",
}
# The temporary reasons for which a transaction is cancelled, and "None".
_PASSING_REASONS = {
    "None",
    "ProvisionedThroughputExceeded",
    "ThrottlingError",
    "TransactionConflict",
}
# Our own earlier attempt is still in progress, and may yet land.
_UNSURE = {"TransactionInProgressException"}
_NO_PERMISSION = {
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "NotAuthorized",
    "OptInRequired",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
# How the message of a refused signature says that its time was wrong.
_WRONG_TIME = ("Signature expired", "Signature not yet current", "RequestTimeTooSkewed")
# The fields of each reply that we read, for bodies that come without a checksum.
_REPLY_FIELDS = {
    "GetItem": {"ConsumedCapacity", "Item"},
    "Query": {"ConsumedCapacity", "Count", "Items", "LastEvaluatedKey", "ScannedCount"},
    "PutItem": {"Attributes", "ConsumedCapacity", "ItemCollectionMetrics"},
    "DeleteItem": {"Attributes", "ConsumedCapacity", "ItemCollectionMetrics"},
    "TransactWriteItems": {"ConsumedCapacity", "ItemCollectionMetrics"},
    "DescribeTable": {"Table"},
}
_NEVER_SENT = (sdk.ConnectTimeoutError, sdk.EndpointConnectionError, sdk.ProxyConnectionError)


def connect(
    url: str, region: str | None, endpoint: str | None, keys: Mapping[str, Any]
) -> DynamoDBClient:
    """Returns a client with its own session.

    Raises ``InvalidError`` if the SDK cannot create it.
    """
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=_CONNECTIONS_MAX,
        parameter_validation=False,  # the catalog checks its arguments, at less cost
        retries={"total_max_attempts": 1, "mode": "standard"},
        tcp_keepalive=True,
    )
    try:
        session = aws_session(region_name=region, **keys)
        client = session.client("dynamodb", endpoint_url=endpoint, config=config)
    except sdk.NoRegionError as exc:
        raise InvalidError(
            f"catalog `{url}`: no AWS region: add ?region=… to the address, or set AWS_REGION"
        ) from exc
    except (sdk.BotoCoreError, ValueError) as exc:
        raise InvalidError(
            f"catalog `{url}`: cannot be opened: {_line(exc)}: fix the address"
        ) from exc
    client.meta.events.register("before-parse.dynamodb", check_reply)
    return client


def check_reply(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raises for a reply that is cut off, damaged, or not DynamoDB's, before the SDK reads it.

    A body with a correct checksum is the one that DynamoDB sent, and so is complete. One without a
    checksum must have the length that its header says, and the shape of a reply: a JSON object with
    fields of this operation, or an error with a type.
    """
    fault = _fault(operation_model.name, response_dict)
    if fault is not None:
        raise BrokenReplyError(operation=operation_model.name, fault=fault)


def _fault(operation: str, reply: dict[str, Any]) -> str | None:
    """Returns what is wrong with a reply; None if it can be parsed."""
    headers, body = reply["headers"], reply["body"]
    length = headers.get("content-length")
    if length is not None and length.isdigit() and int(length) != len(body):
        return f"{len(body)} of {length} bytes arrived"
    checksum = headers.get("x-amz-crc32")
    if checksum is not None:
        found = zlib.crc32(body)
        return None if checksum == str(found) else f"expected crc32 {checksum}, found {found}"
    return _odd_shape(operation, reply)


def _odd_shape(operation: str, reply: dict[str, Any]) -> str | None:
    """Returns what a body without a checksum lacks to be a reply of DynamoDB; None if nothing."""
    headers, body, status = reply["headers"], reply["body"], reply["status_code"]
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return f"status {status} with a body that is not a JSON object"
    if status >= 300:
        named = "__type" in fields or "x-amzn-errortype" in headers
        return None if named or status >= 500 else f"status {status} without an error's type"
    if operation == "DescribeTable" and "Table" not in fields:
        return "it describes no table"
    known = _REPLY_FIELDS.get(operation)
    if known is not None and not fields.keys() <= known:
        return f"unknown fields {', '.join(sorted(fields.keys() - known))}"
    return None


def read_error(exc: Exception, table: str, region: str) -> TidelogError:
    """Returns the error of a read, or of anything that may be done twice."""
    return _lasting_error(exc, table, region) or _unavailable(exc, table)


class ConditionsFailed(Exception):  # noqa: N818 - not an error: the server's decision
    """Conditions of a write did not hold; has the current items, by the change's index.

    ``unchecked`` are the changes whose conditions the server did not check, since another
    transaction held their items.
    """

    def __init__(self, items: dict[int, dict[str, Any] | None], unchecked: list[int]) -> None:
        super().__init__(f"{len(items)} conditions did not hold")
        self.items = items
        self.unchecked = unchecked


def write_error(exc: Exception, table: str, region: str) -> Exception:
    """Returns the error of one attempt at a write."""
    reasons = _reasons(exc)
    refused = {
        index: reason.get("Item") or None
        for index, reason in enumerate(reasons)
        if reason["Code"] == "ConditionalCheckFailed"
    }
    if refused:
        passed_over = [
            index
            for index, reason in enumerate(reasons)
            if reason["Code"] not in ("None", "ConditionalCheckFailed")
        ]
        return ConditionsFailed(refused, passed_over)
    if reasons and all(reason["Code"] in _PASSING_REASONS for reason in reasons):
        return _unavailable(exc, table)
    lasting = _lasting_error(exc, table, region)
    if lasting is not None:
        return lasting
    if isinstance(exc, _NEVER_SENT) or _is_refusal(exc):
        return _unavailable(exc, table)
    return LostReplyError(str(exc))


def missing_error(table: str, region: str) -> NotFoundError:
    """Returns the error for a table that does not exist."""
    return NotFoundError(
        f"catalog table `{table}`: not found in region {region}: "
        "run `tidelog init --create-catalog` or fix the URL",
        table=table,
        region=region,
    )


def error_code(exc: Exception) -> str | None:
    """Returns the server's code for an error; None if the server sent none."""
    return exc.response["Error"].get("Code") if isinstance(exc, sdk.ClientError) else None


def _lasting_error(exc: Exception, table: str, region: str) -> TidelogError | None:
    """Returns the error if a retry will not help; None if it may."""
    if isinstance(exc, NO_CREDENTIALS):
        return InvalidError(
            f"catalog table `{table}`: no usable AWS credentials: {_line(exc)}: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in to your AWS profile",
            table=table,
        )
    code = error_code(exc)
    if code is None or code in _UNSURE or _is_refusal(exc) or _status(exc) >= 500:
        return None
    if code == "ResourceNotFoundException":
        return missing_error(table, region)
    if any(word in str(exc) for word in _WRONG_TIME):
        return InvalidError(
            f"catalog table `{table}`: AWS refuses the time in our requests: {_line(exc)}: "
            "this machine's clock is wrong: set it, for instance by NTP",
            table=table,
            code=code,
        )
    if code in _NO_PERMISSION:
        return InvalidError(
            f"catalog table `{table}`: AWS refuses these credentials: {_line(exc)}: "
            "check the keys, their expiry and the policy of their user or role",
            table=table,
            code=code,
        )
    return InvalidError(
        f"catalog table `{table}`: DynamoDB refuses the request: {_line(exc)}",
        table=table,
        code=code,
    )


def _unavailable(exc: Exception, table: str) -> UnavailableError:
    return UnavailableError(
        f"catalog table `{table}`: DynamoDB is out of reach or too busy: {_line(exc)}: "
        "try again in a while",
        table=table,
    )


def _status(exc: Exception) -> int:
    if not isinstance(exc, sdk.ClientError):
        return 0
    return exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _is_refusal(exc: Exception) -> bool:
    return error_code(exc) in _REFUSED or _status(exc) == 429


def _reasons(exc: Exception) -> list[dict[str, Any]]:
    """Returns why each change of a write was refused, in order; empty for other errors."""
    response: Any = getattr(exc, "response", {})
    if error_code(exc) == "ConditionalCheckFailedException":
        return [{"Code": "ConditionalCheckFailed", "Item": response.get("Item")}]
    if error_code(exc) == "TransactionCanceledException":
        return list(response.get("CancellationReasons", []))
    return []


def _line(exc: Exception) -> str:
    return " ".join(str(exc).split())
