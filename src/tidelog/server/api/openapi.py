"""The server's OpenAPI document; a test walks it."""

from __future__ import annotations

from typing import Any

from tidelog import __version__
from tidelog.model import limits as model_limits
from tidelog.model.limits import ID_BYTES_MAX
from tidelog.server.http import limits
from tidelog.server.options import ServeOptions

__all__ = ["description"]

Json = dict[str, Any]

TOPIC = {
    "type": "string",
    "pattern": "^[A-Za-z0-9_][A-Za-z0-9._-]*$",
    "maxLength": model_limits.TOPIC_NAME_MAX,
}
OFFSET = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
PARTITION = {"type": "integer", "minimum": 0, "maximum": model_limits.PARTITIONS_MAX - 1}
LIMIT = {"type": "integer", "minimum": 1, "maximum": limits.PAGE_EVENTS_MAX, "default": 100}
TIME = {"type": "string", "format": "date-time", "description": "In the years 1970 to 9999."}
MILLISECONDS = {"type": "integer", "minimum": 0, "maximum": model_limits.TIMESTAMP_MS_END - 1}
WHEN = {  # a bound of a range
    "anyOf": [TIME, {"type": "string", "pattern": "^-[1-9][0-9]{0,5}(ms|s|m|h|d)$"}],
}
CURSOR = {"type": "string", "format": "cursor", "minLength": 1}
DURATION = {"type": "string", "pattern": "^[1-9][0-9]{0,2}s$|^[1-9]m$|^1h$"}
_BASE64 = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{3}=|[A-Za-z0-9+/][AQgw]==)?$",
}
BYTES = {
    "description": "Text, or base64 for bytes that are not valid UTF-8.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"base64": _BASE64},
            "required": ["base64"],
            "additionalProperties": False,
        },
    ],
}


_VALUE = {
    "description": "Text; or any other JSON, which is stored as it is written; or base64 of bytes; "
    "null is a tombstone.",
    "anyOf": [
        *BYTES["anyOf"],
        {"type": ["array", "boolean", "null", "number"]},
        {"type": "object", "propertyNames": {"not": {"const": "base64"}}},
    ],
}


def operation(name: str, what: str, answers: Json, parameters: list[Json] | None = None) -> Json:
    """An operation that needs a token where there are any."""
    answers = answers | named("400", "401", "403", "429", "431", "500")
    found: Json = {
        "operationId": name,
        "summary": what,
        "security": [{"token": []}, {}],
        "responses": dict(sorted(answers.items())),
    }
    return found | ({"parameters": parameters} if parameters else {})


def path_topic() -> Json:
    """The topic in a path."""
    return parameter("topic", TOPIC, "path", "The topic")


def token() -> Json:
    """A token in a query."""
    return parameter("token", {"type": "string"}, "query", "A token, where no header can be sent")


def header(name: str, what: str, most: int | None = None) -> Json:
    """A header of a request."""
    schema: Json = {"type": "string", "minLength": 1}
    if most is not None:
        schema["maxLength"] = most
    return parameter(name, schema, "header", what)


def parameter(name: str, schema: Json, place: str, what: str, required: bool | None = None) -> Json:
    """A parameter; one in a path is always needed."""
    needed = place == "path" if required is None else required
    return {"name": name, "in": place, "required": needed, "description": what, "schema": schema}


def json_answer(what: str, schema: Json) -> Json:
    """An answer as JSON."""
    return {"description": what, "content": {"application/json": {"schema": schema}}}


def ref(name: str) -> Json:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def named(*statuses: str) -> Json:
    """Errors by their statuses."""
    return {status: {"$ref": f"#/components/responses/{status}"} for status in statuses}


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
    answers = {"200": json_answer("The event", shown), **named("404", "503")}
    return operation("get", "The newest event that has an id", answers, [path_topic(), _id()])


