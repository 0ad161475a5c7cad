"""The errors of a call that was only partly done, worded in one place.

``UnavailableError`` means that nothing of a call was stored. So a call of several writes, or of one
that may be sent again, tracks what it sends (``SentWrites``). Once one of its writes has landed or
has an unknown outcome, the call never raises that error, whatever fails after it. The same holds
for a catalog that refuses us for good, such as with credentials that have expired since.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tidelog.catalog.base import Catalog, Change, Row
from tidelog.context import Context
from tidelog.errors import (
    InvalidError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model.event import Positions

__all__ = ["SentWrites", "append_error"]


class SentWrites:
    """Tracks whether a call has sent a write that landed, may have landed, or may still land.

    Thread-safe: it only ever becomes true.
    """

    def __init__(self) -> None:
        self.any = False

    def tracked(self, context: Context) -> Context:
        """Returns the same context; writes through it are tracked here."""
        return dataclasses.replace(context, catalog=_TrackedCatalog(context.catalog, self))

    @contextlib.contextmanager
    def unknown_if_any(self, what: str, advice: str) -> Iterator[None]:
        """Turns ``UnavailableError`` into ``UnknownOutcomeError`` if something was sent."""
        try:
            yield
        except UnavailableError as exc:
            if not self.any:
                raise
            raise self.error(what, advice, exc) from exc

    def error(self, what: str, advice: str, why: TidelogError) -> UnknownOutcomeError:
        """Returns the error of a call that has sent something and then failed."""
        return UnknownOutcomeError(
            f"{what}: it is done, or a part of it is, or nothing ({why}): {advice}", **why.context
        )


class _TrackedCatalog(Catalog):
    """A catalog whose writes are tracked."""

    def __init__(self, inner: Catalog, sent: SentWrites) -> None:
        self.inner = inner
        self._sent = sent

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, partition: str, row: str) -> Row | None:
        with self._asking():
            return self.inner.get(partition, row)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        return self.inner.scan(partition, start, end, limit, reverse)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        try:
            with self._asking():
                self.inner.write(partition, *changes, write_id=write_id)
        except UnknownOutcomeError:
            self._sent.any = True
            raise
        self._sent.any = True

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns a refusal for good into ``UnavailableError`` once something was sent."""
        try:
            yield
        except InvalidError as exc:
            if not self._sent.any:
                raise
            raise UnavailableError(str(exc), **exc.context) from exc

    def close(self) -> None:
        self.inner.close()


def append_error(
    positions: Positions, unknown: Sequence[int], error: BaseException, advice: str = ""
) -> BaseException:
    """Returns the error of an append: ``error`` itself if no event is known to be stored.

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
