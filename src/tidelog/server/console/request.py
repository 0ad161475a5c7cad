"""What a page is asked, and what it answers with. No HTTP here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.errors import InvalidError
from tidelog.server.console.session import Session

__all__ = ["Answer", "Data", "Handler", "Redirect", "Shown", "Visit"]

_TEXT_MAX = 4_096  # characters of a field


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, as pages see it."""

    path: Mapping[str, str]  # what stands in the path
    query: Mapping[str, str]
    form: Mapping[str, str]  # empty for all but forms that were sent
    session: Session
    now_ms: int
    url: str  # path and query

    def text(self, name: str, default: str = "") -> str:
        """A field of the query or of the form, without blanks around it. ``InvalidError``."""
        return self.exact(name, default).strip()

    def exact(self, name: str, default: str = "") -> str:
        """A field as it was sent: for what selects events to erase. ``InvalidError``."""
        given = self.form.get(name, self.query.get(name, default))
        if len(given) > _TEXT_MAX:
            raise InvalidError(f"{name}: has more than {_TEXT_MAX} characters: give fewer")
        return given

    def number(self, name: str, default: int, most: int = 2**63 - 1) -> int:
        """A field that is a whole number from 0 on. ``InvalidError``."""
        given = self.text(name)
        if not given:
            return default
        if given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= most:
            return int(given)
        raise InvalidError(f"{name} `{given[:80]}`: give a whole number from 0 to {most}")


@dataclass(frozen=True, slots=True)
class Shown:
    """A page: a template and what it shows."""

    template: str
    values: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Redirect:
    """Go and look there; with a cookie where one is set."""

    to: str
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """What is no page: JSON for the script, or a file."""

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Shown | Redirect | Data
Handler = Callable[[Visit], Answer]
