"""The server's OpenAPI document; a test walks it."""

from __future__ import annotations

from tidelog import __version__
from tidelog.model.limits import ID_BYTES_MAX
from tidelog.server.api.openapi_parts import (
    BYTES,
    CURSOR,
    DURATION,
    LIMIT,
    MILLISECONDS,
    OFFSET,
    PARTITION,
    TIME,
    TOPIC,
    WHEN,
    Json,
    header,
    json_answer,
    named,
    operation,
    parameter,
    path_topic,
    record,
    ref,
    size_words,
    token,
)
from tidelog.server.http import limits
from tidelog.server.options import ServeOptions

__all__ = ["description"]

_AT = "2026-11-15T10:00:00.000Z"
_EVENT = {  # in examples
    "topic": "orders",
    "partition": 0,
    "offset": 2,
    "timestamp": _AT,
    "id": "o-17",
    "key": "customer-7",
    "value": '{"price": 3}',
    "type": None,
    "headers": [],
}
_SENT_EXAMPLE = {"value": {"price": 3}, "key": "customer-7", "id": "o-17"}
_TOPIC_EXAMPLE = {"name": "orders", "partitions": 1, "slot_ms": 1000, "created": _AT}

_VALUE = {
    "description": "Text; or any other JSON, which is stored as it is written; or base64 of bytes; "
    "null is a tombstone.",
    "anyOf": [
        *BYTES["anyOf"],
        {"type": ["array", "boolean", "null", "number"]},
        {"type": "object", "propertyNames": {"not": {"const": "base64"}}},
    ],
}


_NUMBERS = {"type": "array", "items": OFFSET}


def ids_paths(options: ServeOptions) -> Json:
    """The paths, for a server with these options."""
    return {
        "/topics/{topic}/ids/{id}": {
            "get": _get(),
            "put": _update(options),
            "delete": _delete(),
        },
        "/topics/{topic}/journals": {"get": _journals()},
    }


def _get() -> Json:
    shown = {"allOf": [ref("StoredEvent")]}
    answers = {"200": json_answer("The event", shown, _EVENT), **named("404", "503")}
    return operation("get", "The newest event with an id", answers, [path_topic(), _id()])


def _update(options: ServeOptions) -> Json:
    shown = record(topic=TOPIC, id={"type": "string"}, bytes=OFFSET)
    example = {"topic": "orders", "id": "o-17", "bytes": 12}
    answers = {"200": json_answer("Readers see the new value", shown, example)}
    answers |= named("404", "413", "503", "504")
    value = {"schema": {"type": "string", "minLength": 1}, "example": '{"price": 3}'}
    body = {
        "required": True,
        "description": "The new value alone, without an event around it. The limit is "
        f"{size_words(options.body_bytes_max)}.",
        "content": {"application/octet-stream": value},
    }
    found = operation("update", "Replace the value of an event", answers, _parameters(), "amend")
    return found | {"requestBody": body}


def _delete() -> Json:
    shown = record(topic=TOPIC, id={"type": "string"}, deleted=OFFSET)
    example = {"topic": "orders", "id": "o-17", "deleted": 1}
    answers = {"200": json_answer("No event has this id any more", shown, example)}
    answers |= named("404", "503", "504")
    return operation("delete", "Delete the events with an id", answers, _parameters(), "erase")


def _updated_value() -> Json:
    return record(
        offset=OFFSET,
        value={"type": ["string", "null"], "description": "Base64"},
        url={"type": ["string", "null"], "description": "Of an object that is the value"},
    )


