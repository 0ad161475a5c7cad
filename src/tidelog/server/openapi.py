"""The description of what the server takes and answers, in OpenAPI; a test walks it."""

from __future__ import annotations

from typing import Any

from tidelog import __version__
from tidelog.model import limits as model_limits
from tidelog.server import limits
from tidelog.server.options import ServeOptions

__all__ = ["description"]

Json = dict[str, Any]

_TOPIC = {
    "type": "string",
    "pattern": "^[A-Za-z0-9_][A-Za-z0-9._-]*$",
    "maxLength": model_limits.TOPIC_NAME_MAX,
}
_OFFSET = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_PARTITION = {"type": "integer", "minimum": 0, "maximum": model_limits.PARTITIONS_MAX - 1}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": limits.PAGE_EVENTS_MAX, "default": 100}
_TIME = {"type": "string", "format": "date-time"}
_BYTES = {
    "description": "Text, or bytes as base64 where they are no UTF-8.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"base64": {"type": "string", "contentEncoding": "base64"}},
            "required": ["base64"],
            "additionalProperties": False,
        },
    ],
}


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
            "/topics/{topic}/events": {"get": _range(), "post": _append(options)},
            "/topics/{topic}/partitions/{partition}/events": {"get": _events()},
            "/topics/{topic}/tail": {"get": _tail()},
            "/track.gif": {"get": _track(False, options)},
            "/track/{topic}.gif": {"get": _track(True, options)},
            "/metrics": {"get": _plain("metrics", "Counts, for Prometheus", "text/plain", True)},
            "/healthz": {"get": _plain("health", "Whether the process answers")},
            "/readyz": {"get": _ready()},
            "/openapi.json": {"get": _plain("openapi", "This description")},
        },
        "components": {
            "schemas": _schemas(),
            "responses": _errors(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _topics() -> Json:
    listed = {"type": "array", "items": _ref("Topic")}
    shown = {"type": "object", "properties": {"topics": listed}, "required": ["topics"]}
    return _operation("topics", "All topics", {"200": _json("The topics", shown)})


def _topic() -> Json:
    row = {
        "type": "object",
        "properties": {"partition": _OFFSET, "start": _OFFSET, "next": _OFFSET},
        "required": ["partition", "start", "next"],
    }
    rows = {
        "type": "object",
        "properties": {"per_partition": {"type": "array", "items": row}},
        "required": ["per_partition"],
    }
    shown = {"allOf": [_ref("Topic"), rows]}
    answers = {"200": _json("The topic", shown), **_named("404")}
    return _operation("topic", "One topic, and where its partitions end", answers, [_path_topic()])


def _append(options: ServeOptions) -> Json:
    headers = [
        _header("Idempotency-Key", "A repeat with the same key gets the first positions", 255),
        _header("Tidelog-Key", "The key of an event given as bytes"),
        _header("Tidelog-Id", "Its id"),
        _header("Tidelog-Time", "Its time: ISO 8601, or milliseconds since 1970"),
        _header("Tidelog-Type", "Its type"),
    ]
    position = {
        "type": "object",
        "properties": {"partition": _OFFSET, "offset": _OFFSET},
        "required": ["partition", "offset"],
    }
    stored = {
        "type": "object",
        "properties": {
            "topic": _TOPIC,
            "positions": {"type": "array", "items": position, "minItems": 1},
        },
        "required": ["topic", "positions"],
    }
    one_or_many = {"anyOf": [_ref("Event"), {"type": "array", "items": _ref("Event")}]}
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
    answers = {"201": _json("All events are durable", stored)}
    answers |= _named("404", "409", "413", "415", "503", "504")
    found = _operation("append", "Append events", answers, [_path_topic(), *headers])
    return found | {"requestBody": body}


def _events() -> Json:
    parameters = [
        _path_topic(),
        _parameter("partition", _PARTITION, "path", "A partition"),
        _parameter(
            "offset",
            {"anyOf": [_OFFSET, {"enum": ["earliest", "latest"]}], "default": "earliest"},
            "query",
            "Where to begin",
        ),
        _parameter("limit", _LIMIT, "query", "How many events at most"),
        _parameter(
            "wait",
            {"type": "number", "minimum": 0, "maximum": limits.WAIT_S_MAX, "default": 0},
            "query",
            "How many seconds to wait for the first one",
        ),
    ]
    page = {
        "type": "object",
        "properties": {
            "topic": _TOPIC,
            "partition": _OFFSET,
            "start": _OFFSET,
            "end": _OFFSET,
            "next": _OFFSET,
            "events": {"type": "array", "items": _ref("StoredEvent")},
        },
        "required": ["topic", "partition", "start", "end", "next", "events"],
    }
    answer = _json("A page; its `Link` header leads to the next one", page)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {
        "Link": {"schema": {"type": "string"}, "required": True},
        "Tidelog-Next-Offset": {"schema": _OFFSET, "required": True},
    }
    answers = {"200": answer, **_named("404", "410", "503")}
    return _operation("events", "Events of a partition, from an offset on", answers, parameters)


def _range() -> Json:
    when = "ISO 8601, or back from now (-15m)"
    parameters = [
        _path_topic(),
        _parameter("start", {"type": "string"}, "query", f"{when}; default 15 minutes before end"),
        _parameter("end", {"type": "string"}, "query", f"Exclusive; {when}; default now"),
        _parameter("limit", _LIMIT, "query", "How many events at most"),
        _parameter("cursor", {"type": "string"}, "query", "Of the page before, instead of both"),
    ]
    page = {
        "type": "object",
        "properties": {
            "topic": _TOPIC,
            "start": _TIME,
            "end": _TIME,
            "next": {"type": ["string", "null"]},
            "events": {"type": "array", "items": _ref("StoredEvent")},
        },
        "required": ["topic", "start", "end", "next", "events"],
    }
    answer = _json("By time; a `Link` header leads to the next page, if there is one", page)
    answer["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    answer["headers"] = {"Link": {"schema": {"type": "string"}}}
    answers = {"200": answer, **_named("404", "410", "503")}
    return _operation("range", "Events of a range of times, by time", answers, parameters)


def _tail() -> Json:
    parameters = [
        _path_topic(),
        _parameter("partition", _PARTITION, "query", "Only this one"),
        _parameter(
            "from",
            {"anyOf": [_OFFSET, {"enum": ["earliest", "latest"]}], "default": "latest"},
            "query",
            "Where to begin, in each partition",
        ),
        _token(),
        _header("Last-Event-ID", "The id of the last event that was seen: go on after it"),
    ]
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    stream = {"description": "Each event as JSON, as it comes", "content": content}
    answers = {"200": stream, **_named("404", "410", "503")}
    return _operation("tail", "Events as they come, as server-sent events", answers, parameters)


def _track(in_path: bool, options: ServeOptions) -> Json:
    topic = _path_topic()
    if not in_path:
        needed = options.topic_default is None
        topic = _parameter("topic", _TOPIC, "query", "The topic", required=needed)
    parameters = [
        topic,
        _parameter("id", {"type": "string", "minLength": 1}, "query", "The event's id"),
        _parameter("key", {"type": "string"}, "query", "Its key"),
        _parameter("t", {"anyOf": [_TIME, _OFFSET]}, "query", "Its time"),
        _parameter("ack", {"enum": ["0", "1"]}, "query", "0: answer before it is durable"),
        _token(),
    ]
    gif = {"image/gif": {"schema": {"type": "string", "contentMediaType": "image/gif"}}}
    answer = {
        "description": "An image of one pixel; all other parameters are in the event",
        "content": gif,
        "headers": {"Tidelog-Position": {"schema": {"type": "string"}}},
    }
    name = "track_topic" if in_path else "track"
    answers = {"200": answer, **_named("404", "413", "503", "504")}
    return _operation(name, "Turn this request into an event", answers, parameters)


def _ready() -> Json:
    ready = _plain("ready", "Whether the store and the catalog answer")
    ready["responses"] |= _named("503")
    return ready


def _plain(name: str, what: str, media: str = "application/json", secured: bool = False) -> Json:
    schema = {"type": "string"} if media == "text/plain" else {"type": "object"}
    answers = {"200": {"description": what, "content": {media: {"schema": schema}}}}
    if secured:
        return _operation(name, what, answers)
    return {
        "operationId": name,
        "summary": what,
        "security": [],
        "responses": answers | _named("400", "431", "500"),
    }


def _operation(name: str, what: str, answers: Json, parameters: list[Json] | None = None) -> Json:
    answers = answers | _named("400", "401", "403", "429", "431", "500")
    found: Json = {
        "operationId": name,
        "summary": what,
        "security": [{"token": []}, {}],
        "responses": dict(sorted(answers.items())),
    }
    return found | ({"parameters": parameters} if parameters else {})


def _path_topic() -> Json:
    return _parameter("topic", _TOPIC, "path", "The topic")


def _token() -> Json:
    return _parameter("token", {"type": "string"}, "query", "A token, where no header can be sent")


def _header(name: str, what: str, most: int | None = None) -> Json:
    schema: Json = {"type": "string", "minLength": 1}
    if most is not None:
        schema["maxLength"] = most
    return _parameter(name, schema, "header", what)


def _parameter(
    name: str, schema: Json, place: str, what: str, required: bool | None = None
) -> Json:
    needed = place == "path" if required is None else required
    return {"name": name, "in": place, "required": needed, "description": what, "schema": schema}


def _json(what: str, schema: Json) -> Json:
    return {"description": what, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _named(*statuses: str) -> Json:
    return {status: {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _errors() -> Json:
    told = {
        "400": "The request is wrong",
        "401": "No token, or none that is known",
        "403": "The token may not do this, or the request comes from a web page",
        "404": "There is no such topic or offset",
        "409": "The Idempotency-Key was used for other events",
        "410": "The offset was trimmed",
        "413": "The body or an event is too large",
        "415": "A body of this type is not read here",
        "429": "Too many requests; Retry-After says how long to wait",
        "431": "The URL or the headers are too large",
        "500": "Something is wrong on the server",
        "503": "The home is out of reach, or the server is full; Retry-After says how long to wait",
        "504": "Nobody can tell whether the events were stored",
    }
    return {status: _json(what, _ref("Error")) for status, what in told.items()}


def _schemas() -> Json:
    nullable_text = {"type": ["string", "null"]}
    nullable_bytes = {"anyOf": [*_BYTES["anyOf"], {"type": "null"}]}
    pair = {"type": "array", "prefixItems": [{"type": "string"}, _BYTES], "minItems": 2}
    fields: Json = {
        "value": nullable_bytes,
        "key": nullable_bytes,
        "id": {"type": ["string", "null"], "minLength": 1, "maxLength": 16_384},
        "timestamp": {"anyOf": [_TIME, _OFFSET, {"type": "null"}]},
        "type": nullable_text,
        "headers": {"type": ["array", "null"], "items": pair | {"maxItems": 2}},
    }
    position: Json = {"topic": _TOPIC, "partition": _OFFSET, "offset": _OFFSET}
    stored = fields | position | {"timestamp": _TIME, "id": nullable_text}
    error: Json = {"kind": {"type": "string"}, "message": {"type": "string"}}
    error["context"] = {"type": "object"}
    return {
        "Event": {
            "type": "object",
            "description": "A position is ignored, so that what was read can be sent again.",
            "properties": fields | {name: {} for name in position},
            "required": ["value"],
            "additionalProperties": False,
        },
        "StoredEvent": {"type": "object", "properties": stored, "required": list(stored)},
        "Topic": {
            "type": "object",
            "properties": {
                "name": _TOPIC,
                "partitions": {"type": "integer", "minimum": 1},
                "slot_ms": {"type": "integer", "minimum": 1},
                "created": _TIME,
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
