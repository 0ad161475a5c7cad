"""Sizes as people write them: ``10000``, ``200 MB``, ``64MiB``."""

from __future__ import annotations

import re
from decimal import Decimal

from tidelog.errors import InvalidError

__all__ = ["limit_text", "size_bytes"]

_UNITS = ("", "k", "M", "G", "T")
_SIZE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,3}))? ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def size_bytes(text: str) -> int:
    """Returns bytes from text. Raises ``InvalidError``.

    >>> size_bytes("10000"), size_bytes("1.5 kB"), size_bytes("64MiB")
    (10000, 1500, 67108864)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidError(f"size `{text[:80]}`: give bytes, or a number and a unit: 200MB, 64MiB")
    power = _UNITS.index(found[3].upper().replace("K", "k") if found[3] else "")
    unit = (1024 if found[4] else 1000) ** power
    return int(Decimal(f"{found[1]}.{found[2] or 0}") * unit)


def limit_text(size: int) -> str:
    """Returns a limit that a person has set in the largest unit that loses nothing.

    >>> limit_text(200_000_000), limit_text(8 << 20), limit_text(1_500)
    ('200 MB', '8 MiB', '1500 B')
    """
    for power in reversed(range(1, len(_UNITS))):
        for base, mark in ((1000, "B"), (1024, "iB")):
            if size and size % base**power == 0:
                unit = _UNITS[power].upper() if base == 1024 else _UNITS[power]
                return f"{size // base**power} {unit}{mark}"
    return f"{size} B"
