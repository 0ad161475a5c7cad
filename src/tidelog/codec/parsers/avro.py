"""Times in a field of an Avro record: numbers, text, or Avro's own times and dates.

A value is either the record alone, whose schema a file tells, or *framed* as schema registries have
it: a zero byte and the schema's id in four bytes stand before it.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from tidelog.codec.parsers.avro_schemas import folder_schemas, read_schema, registry_schemas
from tidelog.codec.parsers.base import Spec, TimeParser, shown
from tidelog.codec.parsers.decoded import Decode, decoded_times, field_text
from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = ["open_avro"]

_FRAME_BYTES = 5
_OPTIONS = ("schema", "schemas", "registry", "framed")


def open_avro(spec: Spec) -> TimeParser:
    """``avro:FIELD?`` with one of the following.

    ``schema=FILE``: the schema of all values; with ``&framed=yes`` they are framed, ids unread.
    ``schemas=FOLDER``: framed; the schema with id 7 is in ``7.avsc``.
    ``registry=URL``: framed; asked for each id once.
    """
    argument, options = spec.with_options(_OPTIONS)
    path = spec.path(argument)
    framed = options.pop("framed", "no")
    if framed not in ("yes", "no"):
        raise spec.refused(f"option framed is `{framed}`: give yes or no")
    if len(options) != 1:
        raise spec.refused(
            "says not, or twice, whose schema it is: give schema, schemas or registry"
        )
    (name, place), what = *options.items(), f"field `{shown(argument)}`"
    try:
        if name == "schema":
            schema = read_schema(place)
            _check_field(schema, path[0])
            decode = _decoder(lambda _: schema, 0 if framed == "no" else _FRAME_BYTES, path, what)
        else:
            schemas = folder_schemas if name == "schemas" else registry_schemas
            decode = _decoder(schemas(place).schema, _FRAME_BYTES, path, what)
    except InvalidError as exc:
        raise spec.refused(str(exc)) from exc
    return decoded_times(decode, what)


def _decoder(
    schema_of: Callable[[int], Any], frame_bytes: int, path: tuple[str, ...], what: str
) -> Decode:
    from fastavro import schemaless_reader  # noqa: PLC0415 - an extra; read_schema checked it

    def decode(value: bytes) -> str:
        number = 0
        if frame_bytes:
            if len(value) < frame_bytes or value[0]:
                raise InvalidError("value does not begin with a zero byte and a schema's id")
            number = int.from_bytes(value[1:frame_bytes], "big")
        schema = schema_of(number)
        stream = BytesIO(value)
        stream.seek(frame_bytes)
        try:
            record = schemaless_reader(stream, schema, None)
        except Exception as exc:  # on bad bytes it raises anything
            problem = shown(str(exc)) or type(exc).__name__
            raise InvalidError(f"value is not Avro of its schema: {problem}") from exc
        if stream.tell() != len(value):
            left = len(value) - stream.tell()
            raise InvalidError(f"value is not Avro of its schema: {left} bytes are left over")
        return field_text(record, path, what)

    return decode


def _check_field(schema: Any, name: str) -> None:
    """Refuse a field that no value of the schema can have."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    if fields is None:
        raise InvalidError("the schema is not a record's: give one with fields")
    names = [each["name"] for each in fields]
    if name not in names:
        raise InvalidError(
            f"the schema has no field `{name}`{nearest(name, names)}: it has {', '.join(names)}"
        )
