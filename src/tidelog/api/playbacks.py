"""Playbacks as Python code uses them: ``home.playback``, and ``home.playbacks``, which have names.

A playback brings the events of a range of times to another place. Under a name it can be stopped,
or die, and be resumed by the same call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypedDict

from tidelog.api.spark_workers import open_session
from tidelog.concurrency import Pool
from tidelog.connectors.sink import (
    PlaybackSink,
    SinkContext,
    check_playback_sink,
    open_playback_sink,
)
from tidelog.context import Context
from tidelog.coordination.audit import record_playback
from tidelog.errors import InvalidError
from tidelog.model import limits
from tidelog.model.address import parse_address
from tidelog.model.event import check_timestamp, to_iso
from tidelog.model.playback import Pin, Time
from tidelog.model.topic import Topic
from tidelog.playback.merge import READERS
from tidelog.playback.play import (
    Playback,
    PlaybackOptions,
    PlaybackResult,
    SlotCount,
    check_speed,
    opened,
    run_named,
    run_playback,
)
from tidelog.playback.request import PlaybackRequest, pin_asked, pinned_playback
from tidelog.playback.session import KnownPlayback, NamedPlayback, forget_playback, list_playbacks

__all__ = ["PlayOptions", "Playbacks", "play_to", "time_text"]


class PlayOptions(TypedDict, total=False):
    """How a playback goes."""

    speed: str | float  # max (default), 1 for as it happened, or another factor; pauses are kept
    as_of: str | None  # play the topic as it was at a time, or at offsets P:O,P:O
    empty_slots: bool  # report slots without events too
    spark: str | None  # Spark master, to play in parallel where order over slots does not matter
    spark_conf: Mapping[str, str]  # settings of the Spark session
    stop: threading.Event  # set it, and the playback ends soon
    on_begin: Callable[[Topic, Pin], None]  # gets what will be played
    on_wait: Callable[[], None]  # another process plays it: this one waits for its end
    on_slot: Callable[[SlotCount], None]  # gets each slot when its events are out
    who: str  # for the home's audit; default: user@host


class Playbacks:
    """The playbacks that have names: ``home.playbacks``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def forget(self, name: str) -> None:
        """Forgets a playback, so that its name is free. What it has played stays.

        Raises ``NotFoundError``, and ``InvalidError`` while a process plays it.

        >>> _ = home.create_topic("copies")
        >>> _ = home.playback("orders", start="2026-11-01", to="topic:copies", name="drill")
        >>> home.playbacks.forget("drill")
        """
        forget_playback(self._context, name)

    def list(self) -> list[KnownPlayback]:
        """Returns all playbacks with names, finished or not, by name.

        >>> home.playbacks.list()
        []
        """
        return list(list_playbacks(self._context))


def play_to(
    context: Context, asked: PlaybackRequest, name: str | None, options: PlayOptions
) -> PlaybackResult:
    """Plays to a sink, under a name if one is given, and returns what was played."""
    check_playback_sink(asked.sink, named=name is not None)
    stop = options.get("stop") or threading.Event()
    how = PlaybackOptions(
        speed=check_speed(str(options.get("speed", "max"))),
        empty_slots=options.get("empty_slots", False),
        on_slot=options.get("on_slot", lambda _: None),
        stopped=stop.is_set,
    )
    spark = options.get("spark")
    if spark is not None:
        if name is not None or how.speed is not None or how.empty_slots:
            raise InvalidError(
                "playback: with Spark it goes as fast as it can, and cannot be resumed: leave out "
                "name, speed and empty_slots"
            )
        return _play_parallel(context, asked, spark, options, how)
    with Pool(READERS, "tidelog-playback") as pool:
        if name is not None:
            return _resume(context, asked, name, options, how, pool)
        topic, pin = pin_asked(context, asked, pool)
        _begin(context, asked, options, (topic, pin))
        setting = SinkContext.of(context, context.environ, context.ids.new())
        with opened(lambda: _open(context, asked.sink, setting)) as sink:
            return run_playback(Playback(context, topic, pin, pool, how), sink)


def time_text(time: Time) -> str | None:
    """Returns a time as a request has it. Raises ``InvalidError`` for one that no event has."""
    if time is None or isinstance(time, str):
        return time
    if time == limits.TIMESTAMP_MS_END:  # the end of all times
        return to_iso(limits.TIMESTAMP_MS_END)
    return to_iso(check_timestamp(time))


def _resume(
    context: Context,
    asked: PlaybackRequest,
    name: str,
    options: PlayOptions,
    how: PlaybackOptions,
    pool: Pool,
) -> PlaybackResult:
    topic, pinned = pinned_playback(context, name, asked, pool)
    named = NamedPlayback(context, name, pinned.generation)
    if not named.try_take():
        if on_wait := options.get("on_wait"):
            on_wait()
        if not named.take(how.stopped):
            return PlaybackResult()
    if named.state.finished_ms:
        return PlaybackResult(finished=True, before=named.state)
    _begin(context, asked, options, (topic, pinned.pin), named.label)
    setting = SinkContext.of_named(context, context.environ, named, pinned)
    playback = Playback(context, topic, pinned.pin, pool, how)
    return run_named(playback, named, lambda: _open(context, asked.sink, setting))


def _play_parallel(
    context: Context,
    asked: PlaybackRequest,
    spark: str,
    options: PlayOptions,
    how: PlaybackOptions,
) -> PlaybackResult:
    from tidelog.spark.playback import play_parallel  # noqa: PLC0415 - Spark takes a second

    topic, pin = pin_asked(context, asked)
    _begin(context, asked, options, (topic, pin))
    session = open_session(spark, f"playback {topic.name}", options.get("spark_conf"))
    return play_parallel(context, session, topic, pin, asked.sink, how)


def _begin(
    context: Context,
    asked: PlaybackRequest,
    options: PlayOptions,
    played: tuple[Topic, Pin],
    label: str = "",
) -> None:
    """Records the playback in the audit, before it reads an event, and reports what it plays."""
    topic, pin = played
    who = options.get("who", "")
    record_playback(context, topic.name, pin.range, asked.sink, who, label)
    if on_begin := options.get("on_begin"):
        on_begin(topic, pin)


def _open(context: Context, sink: str, setting: SinkContext) -> PlaybackSink:
    if sink.startswith("topic:"):
        context.watch(parse_address(sink).path)  # its notifications go out from here
    return open_playback_sink(sink, setting)