def _journals() -> Json:
    when = "ISO 8601, or relative to now (-15m)"
    parameters = [
        path_topic(),
        parameter("start", WHEN, "query", f"{when}; default: the first event"),
        parameter("end", WHEN, "query", f"Exclusive; {when}; default: the last event"),
        parameter("limit", LIMIT, "query", "The number of entries of a page"),
        parameter(
            "cursor", CURSOR, "query", "`next` of the previous page; replaces `start` and `end`"
        ),
        parameter(
            "presign",
            DURATION,
            "query",
            "Add URLs that work for this long, such as 1h; the limit is 1h",
        ),
    ]
    entry = record(
        topic=TOPIC,
        partition=OFFSET,
        base=OFFSET,
        end=OFFSET,
        start={**OFFSET, "description": "Leave out what is below: trimmed, or listed before"},
        events=OFFSET,
        first=TIME,
        last=TIME,
        format={"enum": ["parquet", "arrow"]},
        object={"type": "string"},
        byte_start=OFFSET,
        byte_end=OFFSET,
        crc32c=OFFSET,
        schema={"type": ["array", "null"], "items": OFFSET},
        deleted=_NUMBERS,
        updated=_NUMBERS,
        values={"type": "array", "items": _updated_value()},
        url={"type": ["string", "null"]},
    )
    page = record(
        topic=TOPIC,
        next={"type": ["string", "null"]},
        journals={"type": "array", "items": entry},
    )
    answer = json_answer(
        "A page. `next` is the cursor of the next page, or null after the last", page
    )
    answer["headers"] = {"Link": {"schema": {"type": "string"}}}
    answers = {"200": answer, **named("404", "410", "503")}
    what = "The objects that hold the events of a time range, for readers without Tidelog"
    return operation("journals", what, answers, parameters)


def _parameters() -> list[Json]:
    why = parameter("why", {"type": "string", "maxLength": 2_000}, "query", "For the audit")
    return [path_topic(), _id(), why]


_ID = (
    "The event's id, percent-encoded. Encode the dots of the ids `.` and `..` too (`%2E`, "
    "`%2E%2E`): clients remove such parts from a path"
)


def _id() -> Json:
    schema = {"type": "string", "minLength": 1, "maxLength": ID_BYTES_MAX}
    return parameter("id", schema, "path", _ID)


