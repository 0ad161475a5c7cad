"""What to raise when an append did not store all its events: the one place that words it."""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.errors import PartialAppendError, TidelogError
from tidelog.log.positions import Positions

__all__ = ["append_error"]


def append_error(
    positions: Positions, unknown: Sequence[int], error: BaseException, advice: str = ""
) -> BaseException:
    """The error of an append: ``error`` itself when no event is known to be stored.

    ``positions`` has offset -1 for events that are not known to be stored, ``unknown`` the indexes
    of those that may be. ``error`` must be an ``UnknownOutcomeError`` if there are any.
    """
    stored = int((positions.offsets >= 0).sum())
    if not stored or not isinstance(error, TidelogError):
        return error
    lost = len(positions) - stored - len(unknown)
    fates = f"{stored} of {len(positions)} events are stored"
    fates += f", {lost} are not" if lost else ""
    fates += f", and of {len(unknown)} it is unknown" if unknown else ""
    what = "append the remainder again" if lost else ""
    what += " and " if lost and unknown else ""
    what += "read back those that are unknown" if unknown else ""
    partial = PartialAppendError(
        f"append to `{positions.topic}`: {fates}: {error}: {advice or what}",
        positions=[None if each.offset < 0 else each for each in positions],
        unknown=list(unknown),
    )
    partial.__cause__ = error
    return partial
