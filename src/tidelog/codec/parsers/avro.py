"""Times in a field of an Avro record: numbers, text, or Avro's own times and dates.

A value is either the bare record, whose schema is in a file, or *framed* as in schema registries: a
zero byte and the schema's id in four bytes come before it. Schemas come from a file, a folder of
files, or a schema registry.

Two shapes of schema are refused, since a few hostile bytes would crash the process: one that refers
to itself (fastavro recurses until the stack is full), and arrays of items that take no bytes (it
makes as many as the value says).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from tidelog.codec.parsers.base import Spec, TimeParser, shown
from tidelog.codec.parsers.folders import Decode, decoded_times, field_text
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.address import nearest, parse_address
from tidelog.model.decoding import check_json_depth

__all__ = [
    "Schemas",
    "folder_schemas",
    "open_avro",
    "read_schema",
    "registry_schemas",
]

_FRAME_BYTES = 5
_OPTIONS = ("schema", "schemas", "registry", "framed")


def open_avro(spec: Spec) -> TimeParser:
    """Opens ``avro:FIELD?`` with one of the following.

    ``schema=FILE``: the schema of all values; with ``&framed=yes`` they are framed, ids ignored.
    ``schemas=FOLDER``: framed; the schema with id 7 is in ``7.avsc``. ``registry=URL``: framed;
    requests each id once.
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
        except Exception as exc:  # raises anything on bad bytes
            problem = shown(str(exc)) or type(exc).__name__
            raise InvalidError(f"value is not Avro of its schema: {problem}") from exc
        if stream.tell() != len(value):
            left = len(value) - stream.tell()
            raise InvalidError(f"value is not Avro of its schema: {left} bytes are left over")
        return field_text(record, path, what)

    return decode


def _check_field(schema: Any, name: str) -> None:
    """Raises ``InvalidError`` for a field that no value of the schema can have."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    if fields is None:
        raise InvalidError("the schema is not a record's: give one with fields")
    names = [each["name"] for each in fields]
    if name not in names:
        raise InvalidError(
            f"the schema has no field `{name}`{nearest(name, names)}: it has {', '.join(names)}"
        )


_REGISTRY_TIMEOUT_S = 10.0
_SCHEMA_BYTES_MAX = 4 << 20


class Schemas:
    """Schemas by id; fetches each once, and remembers errors too."""

    def __init__(self, fetch: Callable[[int], Any]) -> None:
        self._fetch = fetch
        self._known: dict[int, Any] = {}
        self._unusable: dict[int, str] = {}

    def schema(self, number: int) -> Any:
        """Returns the schema with this id, as fastavro has it.

        Raises ``InvalidError`` if there is none or it cannot be used, and ``UnavailableError`` if
        it cannot be fetched now.
        """
        if number not in self._known and number not in self._unusable:
            try:
                self._known[number] = self._fetch(number)
            except InvalidError as exc:
                self._unusable[number] = exc.message
        if number in self._unusable:
            raise InvalidError(self._unusable[number])
        return self._known[number]


def folder_schemas(folder: str) -> Schemas:
    """Returns the schemas in a folder of files named ``<id>.avsc``."""
    if not Path(folder).is_dir():
        raise InvalidError(f"`{folder}` is not a folder: give one with files such as 7.avsc")
    _fastavro()

    def fetch(number: int) -> Any:
        file = Path(folder) / f"{number}.avsc"
        if not file.exists():
            raise InvalidError(f"schema {number} is not in the folder of schemas")
        return read_schema(str(file))

    return Schemas(fetch)


def registry_schemas(url: str) -> Schemas:
    """Returns the schemas of a registry that answers ``GET <url>/schemas/ids/<id>``."""
    address = parse_address(url)
    if address.scheme not in ("http", "https") or not address.host or address.options:
        raise InvalidError(f"registry `{url}`: give http://host:port")
    _fastavro()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(number: int) -> Any:
        body = _answer(opener, f"{url.rstrip('/')}/schemas/ids/{number}")
        if body is None:
            raise InvalidError(f"schema {number} is not in the registry")
        if not isinstance(body, dict) or body.get("schemaType", "AVRO") != "AVRO":
            raise InvalidError(f"schema {number} in the registry is not an Avro schema")
        return _parse(str(body.get("schema")), f"schema {number} in the registry")

    return Schemas(fetch)


def _answer(opener: urllib.request.OpenerDirector, url: str) -> Any:
    """Returns a registry's answer; None if it has nothing there."""
    try:
        with opener.open(url, timeout=_REGISTRY_TIMEOUT_S) as reply:
            text = reply.read(_SCHEMA_BYTES_MAX)
            check_json_depth(text, f"schema registry: the answer of {url}")
            return json.loads(text)
    except urllib.error.HTTPError as exc:
        with exc:
            if exc.code == 404:
                return None
            raise UnavailableError(
                f"schema registry: {url} answers {exc.code}: look at the registry"
            ) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise UnavailableError(
            f"schema registry: {url} does not answer ({exc}): check that it runs"
        ) from exc


def read_schema(file: str) -> Any:
    """Returns the schema in a file. Raises ``InvalidError`` if it is missing or invalid."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise InvalidError(f"schema file `{file}` cannot be read ({exc}): check its path") from exc
    return _parse(text, f"schema file `{file}`")


def _parse(text: str, what: str) -> Any:
    try:
        check_json_depth(text, what)
        schema = _fastavro().parse_schema(json.loads(text))
        _takes_no_bytes(schema, {}, ())
        return schema
    except InvalidError:
        raise
    except Exception as exc:  # raises anything on a bad schema
        problem = shown(str(exc)) or type(exc).__name__
        raise InvalidError(f"{what} is not an Avro schema ({problem})") from exc


def _takes_no_bytes(kind: Any, known: dict[str, bool], above: tuple[str, ...]) -> bool:
    """Returns whether values of a type are empty. Raises ``InvalidError`` for a refused type."""
    if isinstance(kind, str):
        if kind in above:
            raise InvalidError(f"type `{shown(kind)}` refers to itself, which is not supported")
        return kind == "null" or known.get(kind, False)
    if isinstance(kind, list):
        for each in kind:
            _takes_no_bytes(each, known, above)
        return False  # the number of its branch takes one
    outer = kind["type"]
    if outer in ("record", "error"):
        within = (*above, kind["name"])
        empty = [_takes_no_bytes(field["type"], known, within) for field in kind["fields"]]
        known[kind["name"]] = all(empty)
        return all(empty)
    if outer == "fixed":
        known[kind["name"]] = kind["size"] == 0
        return bool(kind["size"] == 0)
    if outer == "array" and _takes_no_bytes(kind["items"], known, above):
        raise InvalidError("an array has items of no bytes, which is not supported")
    if outer == "map":
        _takes_no_bytes(kind["values"], known, above)
    if outer in ("array", "map", "enum"):
        return False
    return _takes_no_bytes(outer, known, above)


def _fastavro() -> Any:
    try:
        import fastavro  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise InvalidError("Avro is not installed: pip install 'tidelog[formats]'") from exc
    return fastavro
