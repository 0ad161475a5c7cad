"""The description of what the server does with events by their ids, and of journals."""

from __future__ import annotations

from tidelog.model.limits import ID_BYTES_MAX
from tidelog.server.openapi_words import (
    LIMIT,
    OFFSET,
    TIME,
    TOPIC,
    Json,
    json_answer,
    named,
    operation,
    parameter,
    path_topic,
    ref,
)
from tidelog.server.options import ServeOptions

__all__ = ["ids_paths"]

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
        "content": {"application/octet-stream": {"schema": {"type": "string"}}},
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
