"""Every address of the console, and who may ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidelog.model.token import Scope as Right

__all__ = ["PLACES", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """One address. ``write`` needs a form of our own page, and a token that may both."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    right: Right | None  # None: anybody may
    kind: Literal["page", "data"] = "page"  # how an error is shown


_TOPIC = "/console/topics/{topic}"
_ARCHIVE = "/console/archives/{name}"

PLACES = (
    Place("overview", "GET", "/", "read"),
    Place("topics", "GET", "/console/topics", "read"),
    Place("topic", "GET", _TOPIC, "read"),
    Place("timeline", "GET", f"{_TOPIC}/timeline", "read", "data"),
    Place("play", "POST", f"{_TOPIC}/playback", "write"),
    Place("events", "GET", f"{_TOPIC}/events", "read"),
    Place("tail", "GET", f"{_TOPIC}/tail", "read", "data"),
    Place("event", "GET", f"{_TOPIC}/events/{{partition}}/{{offset}}", "read"),
    Place("value", "GET", f"{_TOPIC}/events/{{partition}}/{{offset}}/value", "read"),
    Place("consumers", "GET", "/console/consumers", "read"),
    Place("consumer", "GET", "/console/consumer", "read"),
    Place("move", "POST", "/console/consumer/move", "write"),
    Place("archives", "GET", "/console/archives", "read"),
    Place("archive", "GET", _ARCHIVE, "read"),
    Place("files", "GET", f"{_ARCHIVE}/files", "read"),
    Place("dead", "GET", f"{_ARCHIVE}/dead", "read"),
    Place("replay", "POST", f"{_ARCHIVE}/replay", "write"),
    Place("pump", "GET", "/console/pumps/{name}", "read"),
    Place("journals", "GET", "/console/journals", "read"),
    Place("journal", "GET", f"{_TOPIC}/journals", "read"),
    Place("erase", "POST", f"{_TOPIC}/erase", "write"),
    Place("proof", "GET", "/console/proofs/{job}", "read"),
    Place("jobs", "GET", "/console/jobs", "read"),
    Place("stop", "POST", "/console/jobs/stop", "write"),
    Place("tokens", "GET", "/console/tokens", "read"),
    Place("create", "POST", "/console/tokens", "write"),
    Place("revoke", "POST", "/console/tokens/revoke", "write"),
    Place("login", "POST", "/console/login", None),
    Place("logout", "POST", "/console/logout", None),
    Place("static", "GET", "/console/static/{file}", None, "data"),
)
