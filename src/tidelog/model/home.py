"""Whose home this is: its id, and whether it is a copy that does not have an identity of its own.

A copy may read everything and write inside itself. What it inherited from its original reaches
outside too: archives in other folders, pipelines into Kafka, tables, webhooks. Two homes that work
on these destroy them, so a copy is refused there until it is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.errors import InvalidError

__all__ = ["HomeIdentity"]


@dataclass(frozen=True, slots=True)
class HomeIdentity:
    """The identity that a log works under."""

    id: str = ""  # of the home
    copy_of: str = ""  # where it was made, if it is somewhere else now; empty: it is there

    def check(self, what: str) -> None:
        """Raise ``InvalidError`` when a copy is about to write to ``what``, outside of itself."""
        if self.copy_of:
            raise InvalidError(
                f"{what}: is outside of this home, which is a copy of `{self.copy_of}`: run "
                "`tidelog home adopt`, or `tidelog home adopt --moved` if the original is gone"
            )

    def check_own(self, what: str, owner: str, remedy: str) -> None:
        """The same, also when ``what`` belongs to the home that this one was copied from."""
        self.check(what)
        if owner != self.id:
            raise InvalidError(f"{what}: belongs to home `{owner}`, this is `{self.id}`: {remedy}")

    def owns(self, owner: str) -> bool:
        """Whether something that reaches outside is this home's to use; of unknown homes too."""
        return not self.copy_of and owner in ("", self.id)
