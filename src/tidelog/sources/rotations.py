"""Names that a rotation makes of a file's name.

A number or a date is added, or an ending of compressed files, or both: ``app.log`` becomes
``app.log.1``, ``app.log.gz``, ``app.log-20261116``, ``app.log.2026-11-16``, ``app.log.1.gz``. Some
programs put the number or date before the ending: ``app.1.log``, ``app-2026-11-16.log.gz``. A name
that only has another ending (``orders`` and ``orders-eu``) or another number (``log.1`` and
``log.10``) is not a rotation.
"""

from __future__ import annotations

import re

__all__ = ["is_compressed", "number_of", "rotated_from"]

_CODEC = re.compile(r"\.(?:gz|zst)\Z", re.IGNORECASE)
_TIME = r"(?:[-_.T]?\d{2}(?:[-:.]?\d{2}){0,2})?"
_DATE = rf"[-_.](?:(?:19|20)\d\d-?[01]\d(?:-?[0-3]\d{_TIME})?|1\d{{9}})"  # or seconds since 1970
_NUMBER = r"\.\d{1,5}"
_ADDED = rf"(?:{_DATE}(?:[-.]\d{{1,5}})?|{_NUMBER})"
_ENDS = (  # the shortest addition, and the longest
    re.compile(rf"(?P<old>.*[^.]){_ADDED}(?P<ending>)\Z", re.DOTALL),
    re.compile(rf"(?P<old>.*?[^.]){_ADDED}(?P<ending>)\Z", re.DOTALL),
    re.compile(rf"(?P<old>.*?[^.]){_ADDED}(?P<ending>\.[A-Za-z]\w*)\Z", re.DOTALL),
)
_NUMBERED = re.compile(r"(?P<old>.+)\.(?P<number>\d{1,5})\Z", re.DOTALL)


def rotated_from(name: str) -> list[str]:
    """Return the names that a file may have had before it was rotated to this one."""
    plain = _CODEC.sub("", name)
    found = [plain] if plain != name else []
    matches = (end.match(plain) for end in _ENDS)
    found += [match["old"] + match["ending"] for match in matches if match is not None]
    return list(dict.fromkeys(found))


def number_of(name: str) -> tuple[str, int] | None:
    """Return what a number was added to, and the number; None where none was."""
    match = _NUMBERED.match(_CODEC.sub("", name))
    return None if match is None else (match["old"], int(match["number"]))


def is_compressed(name: str) -> bool:
    """Whether a name has an ending of compressed files."""
    return _CODEC.search(name) is not None
