"""Tidelog: an event log and archive that lives on object storage.

::

    import tidelog

    home = tidelog.open()          # ./tidelog-data, or a folder, or a config string
    print(home.config)

The public surface is what ``__all__`` lists; everything else may change.
"""

from __future__ import annotations

from tidelog.adoption import adopt_home
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    FencedError,
    InternalError,
    InvalidError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.home import Home
from tidelog.home import open_home as open  # noqa: A004 - read as tidelog.open(...)
from tidelog.model.event import Event, Position

__version__ = "0.1.0"

__all__ = [
    "AlreadyExistsError",
    "ConflictError",
    "CorruptError",
    "Event",
    "FencedError",
    "Home",
    "InternalError",
    "InvalidError",
    "NotFoundError",
    "PartialAppendError",
    "Position",
    "TidelogError",
    "UnavailableError",
    "UnknownOutcomeError",
    "adopt_home",
    "open",
]
