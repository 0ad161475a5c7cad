"""Whether a driver may create or thaw heads of a generation now: what the archive's row says.

The row's ``promotion`` names the promote under way, which freezes the live generation's heads
(``freezing``). Withdrawing it opens the gate, and that promote can no longer switch.
"""

from __future__ import annotations

import msgspec

from tidelog.errors import FencedError, NotFoundError
from tidelog.log.ages import store_now_ms
from tidelog.log.archives import change_archive, read_archive
from tidelog.log.base import Log
from tidelog.model import limits
from tidelog.model.archive import Archive, Promotion
from tidelog.model.event import to_iso
from tidelog.pipeline.base import frozen

__all__ = ["Gate", "is_stale", "withdraw"]


class Gate:
    """Whether heads of a generation may be created or thawed now."""

    def __init__(self, log: Log, archive: Archive, generation: int) -> None:
        self._log = log
        self._archive = archive
        self._generation = generation
        self._state = archive.state_of(generation)  # another one is driven from another source

    def __call__(self) -> None:
        """Raises ``FrozenError`` while another one is promoted, ``FencedError`` after that."""
        name, number = self._archive.name, self._generation
        try:
            now = read_archive(self._log, name)
        except NotFoundError:
            now = None
        if now is None or now.incarnation != self._archive.incarnation or number not in now.makings:
            raise FencedError(
                f"archive `{name}`: generation {number} was removed: stop this driver"
            )
        if now.ended is not None:
            raise FencedError(
                f"archive `{name}`: was ended at {to_iso(now.ended.at_ms)}: stop this driver"
            )
        state = now.state_of(number)
        if state != self._state or state in ("kept", "removing"):
            raise FencedError(
                f"archive `{name}`: generation {number} is {state}, and {now.generation} is live: "
                "stop this driver"
            )
        promotion = now.promotion
        if promotion is None or state != "live":
            return
        if not is_stale(self._log, promotion):
            raise frozen(name, f"generation {number}")
        withdraw(self._log, name, promotion)


def is_stale(log: Log, promotion: Promotion) -> bool:
    """Returns whether a promote is older than ``PROMOTION_MS``, so that its process must be dead.

    By the store's clock, as the promote itself: that of another machine may be a year ahead.
    """
    return store_now_ms(log) - promotion.began_ms > limits.PROMOTION_MS


def withdraw(log: Log, name: str, promotion: Promotion) -> Archive:
    """Take a promote back, unless it is done: it can no longer switch generations."""

    def edit(found: Archive) -> Archive:
        if found.promotion is None or found.promotion.id != promotion.id:
            return found
        return msgspec.structs.replace(found, promotion=None)

    return change_archive(log, name, edit)
