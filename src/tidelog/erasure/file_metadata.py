"""What a file holds beside its rows or its text: metadata, names of columns, unused dictionaries.

Programs put more into a file than its rows. A filter of pandas or Arrow keeps all values of a
column of categories, so the file's dictionary has those of rows that are gone. Metadata may say
whose data it is, and gzip keeps the name of the file that it compressed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from tidelog.codec.formats.avro import AvroContainer
from tidelog.codec.formats.batches import open_data

__all__ = ["FileBesideRows", "gzip_names", "open_beside_rows"]

_OURS = "tidelog."  # begins the names of our own metadata
_NO_DATA = ("ARROW:schema", "avro.codec")  # the first is in base64; the reader decodes it
_TYPES = frozenset(  # names of fields in a schema whose texts are no data
    {"type", "items", "values", "logicalType", "kind", "pandas_type", "numpy_type", "creator"}
)
_NAMES = frozenset({"name", "field_name"})
_GZIP = re.compile(rb"\x1f\x8b\x08(.)(.{6})", re.DOTALL)
_EXTRA, _NAME, _COMMENT = 4, 8, 16  # flags of a gzip header
_parse_json = msgspec.json.Decoder().decode


class FileBesideRows:
    """A file with columns, without its rows."""

    def __init__(
        self,
        schema: pa.Schema,
        metadata: Mapping[Any, Any],
        read: Callable[[list[str] | None], Iterable[pa.RecordBatch]] = lambda _: (),
    ) -> None:
        self.schema = schema
        self._metadata = metadata
        self._read = read  # batches with some columns, or all

    def metadata(self, *, names: bool) -> Iterator[Any]:
        """Yields metadata that is not ours; with ``names``, also the names of columns."""
        said = {_text(name): _text(value) for name, value in self._metadata.items()}
        for field in _fields(self.schema):
            yield from [field.name] if names else []
            said |= {
                f"{field.name} {_text(k)}": _text(v) for k, v in (field.metadata or {}).items()
            }
        for name, value in said.items():
            if name in _NO_DATA or name.startswith(_OURS):
                continue
            try:
                parsed = _parse_json(value)
            except (msgspec.MsgspecError, UnicodeError):
                yield from (name, value)
            else:
                yield from _of_json(parsed, _TYPES if names else _TYPES | _NAMES)

    def dictionaries(self, columns: Collection[str] | None = None) -> Iterator[Any]:
        """Yields all values of the dictionaries of columns, also those that no row has."""
        wanted = None if columns is None else [n for n in self.schema.names if n in columns]
        seen: dict[str, pa.Array] = {}
        for batch in self._read(wanted) if wanted is None or wanted else ():
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                for values in _dictionaries(column) if wanted is None or name in wanted else ():
                    if name not in seen or not seen[name].equals(values):
                        seen[name] = values
                        yield from _values(values)


def open_beside_rows(data: bytes) -> FileBesideRows:
    """Opens a file with columns. Raises as its reader does."""
    if data.startswith(b"ARROW1"):
        file = pa.ipc.open_file(pa.BufferReader(data))
        whole = {**(file.schema.metadata or {}), **(file.metadata or {})}
        numbers = range(file.num_record_batches)
        return FileBesideRows(file.schema, whole, lambda _: map(file.get_batch, numbers))
    if data.startswith(b"PAR1"):
        plain = pq.ParquetFile(pa.BufferReader(data))
        kinds = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        coded = [each.name for each in plain.schema_arrow if each.type in kinds]
        read = pq.ParquetFile(pa.BufferReader(data), read_dictionary=coded)
        known = {**(plain.schema_arrow.metadata or {}), **(plain.metadata.metadata or {})}
        return FileBesideRows(
            plain.schema_arrow,
            known,
            lambda columns: read.iter_batches(columns=columns, use_threads=False),
        )
    if data.startswith(b"ORC"):
        found = orc.ORCFile(pa.BufferReader(data))
        said = {**(found.schema.metadata or {}), **(found.metadata or {})}
        return FileBesideRows(found.schema, said)
    container = AvroContainer(open_data(pa.BufferReader(data)))
    schema = pa.schema([(name, pa.null()) for name in container.fields])
    return FileBesideRows(schema, container.words)


def gzip_names(data: bytes) -> Iterator[str]:
    """Yields the names and comments in the headers of a gzip file."""
    for header in _GZIP.finditer(data) if data.startswith(b"\x1f\x8b") else ():
        flags, at = header[1][0], header.end()
        if flags & _EXTRA:
            at += 2 + int.from_bytes(data[at : at + 2], "little")
        for flag in (_NAME, _COMMENT):
            if flags & flag and (end := data.find(b"\0", at)) >= 0:
                yield data[at:end].decode(errors="replace")
                at = end + 1


def _fields(schema: pa.Schema) -> Iterator[pa.Field]:
    left = list(schema)
    while left:
        field = left.pop()
        yield field
        left += [field.type.field(number) for number in range(field.type.num_fields)]


def _dictionaries(column: pa.Array) -> Iterator[pa.Array]:
    """Yields the dictionaries of a column, and of the fields in it."""
    if isinstance(column, pa.DictionaryArray):
        yield column.dictionary
    elif isinstance(column, pa.StructArray):
        for number in range(column.type.num_fields):
            yield from _dictionaries(column.field(number))
    elif isinstance(column, pa.ListArray | pa.LargeListArray | pa.MapArray):
        yield from _dictionaries(column.values)


def _values(array: pa.Array) -> Iterator[Any]:
    """Yields values; texts also if they are not UTF-8."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        yield from (
            v and v.decode(errors="replace") for v in array.cast(pa.large_binary()).to_pylist()
        )
    else:
        yield from array.to_pylist()


def _of_json(value: Any, without: frozenset[str]) -> Iterator[Any]:
    """Yields the values at any depth, except the texts of some fields."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in without:
                yield from _of_json(each, without)
            elif not isinstance(each, str):
                yield from _of_json(_without_texts(each), without)
    elif isinstance(value, list):
        for each in value:
            yield from _of_json(each, without)
    else:
        yield value


def _without_texts(value: Any) -> Any:
    return (
        [each for each in value if not isinstance(each, str)] if isinstance(value, list) else value
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
