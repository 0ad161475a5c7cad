"""Every object path and every catalog row that Tidelog keeps, on one screen.

Persisted names are stable: they may be added to, never renamed. ``OBJECTS`` and ``ROWS`` list
them for people; ARCHITECTURE.md shows the same tables, and a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "FORMAT",
    "HOME_OBJECT",
    "HOME_PARTITION",
    "HOME_ROW",
    "OBJECTS",
    "ROWS",
    "Kind",
    "probe",
]

FORMAT = 1  # of everything below; a home says the least that its readers and writers must know


class Kind(NamedTuple):
    """One kind of object (its path) or row (its partition and key)."""

    name: str
    what: str


HOME_OBJECT = "home.json"
HOME_PARTITION = "home"
HOME_ROW = "identity"

OBJECTS = (
    Kind("home.json", "the home's id and the formats it needs; written once, by init"),
    Kind("probe/<id>", "tries out conditional writes during init; deleted at once"),
)

ROWS = (Kind("home · identity", "the same id and formats, and whether init has finished"),)


def probe(probe_id: str) -> str:
    """Where ``init`` tries the store out."""
    return f"probe/{probe_id}"
