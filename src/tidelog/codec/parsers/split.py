"""Folders by the value of a JSON field first, and inside them as another parser has it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import Found, Layout, Parser
from tidelog.codec.parsers.json import JsonField
from tidelog.codec.parsers.names import escaped
from tidelog.model.limits import FOLDER_PATH_BYTES_MAX

__all__ = ["SplitParser"]


class SplitParser:
    """``{value of the field}/{the inner parser's path}``.

    A missing, null or empty value is a dead letter, and so is an object or an array.
    """

    def __init__(self, field: JsonField, inner: Parser) -> None:
        self._field = field
        self._inner = inner

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        names = self._names(batch)
        inner = self._inner.lay_out(batch)
        paths = pc.binary_join_element_wise(names.values, inner.paths.dictionary_decode(), "/")
        found = Found(paths, pc.coalesce(names.errors, inner.errors))
        long = pc.greater(pc.binary_length(paths), FOLDER_PATH_BYTES_MAX)
        found = found.reject(long, f"its path has more than {FOLDER_PATH_BYTES_MAX} bytes")
        times = pc.if_else(pc.is_null(found.errors), inner.times, None)
        return Layout(found.values.dictionary_encode(), found.errors, times)

    def _names(self, batch: pa.RecordBatch) -> Found:
        found = self._field.pick(batch)
        found = found.reject(pc.equal(found.values, ""), f"{self._field.what} is empty")
        opens = pc.match_substring_regex(found.values, pattern=r"^[\[{]")
        if pc.any(opens, min_count=0).as_py():  # or a string that only looks like one
            nested = self._field.nested(batch)
            found = found.reject(nested, f"{self._field.what} is an object or an array")
        encoded = found.values.dictionary_encode()
        distinct = pa.array(map(escaped, encoded.dictionary.to_pylist()), pa.string())
        return Found(distinct.take(encoded.indices), found.errors)


_: type[Parser] = SplitParser
