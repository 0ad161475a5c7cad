"""The words that descriptions of operations are made of, in OpenAPI.

The description of what the server does with events by their ids, and of journals.
"""

from __future__ import annotations

from typing import Any

from tidelog.model import limits as model_limits
from tidelog.model.limits import ID_BYTES_MAX
from tidelog.server.http import limits
from tidelog.server.options import ServeOptions

__all__ = [
    "BYTES",
    "LIMIT",
    "OFFSET",
    "PARTITION",
    "TIME",
    "TOPIC",
    "Json",
    "header",
    "ids_paths",
    "json_answer",
    "named",
    "operation",
    "parameter",
    "path_topic",
    "ref",
    "token",
]

Json = dict[str, Any]

TOPIC = {
    "type": "string",
    "pattern": "^[A-Za-z0-9_][A-Za-z0-9._-]*$",
    "maxLength": model_limits.TOPIC_NAME_MAX,
}
OFFSET = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
PARTITION = {"type": "integer", "minimum": 0, "maximum": model_limits.PARTITIONS_MAX - 1}
LIMIT = {"type": "integer", "minimum": 1, "maximum": limits.PAGE_EVENTS_MAX, "default": 100}
TIME = {"type": "string", "format": "date-time"}
BYTES = {
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


def _journals() -> Json:
    when = "ISO 8601, or back from now (-15m)"
    parameters = [
        path_topic(),
        parameter("start", {"type": "string"}, "query", f"{when}; default: the first event"),
        parameter("end", {"type": "string"}, "query", f"Exclusive; {when}; default: the last"),
        parameter("limit", LIMIT, "query", "How many entries at most"),
        parameter("cursor", {"type": "string"}, "query", "Of the page before, instead of both"),
        parameter("presign", {"type": "string"}, "query", "How long URLs shall be good: 1h"),
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
