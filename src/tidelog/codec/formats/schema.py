"""The schema of typed columns: from DDL as Spark writes it, or from JSON Schema.

DDL is ``id bigint NOT NULL, at timestamp, user struct<name: string, age: int>, tags array<int>``;
names with other characters are in backticks. Of a JSON Schema, only what makes columns is used:
types, ``format`` of date-time and date, ``contentEncoding`` of base64, ``required`` and references
within the document. Limits on values are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.model.decoding import check_json_depth

__all__ = ["PREFIX", "parse_schema"]

PREFIX = "_tidelog_"  # of event columns whose names the schema uses itself
SCHEMA_BYTES_MAX = 1 << 20
DEPTH_MAX = (
    20  # of structs, arrays and maps in each other; a schema that refers to itself ends here
)
FIELDS_MAX = 2_000

_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_NESTED = ("decimal", "array", "map", "struct")
_SHAPE = "write `name type, name type`"
_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([<>(),:])|([^\s<>(),:`]+))")
_parse_json = msgspec.json.Decoder().decode
_JSON_TYPES = {
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "string": pa.string(),
}


def parse_schema(text: str) -> pa.Schema:
    """Returns the columns that a text describes. Raises ``InvalidError`` in one line."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise _wrong(f"has {len(text)} characters", f"give {SCHEMA_BYTES_MAX} at most")
    is_json = text.lstrip().startswith("{")
    fields = _json_fields(text) if is_json else _Ddl(text).fields_to_the_end()
    if not fields:
        raise _wrong("has no fields", "name one at least")
    for field in fields:
        if field.name.lower().startswith(PREFIX):
            raise _wrong(f"field `{field.name}` begins with {PREFIX}", "choose another name")
    if sum(map(_count, fields)) > FIELDS_MAX:
        raise _wrong(f"has more than {FIELDS_MAX} fields", "leave some out")
    return pa.schema(fields)


def _wrong(what: str, advice: str) -> InvalidError:
    return InvalidError(f"schema: {what}: {advice}")


def _count(field: pa.Field) -> int:
    kind = field.type
    return 1 + sum(_count(kind.field(index)) for index in range(kind.num_fields))


