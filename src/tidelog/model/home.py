"""The identity of a home: its id, and whether it is a copy without an identity of its own.

A copy may read everything and write inside itself. But what it inherited also reaches outside:
archives in other folders, pipelines into Kafka, tables, webhooks. Two homes that work on these
destroy them, so a copy is refused there until it is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.errors import InvalidError

__all__ = ["HomeIdentity"]


@dataclass(frozen=True, slots=True)
class HomeIdentity:
    """The identity that a context works under."""

    id: str = ""  # of the home
    copy_of: str = ""  # where it was created, if it is elsewhere now; empty: it is not a copy

    def check(self, what: str) -> None:
        """Raises ``InvalidError`` if a copy is about to write to ``what``, outside of itself."""
        if self.copy_of:
            raise InvalidError(
                f"{what}: is outside of this home, which is a copy of `{self.copy_of}`: run "
                "`tidelog home adopt`, or `tidelog home adopt --moved` if the original is gone"
            )

    def check_own(self, what: str, owner: str, remedy: str) -> None:
        """Raises the same, also if ``what`` belongs to the home that this one was copied from."""
        self.check(what)
        if owner != self.id:
            raise InvalidError(f"{what}: belongs to home `{owner}`, this is `{self.id}`: {remedy}")

    def owns(self, owner: str) -> bool:
        """Returns whether this home may use something outside; also if its owner is unknown."""
        return not self.copy_of and owner in ("", self.id)
