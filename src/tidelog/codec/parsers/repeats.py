"""Names that occur twice in a JSON object: the last one counts, as most JSON libraries have it.

DuckDB returns the first. So texts that may have a name of a path twice, which are few, are replaced
by texts with nothing but that path, before DuckDB picks the field.
"""

from __future__ import annotations

import re

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.model.depth import is_deep_json

__all__ = ["Repeats"]

_ESCAPED = r'\\u[0-9a-fA-F]{4}[^"]*"\s*:'  # in a name of plain letters
_ESCAPED_ANY = r'\\.[^"]*"\s*:'
_SPECIAL = re.compile(r'["\\/\x00-\x1f]')  # may have other escapes
_NO_FIELD = "{}"
_any = msgspec.json.Decoder(msgspec.Raw)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class Repeats:
    """Resolves repeated names on one path, given as a JSON pointer."""

    def __init__(self, pointer: str) -> None:
        parts = pointer.split("/")[1:]
        self._path = [part.replace("~1", "/").replace("~0", "~") for part in parts]
        special = any(map(_SPECIAL.search, self._path))
        self._escaped = _ESCAPED_ANY if special else _ESCAPED

    def resolved(self, texts: pa.Array) -> pa.Array:
        """The texts; those in which a name of the path may occur twice have the last one alone."""
        suspects = self._suspects(texts)
        if not pc.any(suspects).as_py():
            return texts
        found = [_picked(text, self._path) for text in texts.filter(suspects).to_pylist()]
        return pc.replace_with_mask(texts, suspects, pa.array(found, texts.type))

    def _suspects(self, texts: pa.Array) -> pa.Array:
        found = pc.match_substring_regex(texts, self._escaped)
        for name in dict.fromkeys(self._path):
            twice = pc.greater(pc.count_substring(texts, f'"{name}"'), 1)
            found = pc.or_(found, twice)
        return pc.fill_null(found, False)


def _picked(text: str, path: list[str]) -> str:
    """Return the text with only the last of each name on the path; what is not JSON, unchanged.

    JSON always comes back reduced, so that DuckDB never sees an earlier name: to ``{}`` where the
    path ends early, or where the text nests too deeply to be parsed.
    """
    if is_deep_json(text):
        return _NO_FIELD
    try:
        return _last(bytes(_any.decode(text)).decode(), path)
    except msgspec.DecodeError:
        return text  # DuckDB reports it


def _last(text: str, path: list[str]) -> str:
    """Reduce valid JSON without space around it."""
    if not path:
        return text
    name, *rest = path
    if text[0] == "[":
        items = [bytes(item).decode() for item in _array.decode(text)]
        if name.isascii() and name.isdecimal() and len(name) < 20 and int(name) < len(items):
            items[int(name)] = _last(items[int(name)], rest)
        return f"[{','.join(items)}]"
    if text[0] != "{":
        return _NO_FIELD
    found = _object.decode(text).get(name)
    if found is None:
        return _NO_FIELD
    return f"{{{msgspec.json.encode(name).decode()}:{_last(bytes(found).decode(), rest)}}}"
