"""Names of partitions, made from times and from arbitrary data.

Data never leads out of the archive's folder: characters that are special in a path, a shell or Hive
are written as ``%XX``, as Hive does, and so is a leading ``_`` or ``.``, which readers of archives
skip. Different data get different names. Names of topics and source partitions, which other systems
choose, follow the same rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from tidelog.model.limits import FOLDER_NAME_BYTES_MAX, FOLDER_PATH_BYTES_MAX

__all__ = ["escaped", "path_problem", "paths_of", "unescaped"]

_SPECIAL = frozenset("\"#%'*/:=?\\{}[]^<>|`$!&;~")
_EDGE = frozenset("_. ")  # hidden at the start; lost by some file systems at the end
_HASH_DIGITS = 16


def escaped(text: str, bytes_max: int = FOLDER_NAME_BYTES_MAX) -> str:
    """Returns a name for a piece of data, which is not empty: one short part of a path.

    A name that would be too long ends with a hash after a ``~``, which no other name has.
    """
    last = len(text) - 1
    pieces: list[str] = []
    size = 0
    for index, char in enumerate(text[: bytes_max + 1]):
        plain = char.isprintable() and char not in _SPECIAL
        if plain and char in _EDGE and (index == 0 or (index == last and char != "_")):
            plain = False
        piece = char if plain else "".join(f"%{byte:02X}" for byte in char.encode())
        pieces.append(piece)
        size += len(piece.encode())
    if size <= bytes_max:
        return "".join(pieces)
    while size > bytes_max - _HASH_DIGITS - 1:
        size -= len(pieces.pop().encode())
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{''.join(pieces)}~{digest}"  # no plain name has a ~


def unescaped(name: str, bytes_max: int = FOLDER_NAME_BYTES_MAX) -> str:
    """Returns the data of a name that ``escaped`` returned; other and hashed names unchanged."""
    text = unquote(name, errors="replace")
    return text if text and escaped(text, bytes_max) == name else name


def path_problem(path: str) -> str | None:
    """Returns why a path is not allowed in an archive, or None."""
    for name in path.split("/"):
        if not name:
            return "has an empty name"
        if name[0] in "_.":
            return f"has the name `{name}`, which readers of archives skip"
        if not name.isprintable() or "\\" in name:
            return f"has the name {name!r}, which some stores cannot hold"
        if len(name.encode()) > FOLDER_NAME_BYTES_MAX:
            return f"has a name of more than {FOLDER_NAME_BYTES_MAX} bytes"
    if len(path.encode()) > FOLDER_PATH_BYTES_MAX:
        return f"has more than {FOLDER_PATH_BYTES_MAX} bytes"
    return None


def paths_of(codes: pa.Array, names: Sequence[str | None]) -> pa.DictionaryArray:
    """Returns codes into unique names, from codes into names that may repeat; None is null."""
    distinct = {name: code for code, name in enumerate(dict.fromkeys(n for n in names if n))}
    moved = np.array([distinct.get(name or "", -1) for name in names] or [-1], np.int32)
    found = moved[codes.fill_null(0).to_numpy()] if len(codes) else moved[:0]
    empty = (found < 0) | codes.is_null().to_numpy(zero_copy_only=False)
    indices = pa.array(found, pa.int32(), mask=empty)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(distinct), pa.string()))
