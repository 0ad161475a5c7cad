"""What the descriptions of the server's operations are built from: schemas, parameters, answers."""

from __future__ import annotations

from typing import Any

from tidelog.model import limits as model_limits
from tidelog.server.http import limits

__all__ = [
    "BYTES",
    "COMMON_ERRORS",
    "CURSOR",
    "DURATION",
    "LIMIT",
    "MILLISECONDS",
    "OFFSET",
    "PARTITION",
    "TIME",
    "TOPIC",
    "WHEN",
    "Json",
    "header",
    "json_answer",
    "limits_text",
    "named",
    "operation",
    "parameter",
    "path_topic",
    "record",
    "ref",
    "size_words",
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


COMMON_ERRORS = ("400", "401", "403", "429", "431", "500", "503")  # of all routes, listed once


def operation(
    name: str, what: str, answers: Json, parameters: list[Json] | None = None, scope: str = "read"
) -> Json:
    """An operation that needs a token with a scope where there are any."""
    answers = answers | named("400", "401", "403", "429", "431", "500")
    found: Json = {
        "operationId": name,
        "summary": what,
        "security": [{"token": []}, {}],
        "x-scope": scope,
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


def json_answer(what: str, schema: Json, example: Any = None) -> Json:
    """An answer as JSON."""
    content: Json = {"schema": schema} | ({} if example is None else {"example": example})
    return {"description": what, "content": {"application/json": content}}


def ref(name: str) -> Json:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def named(*statuses: str) -> Json:
    """Errors by their statuses."""
    return {status: {"$ref": f"#/components/responses/{status}"} for status in statuses}


def size_words(count: int) -> str:
    """Returns a number of bytes, in MiB where it is a whole number of them."""
    return f"{count >> 20} MiB" if count and count % (1 << 20) == 0 else f"{count:,} bytes"


def limits_text(schema: Json) -> str:
    """Returns the range and the default of a parameter in words; empty if it has none."""
    found = []
    if "minimum" in schema and schema.get("maximum", 2**63) < 2**31:
        found.append(f"{schema['minimum']} to {schema['maximum']}")
    if "default" in schema:
        found.append(f"default: {schema['default']}")
    return ", ".join(found)


def record(**properties: Json) -> Json:
    """A schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}