def _check_names(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Returns fields with different names, also for engines that ignore case."""
    found: dict[str, pa.Field] = {}
    for field in fields:
        if not field.name:
            raise _wrong("has a field without a name", "name it")
        if field.name.lower() in found:
            raise _wrong(f"field `{field.name}` is there twice", "rename one")
        found[field.name.lower()] = field
    return list(found.values())


class _Ddl:
    """Reads DDL token by token."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, bool]] = []  # and whether it is a name in backticks
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _wrong(f"`{text[position:][:20]}` is not understood", "close the backtick")
            quoted, sign, word = match.groups()
            self._tokens.append(
                (quoted.replace("``", "`"), True) if quoted else (sign or word, False)
            )
            position = match.end()
        self._next = 0

    def fields_to_the_end(self) -> list[pa.Field]:
        if not self._tokens:
            return []
        fields = self._fields(depth=0)
        if self._next < len(self._tokens):
            raise _wrong(f"`{self._tokens[self._next][0]}` is unexpected", _SHAPE)
        return fields

    def _fields(self, depth: int) -> list[pa.Field]:
        fields = [self._field(depth)]
        while self._skip(","):
            fields.append(self._field(depth))
        return _check_names(fields)

    def _field(self, depth: int) -> pa.Field:
        name = self._name("a field's name")
        self._skip(":")
        kind = self._type(name, depth)
        required = self._skip("not")
        if required and not self._skip("null"):
            raise _wrong(f"field `{name}` is NOT what?", "write NOT NULL")
        if self._skip("comment"):
            raise _wrong(f"field `{name}` has a comment", "remove it")
        return pa.field(name, kind, nullable=not required)

    def _type(self, name: str, depth: int) -> pa.DataType:
        if depth > DEPTH_MAX:
            raise _wrong(f"field `{name}` is nested too deeply", f"{DEPTH_MAX} levels at most")
        word = self._name(f"the type of `{name}`").lower()
        if word in _PLAIN:
            return _PLAIN[word]
        if word in ("decimal", "dec", "numeric"):
            return self._decimal(name)
        if word not in _NESTED:
            known = [*_PLAIN, *_NESTED]
            raise _wrong(
                f"field `{name}` has the unknown type `{word}`{nearest(word, known)}",
                f"give one of {', '.join(known)}",
            )
        self._expect("<", f"`{word}` of `{name}`")
        kind: pa.DataType
        if word == "struct":
            kind = pa.struct(self._fields(depth + 1))
        elif word == "array":
            kind = pa.list_(self._type(name, depth + 1))
        else:
            if self._type(name, depth + 1) != pa.string():
                raise _wrong(f"map `{name}` has keys that are not strings", "JSON has no others")
            self._expect(",", f"the key of map `{name}`")
            kind = pa.map_(pa.string(), self._type(name, depth + 1))
        self._expect(">", f"`{word}` of `{name}`")
        return kind

    def _decimal(self, name: str) -> pa.DataType:
        digits = [10, 0]
        if self._skip("("):
            for index in range(2):
                text = self._name(f"a number for the decimal `{name}`")
                if not (text.isascii() and text.isdigit() and len(text) < 4):
                    raise _wrong(f"decimal `{name}` has `{text}` digits", "give decimal(p, s)")
                digits[index] = int(text)
                if not self._skip(","):
                    break
            self._expect(")", f"decimal `{name}`")
        precision, scale = digits
        if not 1 <= precision <= 38 or scale > precision:
            raise _wrong(
                f"decimal({precision}, {scale}) of `{name}` cannot be",
                "38 digits at most, and no more behind the point than there are",
            )
        return pa.decimal128(precision, scale)

    def _name(self, what: str) -> str:
        if self._next >= len(self._tokens):
            raise _wrong(f"ends before {what}", _SHAPE)
        word, quoted = self._tokens[self._next]
        if not quoted and word in "<>(),:":
            raise _wrong(f"`{word}` is in the place of {what}", _SHAPE)
        self._next += 1
        return word

    def _skip(self, word: str) -> bool:
        if self._next < len(self._tokens):
            found, quoted = self._tokens[self._next]
            if not quoted and found.lower() == word:
                self._next += 1
                return True
        return False

    def _expect(self, sign: str, what: str) -> None:
        if not self._skip(sign):
            raise _wrong(f"has no `{sign}` after {what}", "write it as in array<string>")


def _json_fields(text: str) -> list[pa.Field]:
    check_json_depth(text, "schema")
    try:
        document = _parse_json(text)
    except msgspec.DecodeError as exc:
        raise _wrong(f"is not valid JSON ({exc})", "give JSON Schema, or DDL") from exc
    kind = _JsonSchema(document).type_of(document, "$", 0)[0]
    if not pa.types.is_struct(kind):
        raise _wrong("describes no object", "give `type: object` with `properties`")
    return list(kind)


class _JsonSchema:
    """Turns the parts of one document into types."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def type_of(self, part: Any, path: str, depth: int) -> tuple[pa.DataType, bool]:
        """Returns the type of a part, and whether it may be null."""
        if depth > DEPTH_MAX:
            raise _wrong(f"{path} is nested too deeply", f"{DEPTH_MAX} levels at most")
        if not isinstance(part, dict):
            raise _wrong(f"{path} is not an object", "describe it by its type")
        if "$ref" in part:
            return self.type_of(self._referred(part["$ref"], path), path, depth + 1)
        choices = part.get("anyOf", part.get("oneOf"))
        if choices is not None:
            return self._choice(choices, path, depth)
        names = part.get("type")
        listed = names if isinstance(names, list) else [names]
        others = [name for name in listed if name != "null"]
        if len(others) != 1 or not isinstance(others[0], str):
            raise _wrong(f"{path} has the type {names}", "give one type, with null or without")
        return self._plain(others[0], part, path, depth), len(others) < len(listed)

    def _choice(self, choices: Any, path: str, depth: int) -> tuple[pa.DataType, bool]:
        null = {"type": "null"}
        others = [each for each in choices if each != null] if isinstance(choices, list) else []
        if len(others) != 1:
            raise _wrong(f"{path} may be of several types", "a column has one, or one and null")
        kind, nullable = self.type_of(others[0], path, depth + 1)
        return kind, nullable or null in choices

    def _plain(self, name: str, part: dict[str, Any], path: str, depth: int) -> pa.DataType:
        if name == "object":
            return self._object(part, path, depth)
        if name == "array":
            kind, nullable = self.type_of(part.get("items"), f"{path}[]", depth + 1)
            return pa.list_(pa.field("item", kind, nullable=nullable))
        if name == "string" and part.get("format") == "date-time":
            return _PLAIN["timestamp"]
        if name == "string" and part.get("format") == "date":
            return _PLAIN["date"]
        if name == "string" and part.get("contentEncoding") == "base64":
            return _PLAIN["binary"]
        if name not in _JSON_TYPES:
            raise _wrong(
                f"{path} has the unknown type `{name}`{nearest(name, _JSON_TYPES)}",
                f"give one of {', '.join([*_JSON_TYPES, 'array', 'object'])}",
            )
        return _JSON_TYPES[name]

    def _object(self, part: dict[str, Any], path: str, depth: int) -> pa.DataType:
        properties = part.get("properties")
        if properties is None and isinstance(part.get("additionalProperties"), dict):
            inner = f"{path}.*"
            kind, nullable = self.type_of(part["additionalProperties"], inner, depth + 1)
            return pa.map_(pa.string(), pa.field("value", kind, nullable=nullable))
        required = part.get("required", [])
        if not isinstance(properties, dict) or not properties or not isinstance(required, list):
            raise _wrong(f"{path} is an object without properties", "name them")
        fields = []
        for name, each in properties.items():
            kind, nullable = self.type_of(each, f"{path}.{name}", depth + 1)
            fields.append(pa.field(name, kind, nullable=nullable or name not in required))
        return pa.struct(_check_names(fields))

    def _referred(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise _wrong(f"{path} refers to {reference}", "refer to a part of the same document")
        found = self._document
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise _wrong(f"{path} refers to {reference}, which is not there", "define it")
            found = found[name]
        return found
