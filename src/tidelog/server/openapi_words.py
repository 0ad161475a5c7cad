"""The words that descriptions of operations are made of, in OpenAPI."""

from __future__ import annotations

from typing import Any

from tidelog.model import limits as model_limits
from tidelog.server import limits

__all__ = [
    "BYTES",
    "LIMIT",
    "OFFSET",
    "PARTITION",
    "TIME",
    "TOPIC",
    "Json",
    "header",
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
