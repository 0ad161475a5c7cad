"""A catalog in one DynamoDB table: hash key ``partition``, range key ``row``.

A single put or delete is one conditional item write, everything else one transaction, and every
read is consistent. DynamoDB orders text by its UTF-8 bytes, which is code point order. Each call is
one raw attempt; ``update.write_settled`` and ``read_repeated`` repeat it.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidelog.catalog.base import (
    ABSENT,
    Catalog,
    Change,
    Check,
    Delete,
    Put,
    Row,
    check_limit,
    check_name,
    check_write,
    conflict,
)
from tidelog.catalog.dynamodb_client import (
    PARSER_ERRORS,
    SDK_ERRORS,
    BrokenReplyError,
    ConditionsFailed,
    connect,
    error_code,
    missing_error,
    read_error,
    write_error,
)
from tidelog.catalog.update import Repeat, read_repeated, write_settled
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from tidelog.model import limits
from tidelog.model.address import Address

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_dynamodb.type_defs import TableDescriptionTypeDef

__all__ = ["DynamoCatalog", "open_dynamodb"]

_CREATE_POLLS = 240  # polls until a new table is ready: two minutes in all
_CREATE_POLL_S = 0.5

_BILLED = ("get_item", "put_item", "delete_item", "query", "transact_write_items")
_KEY = (("partition", "HASH", "S"), ("row", "RANGE", "S"))


def open_dynamodb(
    address: Address, *, create: bool, repeat: Repeat, environ: Mapping[str, str]
) -> DynamoCatalog:
    """Opens the catalog at ``dynamodb://TABLE?region=…&endpoint=…``; both options are optional.

    The table must exist, in our shape; with ``create``, a missing one is created. Credentials come
    from ``environ``, or from the SDK's own chain.
    """
    options = address.take_options(("endpoint", "region"))
    table = _table_name(address)
    endpoint = options.get("endpoint")
    if endpoint is not None:
        _check_endpoint(address, endpoint)
    region = options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    keys = {
        "aws_access_key_id": environ.get("AWS_ACCESS_KEY_ID"),
        "aws_secret_access_key": environ.get("AWS_SECRET_ACCESS_KEY"),
        "aws_session_token": environ.get("AWS_SESSION_TOKEN"),
    }
    given = keys if keys["aws_access_key_id"] else {}
    make = partial(connect, address.text, region, endpoint, given)
    catalog = DynamoCatalog(address.text, table, make, repeat)
    catalog.ensure_table(create)
    return catalog


class DynamoCatalog:
    """Rows as items of one table. Every process has its own client, created on first use."""

    def __init__(
        self, url: str, table: str, make_client: Callable[[], DynamoDBClient], repeat: Repeat
    ) -> None:
        self._url = url
        self._table = table
        self._make_client = make_client
        self._repeat = repeat
        self._live: tuple[int, DynamoDBClient] | None = None  # a process's id, and its client
        self._closed = False
        self.units: dict[str, float] = {}  # of capacity, by request, as replies count them
        self._units_lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def get(self, partition: str, row: str) -> Row | None:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_name("row", row, limits.ROW_BYTES_MAX)
        request = {"Key": _key(partition, row), "ConsistentRead": True}
        reply = read_repeated(lambda: self._read("get_item", request), self._repeat)
        return _row(partition, reply["Item"]) if "Item" in reply else None

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        check_name("partition", partition, limits.PARTITION_BYTES_MAX)
        check_limit(limit)
        if limit == 0 or (end is not None and end <= start):
            return iter(())
        request = _range(partition, start, end) | {"ScanIndexForward": not reverse}
        return self._scan(partition, request, end, limit)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        check_write(partition, changes, write_id)
        write_settled(
            lambda: self._attempt(partition, changes, write_id),
            lambda row: self._read_version(partition, row),
            partition,
            changes,
            write_id,
            self._repeat,
        )

    def close(self) -> None:
        live, self._live, self._closed = self._live, None, True
        if live is not None and live[0] == os.getpid():
            live[1].close()

    def ensure_table(self, create: bool) -> None:
        """Returns when the table is ready and has our shape; otherwise raises with what to do."""
        for _ in range(_CREATE_POLLS):
            found = read_repeated(self._describe, self._repeat)
            if found is None and not create:
                raise missing_error(self._table, self._region())
            if found is None:
                read_repeated(self._create, self._repeat)
            elif found["TableStatus"] in ("ACTIVE", "UPDATING"):
                return _check_shape(self._table, found)
            self._repeat.clock.sleep(_CREATE_POLL_S)
        raise UnavailableError(
            f"catalog table `{self._table}`: not ready after {_CREATE_POLLS * _CREATE_POLL_S:.0f} "
            "s: look at its state, then try again",
            table=self._table,
        )

    # One raw attempt each.

    def _attempt(self, partition: str, changes: Sequence[Change], write_id: str) -> None:
        method, request = _plan(self._table, partition, changes, write_id)
        try:
            self._call(method, request)
        except SDK_ERRORS as exc:
            error = write_error(exc, self._table, self._region())
            if isinstance(error, ConditionsFailed):
                raise self._conflict(partition, changes, error) from exc
            raise error from exc

    def _conflict(
        self, partition: str, changes: Sequence[Change], refused: ConditionsFailed
    ) -> ConflictError:
        """Returns the conflict of a refused write, with the rows that DynamoDB returned."""
        rows = {
            changes[index].row: _row(partition, item) if item else None
            for index, item in refused.items.items()
        }
        for index in refused.unchecked:
            rows[changes[index].row] = self.get(partition, changes[index].row)
        return conflict(partition, changes, rows)

    def _read(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._call(method, {"TableName": self._table} | request)
        except SDK_ERRORS as exc:
            raise read_error(exc, self._table, self._region()) from exc

    def _query(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns one page; a reply that lacks what every page has counts as lost."""
        reply = self._read("query", request)
        if reply.get("Count") != len(reply.get("Items", ())):
            raise UnavailableError(
                f"catalog table `{self._table}`: a page of a query says {reply.get('Count')} "
                f"items and has {len(reply.get('Items', ()))}: try again",
                table=self._table,
            )
        return reply

    def _call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        client = self._live_client()
        if method in _BILLED:
            request = request | {"ReturnConsumedCapacity": "TOTAL"}
        try:
            reply: dict[str, Any] = getattr(client, method)(**request)
        except PARSER_ERRORS as exc:  # a body without a checksum that only looks like a reply
            raise BrokenReplyError(operation=method, fault=str(exc)) from exc
        if method in _BILLED:
            self._count_units(method, reply.get("ConsumedCapacity"))
        return reply

    def _count_units(self, method: str, consumed: Any) -> None:
        """Adds what a reply says that it cost; one of a broken server may say anything."""
        listed = consumed if isinstance(consumed, list) else [consumed]
        found = [each.get("CapacityUnits") for each in listed if isinstance(each, dict)]
        total = sum(each for each in found if isinstance(each, int | float))
        with self._units_lock:
            self.units[method] = self.units.get(method, 0.0) + total

    def _describe(self) -> TableDescriptionTypeDef | None:
        try:
            description: TableDescriptionTypeDef = self._read("describe_table", {})["Table"]
        except NotFoundError:
            return None
        return description

    def _create(self) -> None:
        request = {
            "KeySchema": [{"AttributeName": name, "KeyType": kind} for name, kind, _ in _KEY],
            "AttributeDefinitions": [
                {"AttributeName": name, "AttributeType": scalar} for name, _, scalar in _KEY
            ],
            "BillingMode": "PAY_PER_REQUEST",
        }
        try:
            self._call("create_table", {"TableName": self._table} | request)
        except SDK_ERRORS as exc:
            if error_code(exc) != "ResourceInUseException":
                # Otherwise another process is creating it.
                raise read_error(exc, self._table, self._region()) from exc

    def _live_client(self) -> DynamoDBClient:
        """Returns this process's client: connections of a parent belong to the parent."""
        if self._closed:
            raise InvalidError(f"catalog `{self._url}`: is closed: open it again")
        live = self._live
        if live is None or live[0] != os.getpid():
            live = self._live = (os.getpid(), self._make_client())
        return live[1]

    def _region(self) -> str:
        return self._live_client().meta.region_name

    def _read_version(self, partition: str, row: str) -> str | None:
        found = self.get(partition, row)
        return found.version if found else None

    def _scan(
        self, partition: str, request: dict[str, Any], end: str | None, limit: int | None
    ) -> Iterator[Row]:
        left = limit
        while True:
            # BETWEEN includes its end, so one more item than wanted may come.
            page_limit = {} if left is None else {"Limit": left + 1}
            read = partial(self._query, request | page_limit)
            reply = read_repeated(read, self._repeat)
            for item in reply.get("Items", ()):
                row = _row(partition, item)
                if row.row == end:
                    continue
                yield row
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            if "LastEvaluatedKey" not in reply:
                return
            request = request | {"ExclusiveStartKey": reply["LastEvaluatedKey"]}