def _update(options: ServeOptions) -> Json:
    shown = _object(topic=TOPIC, id={"type": "string"}, bytes=OFFSET)
    answers = {"200": json_answer("It has the new value", shown)}
    answers |= named("404", "413", "503", "504")
    body = {
        "required": True,
        "description": f"The new value, as it is; at most {options.body_bytes_max} bytes.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "minLength": 1}}},
    }
    found = operation("update", "Give an event another value", answers, _parameters())
    return found | {"requestBody": body}


def _delete() -> Json:
    shown = _object(topic=TOPIC, id={"type": "string"}, deleted=OFFSET)
    answers = {"200": json_answer("No event has that id any more", shown)}
    answers |= named("404", "503", "504")
    return operation("delete", "Delete the events that have an id", answers, _parameters())


def _updated_value() -> Json:
    return _object(
        offset=OFFSET,
        value={"type": ["string", "null"], "description": "Base64"},
        url={"type": ["string", "null"], "description": "Of an object that is the value"},
    )


def _journals() -> Json:
    when = "ISO 8601, or back from now (-15m)"
    parameters = [
        path_topic(),
        parameter("start", WHEN, "query", f"{when}; default: the first event"),
        parameter("end", WHEN, "query", f"Exclusive; {when}; default: the last"),
        parameter("limit", LIMIT, "query", "How many entries at most"),
        parameter("cursor", CURSOR, "query", "Of the page before, instead of both"),
        parameter("presign", DURATION, "query", "How long URLs shall be good: 1h"),
    ]
    entry = _object(
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
    page = _object(
        topic=TOPIC,
        next={"type": ["string", "null"]},
        journals={"type": "array", "items": entry},
    )
    answer = json_answer("A `Link` header leads to the next page, if there is one", page)
    answer["headers"] = {"Link": {"schema": {"type": "string"}}}
    answers = {"200": answer, **named("404", "410", "503")}
    what = "The objects that hold the events of a range of times, for other readers"
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


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


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
            "/metrics": {"get": _plain("metrics", "Counts, for Prometheus", "text/plain", True)},
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
    return operation("topics", "All topics", {"200": json_answer("The topics", shown)})


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
    answers = {"200": json_answer("The topic", shown), **named("404")}
    return operation("topic", "One topic, and where its partitions end", answers, [path_topic()])


def _consumers() -> Json:
    partition = _object(
        partition=PARTITION,
        cursor={**OFFSET, "type": ["integer", "null"], "description": "null: nothing read yet"},
        end=OFFSET,
        lag=OFFSET,
        owner={"type": ["string", "null"], "description": "The id of a member"},
    )
    consumer = _object(
        name={"type": "string"},
        lag=OFFSET,
        partitions={"type": "array", "items": partition},
    )
    shown = _object(topic=TOPIC, consumers={"type": "array", "items": consumer})
    answers = {"200": json_answer("Its consumers, by name", shown), **named("404", "503")}
    what = "The consumers of a topic, and how far each is behind"
    return operation("consumers", what, answers, [path_topic()])


def _append(options: ServeOptions) -> Json:
    headers = [
        header("Idempotency-Key", "A repeat with the same key gets the first positions", 255),
        parameter(
            "Tidelog-If-Absent",
            {"enum": ["true"]},
            "header",
            "Refuse events whose ids are there already; all must have one",
        ),
        header("Tidelog-Key", "The key of an event given as bytes"),
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
        "description": f"At most {options.body_bytes_max} bytes.",
        "content": {
            "application/json": {"schema": one_or_many},
            "application/x-ndjson": {"schema": {"type": "string"}},
            "application/octet-stream": {"schema": {"type": "string"}},
            "text/plain": {"schema": {"type": "string"}},
        },
    }
    answers = {"201": json_answer("All events are durable", stored)}
    answers |= named("404", "409", "413", "415", "503", "504")
    found = operation("append", "Append events", answers, [path_topic(), *headers])
    return found | {"requestBody": body}


def _events() -> Json:
    parameters = [
        path_topic(),
        parameter("partition", PARTITION, "path", "A partition"),
        parameter(
            "offset",
            {"anyOf": [OFFSET, {"enum": ["earliest", "latest"]}], "default": "earliest"},
            "query",
            "Where to begin",
        ),
        parameter("limit", LIMIT, "query", "How many events at most"),
        parameter(
            "wait",
            {"type": "number", "minimum": 0, "maximum": limits.WAIT_S_MAX, "default": 0},
            "query",
            "How many seconds to wait for the first one",
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
    answer = json_answer("A page; its `Link` header leads to the next one", page)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {
        "Link": {"schema": {"type": "string"}, "required": True},
        "Tidelog-Next-Offset": {"schema": OFFSET, "required": True},
    }
    answers = {"200": answer, **named("404", "410", "503")}
    return operation("events", "Events of a partition, from an offset on", answers, parameters)


def _range() -> Json:
    when = "ISO 8601, or back from now (-15m)"
    parameters = [
        path_topic(),
        parameter("start", WHEN, "query", f"{when}; default 15 minutes before end"),
        parameter("end", WHEN, "query", f"Exclusive; {when}; default now"),
        parameter("limit", LIMIT, "query", "How many events at most"),
        parameter("cursor", CURSOR, "query", "Of the page before, instead of both"),
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
    answer = json_answer("By time; a `Link` header leads to the next page, if there is one", page)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {"Link": {"schema": {"type": "string"}}}
    answers = {"200": answer, **named("404", "410", "503")}
    return operation("range", "Events of a range of times, by time", answers, parameters)


def _tail() -> Json:
    parameters = [
        path_topic(),
        parameter("partition", PARTITION, "query", "Only this one"),
        parameter(
            "from",
            {"anyOf": [OFFSET, {"enum": ["earliest", "latest"]}], "default": "latest"},
            "query",
            "Where to begin, in each partition",
        ),
        token(),
        header("Last-Event-ID", "The id of the last event seen; the tail continues after it"),
    ]
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    stream = {"description": "Each event as JSON, as it comes", "content": content}
    answers = {"200": stream, **named("404", "410", "503")}
    return operation("tail", "Events as they come, as server-sent events", answers, parameters)


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
        parameter("ack", {"enum": ["0", "1"]}, "query", "0: answer before it is durable"),
        token(),
    ]
    gif = {"image/gif": {"schema": {"type": "string", "contentMediaType": "image/gif"}}}
    answer = {
        "description": "An image of one pixel; all other parameters are in the event",
        "content": gif,
        "headers": {"Tidelog-Position": {"schema": {"type": "string"}}},
    }
    name = "track_topic" if in_path else "track"
    answers = {"200": answer, **named("404", "413", "503", "504")}
    return operation(name, "Turn this request into an event", answers, parameters)


def _sql() -> Json:
    column = _object(name={"type": "string"}, type={"type": "string"})
    shown = _object(
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
    answers = {"200": json_answer("The rows", shown), **named("404", "413", "415", "503")}
    what = f"Query the topics that the token may read, in at most {limits.SQL_S:g} s"
    body = {"required": True, "content": {"application/json": {"schema": asked}}}
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
        "401": "No token, or none that is known",
        "403": "The token may not do this, or the request comes from a web page",
        "404": "There is no such topic, offset or id",
        "409": "The Idempotency-Key was used for other events, or ids are there already",
        "410": "The offset was trimmed",
        "413": "The body or an event is too large",
        "415": "A body of this type is not read here",
        "429": "Too many requests; Retry-After says how long to wait",
        "431": "The URL or the headers are too large",
        "500": "Something is wrong on the server",
        "503": "The home is out of reach, or the server is full: nothing was stored; Retry-After "
        "says how long to wait",
        "504": "All or a part of the events may be stored: the context's `positions` shows which "
        "are, `unknown` the indexes of those that may be",
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
