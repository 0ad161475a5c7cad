"""Lists of ids, one in each line, for commands and forms that erase: every id has exactly one line.

Any text is a legal id, one with line ends too, so a list of plain lines cannot name every id. A
line is an id as it is, or, where it begins with ``"``, a JSON string. Nothing is cut off or folded:
a blank belongs to its id. What could mean two ids is refused: a line that ends with a carriage
return (an id, or a file with CRLF line ends), and a list that begins with a byte order mark.
"""

from __future__ import annotations

import json

from tidelog.errors import InvalidError

__all__ = ["id_line", "ids_of_lines", "text_of_line"]

_QUOTE = '"'
_BYTE_ORDER_MARK = "\ufeff"


def ids_of_lines(text: str, what: str) -> list[str]:
    """Return the ids of lines that end with a newline; empty lines have none. ``InvalidError``."""
    if text.startswith(_BYTE_ORDER_MARK):
        raise InvalidError(
            f"{what}: begins with a byte order mark: save it without one, or write an id that "
            'begins so as a JSON string, "\\ufeff..."'
        )
    ids = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.endswith("\r"):
            raise InvalidError(
                f"{what}: line {number} ends with a carriage return: save it with LF line ends, "
                'or write an id that ends so as a JSON string, "...\\r"'
            )
        if line:
            ids.append(text_of_line(line, f"{what}: line {number}"))
    return ids


def text_of_line(line: str, what: str) -> str:
    """Return the id, or key, that a line means. ``InvalidError``."""
    if not line.startswith(_QUOTE):
        return line
    try:
        if not line.endswith(_QUOTE):  # nor blanks after it, which JSON would allow
            raise ValueError("has no end")
        found = json.loads(line)
        found.encode()
    except ValueError as exc:
        raise InvalidError(
            f'{what} begins with `"` but is not a JSON string: write such an id or key as '
            'one, "\\"..."'
        ) from exc
    return str(found)


def id_line(text: str) -> str:
    """Return the line that means an id, or key: as it is where pages and editors keep it so."""
    if text.isprintable() and not text.startswith(_QUOTE):
        return text
    return json.dumps(text)