# Requests.


def _plan(
    table: str, partition: str, changes: Sequence[Change], write_id: str
) -> tuple[str, dict[str, Any]]:
    """Returns the one call that makes these changes, as a method's name and its arguments."""
    if len(changes) == 1 and not isinstance(changes[0], Check):
        method = "put_item" if isinstance(changes[0], Put) else "delete_item"
        return method, _change(table, partition, changes[0], write_id)
    verbs = {Put: "Put", Delete: "Delete", Check: "ConditionCheck"}
    items = [
        {verbs[type(change)]: _change(table, partition, change, write_id)} for change in changes
    ]
    # A repeat has the same token, so that a delayed first attempt is not applied again.
    token = hashlib.sha256(repr((table, partition, write_id, changes)).encode()).hexdigest()[:36]
    return "transact_write_items", {"TransactItems": items, "ClientRequestToken": token}


def _change(table: str, partition: str, change: Change, write_id: str) -> dict[str, Any]:
    request: dict[str, Any] = {"TableName": table} | _condition(change, write_id)
    key = _key(partition, change.row)
    if isinstance(change, Put):
        made = {"version": {"S": write_id}, "value": {"B": bytes(change.value)}}
        return request | {"Item": key | made}
    return request | {"Key": key}


def _condition(change: Change, write_id: str) -> dict[str, Any]:
    """Returns what a change expects of its row; a failed condition returns the current row.

    A put without an expectation expects that the row does not have this write's id. So a repeat of
    a write that landed is recognized by the refusal alone.
    """
    condition: dict[str, Any] = {
        "ConditionExpression": "attribute_not_exists(#version)",
        "ExpressionAttributeNames": {"#version": "version"},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    if change.expect is None:
        if not isinstance(change, Put):
            return {}
        condition["ConditionExpression"] += " OR #version <> :mine"
        condition["ExpressionAttributeValues"] = {":mine": {"S": write_id}}
    elif change.expect is not ABSENT:
        condition["ConditionExpression"] = "#version = :expected"
        condition["ExpressionAttributeValues"] = {":expected": {"S": change.expect}}
    return condition


def _range(partition: str, start: str, end: str | None) -> dict[str, Any]:
    """Returns a query for the rows of ``[start, end]``: only one comparison of a key is allowed."""
    names = {"#partition": "partition"}
    values = {":partition": {"S": partition}}
    condition = "#partition = :partition"
    if start and end is not None:
        condition += " AND #row BETWEEN :start AND :end"
    elif start:
        condition += " AND #row >= :start"
    elif end is not None:
        condition += " AND #row < :end"
    if start:
        values[":start"] = {"S": start}
    if end is not None:
        values[":end"] = {"S": end}
    if start or end is not None:
        names["#row"] = "row"
    return {
        "ConsistentRead": True,
        "KeyConditionExpression": condition,
        "ExpressionAttributeNames": names,
        "ExpressionAttributeValues": values,
    }


def _key(partition: str, row: str) -> dict[str, Any]:
    return {"partition": {"S": partition}, "row": {"S": row}}


# Replies.


def _row(partition: str, item: dict[str, Any]) -> Row:
    name = item["row"]["S"]
    try:
        return Row(name, bytes(item["value"]["B"]), item["version"]["S"])
    except KeyError as exc:
        raise CorruptError(
            f"row `{name}` of `{partition}`: has no {exc} of the type that we write: "
            "find out who else writes to this table",
            partition=partition,
            row=name,
        ) from exc


def _check_shape(table: str, found: TableDescriptionTypeDef) -> None:
    types = {each["AttributeName"]: each["AttributeType"] for each in found["AttributeDefinitions"]}
    key = tuple(
        (each["AttributeName"], each["KeyType"], types[each["AttributeName"]])
        for each in found["KeySchema"]
    )
    if key != _KEY:
        raise InvalidError(
            f"catalog table `{table}`: its key is {_spell(key)}, expected {_spell(_KEY)}: "
            "give the catalog a table of its own",
            table=table,
        )


def _spell(key: Sequence[tuple[str, str, str]]) -> str:
    return " + ".join(f"`{name}` ({kind}, {scalar})" for name, kind, scalar in key)


# Addresses.


def _table_name(address: Address) -> str:
    if address.port is not None or address.path not in ("", "/"):
        raise InvalidError(
            f"address `{address.text}`: names more than a table: "
            "give dynamodb://TABLE?region=…&endpoint=…"
        )
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", address.host):
        raise InvalidError(
            f"address `{address.text}`: `{address.host}` is not a valid table "
            "name: give 3 to 255 letters, digits, dots, dashes and underscores"
        )
    return address.host


def _check_endpoint(address: Address, endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        plain = parts.scheme in ("http", "https") and parts.hostname and not parts.query
    except ValueError:
        plain = False
    if "@" in endpoint:
        raise InvalidError(
            f"address `dynamodb://{address.host}…`: its endpoint names a user or password: "
            "leave it out, credentials come from the environment"
        )
    if not plain:
        raise InvalidError(
            f"address `{address.text}`: endpoint `{endpoint}` is not an http or https address: "
            "give http://host:port or https://host:port"
        )


_: type[Catalog] = DynamoCatalog
