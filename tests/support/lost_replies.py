"""A catalog that loses one reply, and then cannot be read: the outcome stays unknown."""

from __future__ import annotations

from tidelog.catalog.base import Change, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.errors import UnavailableError, UnknownOutcomeError


class ReplyLosingCatalog(MemoryCatalog):
    """The write that is marked lands, its reply is lost, and nothing can be read after it."""

    marked = is_down = False

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        super().write(partition, *changes, write_id=write_id)
        if self.marked:
            self.marked, self.is_down = False, True
            raise UnknownOutcomeError("the reply was lost")

    def get(self, partition: str, row: str) -> Row | None:
        if self.is_down:
            raise UnavailableError("nothing can be reached")
        return super().get(partition, row)
