"""What a person asked to be played, and how that becomes, or fits, what is pinned."""

from __future__ import annotations

import re
from concurrent.futures import Executor
from dataclasses import dataclass

from tidelog.errors import InvalidError
from tidelog.log.base import Log
from tidelog.log.topics import find_target, find_topic
from tidelog.model.event import to_iso
from tidelog.model.playback import Pin, Pinned, time_range
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic
from tidelog.playback.names import find_playback, start_playback
from tidelog.playback.outlets import check_outlet, remade
from tidelog.playback.pin import AsOf, pin_topic

__all__ = ["Asked", "parse_as_of", "pin_asked", "pinned_playback"]

_OFFSETS = re.compile(r"\d+:\d+(,\d+:\d+)*", re.ASCII)
_INSIDE = ("topic", "stdout", "null")  # sinks that no other home can share


@dataclass(frozen=True, slots=True)
class Asked:
    """A playback in a person's words; None for what was not said."""

    topic: str
    sink: str
    start: str | None = None
    end: str | None = None
    as_of: str | None = None

    @property
    def texts(self) -> tuple[str, str, str]:
        return self.start or "", self.end or "", self.as_of or ""


def parse_as_of(text: str | None, now_ms: int) -> AsOf:
    """A commit time, or offsets as ``P:O,P:O``. ``InvalidError``."""
    if text is None:
        return None
    if not _OFFSETS.fullmatch(text):
        return moment_ms(text, now_ms)
    pairs = [each.split(":") for each in text.split(",")]
    offsets = {int(partition): int(offset) for partition, offset in pairs}
    if len(offsets) != len(pairs):
        raise InvalidError(f"as-of `{text}`: a partition is named twice: name each once")
    return offsets


def pin_asked(log: Log, asked: Asked, pool: Executor | None = None) -> tuple[Topic, Pin]:
    """The topic, and what is played of it."""
    now_ms = log.clock.now_ms()
    times = time_range(asked.start, asked.end, now_ms)
    as_of = parse_as_of(asked.as_of, now_ms)
    topic = find_topic(log, asked.topic)
    return topic, pin_topic(log, topic, times, as_of, pool)


def pinned_playback(
    log: Log, name: str, asked: Asked, pool: Executor | None = None
) -> tuple[Topic, Pinned]:
    """The playback of this name, which is started where there is none.

    ``InvalidError`` when it was asked for something else, or when its topic, or the one that it
    plays into, was deleted and made again.
    """
    address = check_outlet(asked.sink, named=True)
    target = find_target(log, address.path).incarnation if address.scheme == "topic" else ""
    inside = address.scheme in _INSIDE
    if not inside:
        log.standing.check(f"playback `{name}` to `{asked.sink}`")
    found = find_playback(log, name)
    if found is None:
        topic, pin = pin_asked(log, asked, pool)
        now_ms = log.clock.now_ms()
        home = "" if inside else log.standing.id
        wanted = Pinned(asked.topic, asked.sink, target, asked.texts, pin, now_ms, home=home)
        found = start_playback(log, name, wanted)
    _check_same(log, name, asked, found)
    if not inside:
        what = f"playback `{name}` to `{asked.sink}`"
        log.standing.check_own(what, found.home, "begin another one, under another name")
    topic = find_topic(log, asked.topic)
    for role, there, was in (
        ("topic", topic.incarnation, found.pin.incarnation),
        ("target", target, found.target),
    ):
        if there != was:
            raise remade(name, role)
    return topic, found


def _check_same(log: Log, name: str, asked: Asked, found: Pinned) -> None:
    for what, wanted, was in (
        ("topic", asked.topic, found.topic),
        ("sink", asked.sink, found.sink),
    ):
        if wanted != was:
            raise _other(name, what, wanted, was)
    now_ms = log.clock.now_ms()
    times = found.pin.range
    for what, text, said, time_ms in (
        ("start", asked.start, found.asked[0], times.start_ms),
        ("end", asked.end, found.asked[1], times.end_ms),
    ):
        if text not in (None, said) and moment_ms(text or "", now_ms) != time_ms:
            raise _other(name, what, text or "", to_iso(time_ms))
    if asked.as_of not in (None, found.asked[2]):
        raise _other(name, "as-of", asked.as_of or "", found.asked[2] or "none")


def _other(name: str, what: str, wanted: str, was: str) -> InvalidError:
    return InvalidError(
        f"playback `{name}`: began with {what} `{was}`, and is asked for `{wanted}`: leave it out "
        "to go on with that one, or choose another name"
    )