def description(options: ServeOptions) -> Json:
    """The whole document, for a server with these options."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidelog",
            "version": __version__,
            "description": "Events in and out of the topics of one home.",
        },
        "paths": {
            "/topics": {"get": _topics()},
            "/topics/{topic}": {"get": _topic()},
            "/topics/{topic}/consumers": {"get": _consumers()},
            "/topics/{topic}/events": {"get": _range(), "post": _append(options)},
            "/topics/{topic}/partitions/{partition}/events": {"get": _events()},
            "/topics/{topic}/tail": {"get": _tail()},
            **ids_paths(options),
            "/track.gif": {"get": _track(False, options)},
            "/track/{topic}.gif": {"get": _track(True, options)},
            "/sql": {"post": _sql()},
            "/metrics": {"get": _plain("metrics", "Metrics for Prometheus", "text/plain", True)},
            "/healthz": {"get": _plain("health", "Whether the process answers")},
            "/readyz": {"get": _ready()},
            "/openapi.json": {"get": _plain("openapi", "This description")},
            "/docs": {"get": _plain("docs", "This description, as a page", "text/html")},
        },
        "components": {
            "schemas": _schemas(),
            "responses": _errors(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _topics() -> Json:
    listed = {"type": "array", "items": ref("Topic")}
    shown = {"type": "object", "properties": {"topics": listed}, "required": ["topics"]}
    return operation(
        "topics",
        "All topics",
        {"200": json_answer("The topics", shown, {"topics": [_TOPIC_EXAMPLE]})},
    )


def _topic() -> Json:
    row = {
        "type": "object",
        "properties": {"partition": OFFSET, "start": OFFSET, "next": OFFSET},
        "required": ["partition", "start", "next"],
    }
    rows = {
        "type": "object",
        "properties": {"per_partition": {"type": "array", "items": row}},
        "required": ["per_partition"],
    }
    shown = {"allOf": [ref("Topic"), rows]}
    example = _TOPIC_EXAMPLE | {"per_partition": [{"partition": 0, "start": 0, "next": 3}]}
    answers = {"200": json_answer("The topic", shown, example), **named("404")}
    return operation(
        "topic", "A topic, with start and end of its partitions", answers, [path_topic()]
    )


def _consumers() -> Json:
    partition = record(
        partition=PARTITION,
        cursor={**OFFSET, "type": ["integer", "null"], "description": "null: nothing read yet"},
        end=OFFSET,
        lag=OFFSET,
        owner={"type": ["string", "null"], "description": "The id of a member"},
    )
    consumer = record(
        name={"type": "string"},
        lag=OFFSET,
        partitions={"type": "array", "items": partition},
    )
    shown = record(topic=TOPIC, consumers={"type": "array", "items": consumer})
    read = {"partition": 0, "cursor": 2, "end": 8, "lag": 6, "owner": None}
    example = {
        "topic": "orders",
        "consumers": [{"name": "billing", "lag": 6, "partitions": [read]}],
    }
    answer = json_answer("Its consumers, by name", shown, example)
    answers = {"200": answer, **named("404", "503")}
    what = "The consumers of a topic, with their lag"
    return operation("consumers", what, answers, [path_topic()])


def _append(options: ServeOptions) -> Json:
    headers = [
        header(
            "Idempotency-Key",
            "A repeat with the same key and events stores nothing and returns the first positions",
            255,
        ),
        parameter(
            "Tidelog-If-Absent",
            {"enum": ["true"]},
            "header",
            "Refuse events whose ids exist; every event must have an id",
        ),
        header("Tidelog-Key", "The key of an event whose value is the body"),
        header("Tidelog-Id", "Its id"),
        header("Tidelog-Time", "Its time: ISO 8601, or milliseconds since 1970"),
        header("Tidelog-Type", "Its type"),
    ]
    position = {
        "type": "object",
        "properties": {"partition": OFFSET, "offset": OFFSET},
        "required": ["partition", "offset"],
    }
    stored = {
        "type": "object",
        "properties": {
            "topic": TOPIC,
            "positions": {"type": "array", "items": position},
            "forwarded": {"type": "integer", "description": "Events that went to another system"},
        },
        "required": ["topic", "positions"],
    }
    one_or_many = {"anyOf": [ref("Event"), {"type": "array", "items": ref("Event"), "minItems": 1}]}
    body = {
        "required": True,
        "description": "One event or a list of events as JSON, one event on each line as NDJSON, "
        "or bytes, which become the value of one event. Only `value` is required. It is text, "
        'any other JSON, {"base64": …} or null. '
        f"The limit is {size_words(options.body_bytes_max)}.",
        "content": {
            "application/json": {"schema": one_or_many, "example": _SENT_EXAMPLE},
            "application/x-ndjson": {"schema": {"type": "string"}},
            "application/octet-stream": {"schema": {"type": "string"}},
            "text/plain": {"schema": {"type": "string"}},
        },
    }
    example = {"topic": "orders", "positions": [{"partition": 0, "offset": 2}]}
    answers = {"201": json_answer("All events are durable", stored, example)}
    answers |= named("404", "409", "413", "415", "503", "504")
    found = operation("append", "Append events", answers, [path_topic(), *headers], "append")
    return found | {"requestBody": body}


def _events() -> Json:
    parameters = [
        path_topic(),
        parameter("partition", PARTITION, "path", "The partition"),
        parameter(
            "offset",
            {"anyOf": [OFFSET, {"enum": ["earliest", "latest"]}], "default": "earliest"},
            "query",
            "The first offset, `earliest` or `latest`",
        ),
        parameter("limit", LIMIT, "query", "The number of events of a page"),
        parameter(
            "wait",
            {"type": "number", "minimum": 0, "maximum": limits.WAIT_S_MAX, "default": 0},
            "query",
            "Seconds to wait if there is no event yet",
        ),
    ]
    page = {
        "type": "object",
        "properties": {
            "topic": TOPIC,
            "partition": OFFSET,
            "start": OFFSET,
            "end": OFFSET,
            "next": OFFSET,
            "events": {"type": "array", "items": ref("StoredEvent")},
        },
        "required": ["topic", "partition", "start", "end", "next", "events"],
    }
    example: Json = {"topic": "orders", "partition": 0, "start": 0, "end": 3, "next": 3}
    example |= {"events": [_EVENT]}
    answer = json_answer("A page. `next` is the offset of the next page", page, example)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {
        "Link": {"schema": {"type": "string"}, "required": True},
        "Tidelog-Next-Offset": {"schema": OFFSET, "required": True},
    }
    answers = {"200": answer, **named("404", "410", "503")}
    return operation("events", "Events of a partition, from an offset", answers, parameters)


def _range() -> Json:
    when = "ISO 8601, or relative to now (-15m)"
    parameters = [
        path_topic(),
        parameter("start", WHEN, "query", f"{when}; default: 15 minutes before `end`"),
        parameter("end", WHEN, "query", f"Exclusive; {when}; default: now"),
        parameter("limit", LIMIT, "query", "The number of events of a page"),
        parameter(
            "cursor", CURSOR, "query", "`next` of the previous page; replaces `start` and `end`"
        ),
    ]
    page = {
        "type": "object",
        "properties": {
            "topic": TOPIC,
            "start": TIME,
            "end": TIME,
            "next": {"type": ["string", "null"]},
            "events": {"type": "array", "items": ref("StoredEvent")},
        },
        "required": ["topic", "start", "end", "next", "events"],
    }
    example: Json = {"topic": "orders", "start": "2026-11-15T09:45:00.000Z", "end": _AT}
    example |= {"next": None, "events": [_EVENT]}
    said = "A page, by time. `next` is the cursor of the next page, or null after the last"
    answer = json_answer(said, page, example)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {"Link": {"schema": {"type": "string"}}}
    answers = {"200": answer, **named("404", "410", "503")}
    return operation("range", "Events of a time range, by time", answers, parameters)


def _tail() -> Json:
    parameters = [
        path_topic(),
        parameter("partition", PARTITION, "query", "Only this partition; default: all"),
        parameter(
            "from",
            {"anyOf": [OFFSET, {"enum": ["earliest", "latest"]}], "default": "latest"},
            "query",
            "`earliest`, `latest`, or an offset of each partition",
        ),
        token(),
        header("Last-Event-ID", "The `id:` of the last message; the tail continues after it"),
    ]
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    stream = {
        "description": "A message for each event, as JSON, when it is appended",
        "content": content,
    }
    answers = {"200": stream, **named("404", "410", "503")}
    return operation("tail", "New events, as server-sent events", answers, parameters)


def _track(in_path: bool, options: ServeOptions) -> Json:
    topic = path_topic()
    if not in_path:
        needed = options.topic_default is None
        topic = parameter("topic", TOPIC, "query", "The topic", required=needed)
    parameters = [
        topic,
        parameter("id", {"type": "string", "minLength": 1}, "query", "The event's id"),
        parameter("key", {"type": "string"}, "query", "Its key"),
        parameter("t", {"anyOf": [TIME, MILLISECONDS]}, "query", "Its time"),
        parameter("ack", {"enum": ["0", "1"]}, "query", "0: respond before the event is durable"),
        token(),
    ]
    gif = {"image/gif": {"schema": {"type": "string", "contentMediaType": "image/gif"}}}
    answer = {
        "description": "An image of one pixel. The event's value is JSON with all other parameters",
        "content": gif,
        "headers": {"Tidelog-Position": {"schema": {"type": "string"}}},
    }
    name = "track_topic" if in_path else "track"
    answers = {"200": answer, **named("404", "413", "503", "504")}
    what = "A tracking pixel: append this request as an event"
    return operation(name, what, answers, parameters, "pixel")


def _sql() -> Json:
    column = record(name={"type": "string"}, type={"type": "string"})
    shown = record(
        columns={"type": "array", "items": column},
        is_whole={"type": "boolean", "description": "false: a limit was reached"},
        rows={"type": "array", "items": {"type": "object"}, "maxItems": limits.PAGE_EVENTS_MAX},
    )
    values = {"anyOf": [{"type": "array"}, {"type": "object"}, {"type": "null"}]}
    asked = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "One SELECT, in DuckDB's SQL"},
            "values": {**values, "description": "For the `?` or `$name` of the query"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    example = {"columns": [{"name": "n", "type": "int64"}], "is_whole": True, "rows": [{"n": 3}]}
    answer = json_answer("The rows", shown, example)
    answers = {"200": answer, **named("404", "413", "415", "503")}
    most = f"the limit is {limits.SQL_CPU_S:g} s of processor time"
    what = f"Query the topics that the token may read; {most}"
    sent = {"schema": asked, "example": {"query": "select count(*) as n from orders"}}
    said = "`values` are for the `?` or `$name` of the query"
    body = {"required": True, "description": said, "content": {"application/json": sent}}
    return operation("sql", what, answers) | {"requestBody": body}


def _ready() -> Json:
    ready = _plain("ready", "Whether the store and the catalog answer")
    ready["responses"] |= named("503")
    return ready


def _plain(name: str, what: str, media: str = "application/json", secured: bool = False) -> Json:
    schema = {"type": "string"} if media.startswith("text/") else {"type": "object"}
    answers = {"200": {"description": what, "content": {media: {"schema": schema}}}}
    if secured:
        return operation(name, what, answers)
    return {
        "operationId": name,
        "summary": what,
        "security": [],
        "responses": answers | named("400", "431", "500"),
    }


def _errors() -> Json:
    told = {
        "400": "The request is wrong",
        "401": "The token is missing, unknown or expired",
        "403": "The token lacks the scope, or a page of another site sent the request",
        "404": "The topic, partition, offset or id does not exist",
        "409": "The Idempotency-Key was used for other events, or an id exists",
        "410": "The offset was trimmed",
        "413": "The body or an event is too large",
        "415": "The content-type is not one of those above",
        "429": "Too many requests; Retry-After says how long to wait",
        "431": "The URL or the headers are too large",
        "500": "The server failed; its standard error has the details",
        "503": "The home is out of reach, or the server is full. Nothing was changed; Retry-After "
        "says how long to wait",
        "504": "The change may have been made. For an append, `positions` of the context shows "
        "what is stored, and `unknown` the indexes of events that may be",
    }
    return {status: json_answer(what, ref("Error")) for status, what in told.items()}


def _schemas() -> Json:
    nullable_text = {"type": ["string", "null"]}
    nullable_bytes = {"anyOf": [*BYTES["anyOf"], {"type": "null"}]}
    pair = {"type": "array", "prefixItems": [{"type": "string"}, nullable_bytes], "minItems": 2}
    fields: Json = {
        "value": nullable_bytes,
        "key": nullable_bytes,
        "id": {"type": ["string", "null"], "minLength": 1, "maxLength": ID_BYTES_MAX},
        "timestamp": {"anyOf": [TIME, MILLISECONDS, {"type": "null"}]},
        "type": nullable_text,
        "headers": {"type": ["array", "null"], "items": pair | {"maxItems": 2}},
    }
    position: Json = {"topic": TOPIC, "partition": OFFSET, "offset": OFFSET}
    stored = fields | position | {"timestamp": TIME, "id": nullable_text}
    error: Json = {"kind": {"type": "string"}, "message": {"type": "string"}}
    error["context"] = {"type": "object"}
    return {
        "Event": {
            "type": "object",
            "description": "A position is ignored, so that what was read can be sent again.",
            "properties": fields | {"value": _VALUE} | {name: {} for name in position},
            "required": ["value"],
            "additionalProperties": False,
        },
        "StoredEvent": {"type": "object", "properties": stored, "required": list(stored)},
        "Topic": {
            "type": "object",
            "properties": {
                "name": TOPIC,
                "partitions": {"type": "integer", "minimum": 1},
                "slot_ms": {"type": "integer", "minimum": 1},
                "created": TIME,
            },
            "required": ["name", "partitions", "slot_ms", "created"],
        },
        "Error": {
            "type": "object",
            "properties": {
                "error": {"type": "object", "properties": error, "required": list(error)}
            },
            "required": ["error"],
        },
    }
