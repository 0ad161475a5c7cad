"""What is told of the way of an event, to whoever traces it. The log itself knows no tracer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["NoSpans", "Spans"]

_NOTHING = nullcontext()


class Spans(Protocol):
    """Opens spans; a name says what is done, such as ``tidelog.upload``."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        """A span around what is done in a ``with``, inside the one that this thread is in.

        ``links`` are the requests that it is done for, as whoever put them there knows them.
        """
        ...


class NoSpans:
    """Nobody traces."""

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        return _NOTHING


_: type[Spans] = NoSpans
