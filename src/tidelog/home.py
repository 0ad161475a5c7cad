# ruff: noqa: PLC0415 - archives and pipelines take longer to import than the rest
"""A home: one store and one catalog that belong together.

:func:`open_home` opens what the settings point to, :func:`create_home` makes it where it is not
there (the steps are in ``identity``), and :class:`Home` is the one object that users work with.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, Unpack, overload

import pyarrow as pa

from tidelog.api.append_lines import LineCalls
from tidelog.api.consumers import ConsumerHandle, Consumers
from tidelog.api.erasure import ErasureCalls
from tidelog.api.journal import JournalCalls
from tidelog.api.maintenance import MaintenanceCalls
from tidelog.api.topics import BrowseCalls, TopicCalls
from tidelog.backends import World, create_context, open_context, real_world
from tidelog.concurrency import Pool, check_process
from tidelog.context import Context
from tidelog.coordination.audit import user_at_host
from tidelog.coordination.tokens import Tokens
from tidelog.errors import InternalError, InvalidError, NotFoundError
from tidelog.journal.insert_if_absent import append_absent
from tidelog.journal.lookup import Lookups
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.leases import Start
from tidelog.log.notifier import Notifier
from tidelog.log.notify_targets import open_target
from tidelog.log.producer.idempotent_append import append_once
from tidelog.log.producer.producer import Producer, close_quietly
from tidelog.log.status import (
    Lag,
    consumer_lag,
    consumer_names,
)
from tidelog.model.event import Event, Positions
from tidelog.model.playback import Time
from tidelog.model.topic import Topic
from tidelog.playback.merge import play_arrow, play_events
from tidelog.settings import Settings, check_options, config_string, load_settings

if TYPE_CHECKING:
    from tidelog.api.archives import Archives
    from tidelog.api.pipelines import Pumps, Stream
    from tidelog.api.playbacks import Playbacks, PlayOptions
    from tidelog.playback.play import PlaybackResult

__all__ = ["Home", "World", "create_home", "open_home"]

Given = TypeVar("Given", Producer, Consumer)

_READERS = 4  # objects fetched at once, for all readers of a home


class Home(TopicCalls, JournalCalls, BrowseCalls, LineCalls, ErasureCalls, MaintenanceCalls):
    """An open home, and all that can be done with it. Close it, or use it in a ``with``."""

    def __init__(self, context: Context, world: World) -> None:
        if context.settings is None:
            raise InternalError("home: its context was not opened by settings")
        self.id = context.home_id
        self.settings: Settings = context.settings
        self.context = context = replace(context, watch=self.watch)
        self.meter = context.meter
        self.world = world
        self._notifier = Notifier(context, lambda url: open_target(url, world.environ))
        self._producers: dict[str, Producer] = {}  # for appends, one for each topic
        self._given: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()
        self._closed = False
        self._is_all_closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.RLock()
        self._pool = Pool(_READERS, "tidelog-read")
        self._lookups = Lookups(context, self._pool)
        self._who = user_at_host(world.environ)

    @property
    def copy_of(self) -> str:
        """Where the home was made, if it is a copy without an identity of its own; else empty.

        >>> home.copy_of
        ''
        """
        return self.context.identity.copy_of

    @property
    def config(self) -> str:
        """The config string: all that is needed to open this home elsewhere; no secrets.

        >>> with tidelog.open(home.config) as same:
        ...     same.id == home.id
        True
        """
        return config_string(self.store.url, self.catalog.url)

    # Parts. They are imported when they are needed: archives take longer than all the rest.

    @property
    def archives(self) -> Archives:
        """The archives: create, get and list them.

        >>> home.archives.get("daily").status().lag
        0
        """
        from tidelog.api.archives import Archives

        self._check_open()
        return Archives(self.context)

    @property
    def pumps(self) -> Pumps:
        """The pumps, which bring events of other systems into topics.

        >>> home.pumps.list()
        []
        """
        from tidelog.api.pipelines import Pumps

        self._check_open()
        return Pumps(self.context)

    def stream(self, source: str) -> Stream:
        """Returns a stream of a source's events to a Python handler, without a topic in between.

        >>> home.stream("topic:orders").run(len, name="count", batch=True, until_caught_up=True)
        3
        """
        from tidelog.api.pipelines import Stream

        self._check_open()
        return Stream(self.context, source, self._append_own)

    @property
    def tokens(self) -> Tokens:
        """The tokens of the server: create, rotate, revoke and list them.

        >>> home.tokens.list()
        []
        """
        self._check_open()
        return Tokens(self.context)

    # Writing and reading.

    def producer(self, topic: str, name: str | None = None) -> Producer:
        """Returns a producer; one with a name is idempotent over restarts, and fences older ones.

        >>> with home.producer("orders") as producer:
        ...     producer.send(b"one more").result().offset
        3
        """
        found = self.topic(topic)
        self._notifier.watch(found)
        return self._give(Producer(self.context, found, name))

    def append(
        self,
        topic: str,
        events: Iterable[Event] | pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        expected_offset: int | None = None,
        if_absent: bool = False,
    ) -> Positions:
        """Stores many events, ``Event`` objects or an Arrow table, and returns their positions.

        They are durable on return. With ``if_absent`` they go to the partitions of their ids;
        raises ``AlreadyExistsError`` if the topic has events with these. ``expected_offset`` stores
        them only if it is the next offset of ``partition``: ``ConflictError`` otherwise.

        >>> [each.offset for each in home.append("orders", [tidelog.Event(b"one more")])]
        [3]
        """
        producer = self._shared_producer(topic)
        if not if_absent:
            return producer.append(events, partition=partition, expected_offset=expected_offset)
        if partition is not None or expected_offset is not None:
            raise InvalidError("append: if_absent goes by ids: leave out partition and offset")
        lookup = self._lookups.of(self.topic(topic))
        # All are checked before the first is stored: they go partition by partition.
        return append_absent(lookup, producer.checked(events), producer.append_at)

    def append_once(self, topic: str, key: str, events: Sequence[Event]) -> Positions:
        """Stores events unless an earlier call with this key has; returns their positions.

        For callers that retry after a lost reply. Raises ``AlreadyExistsError`` if the key was used
        for other events, and ``PartialAppendError`` if only some are stored: a retry with the same
        key stores the rest.

        >>> first = home.append_once("orders", "request-7", [tidelog.Event(b"one more")])
        >>> again = home.append_once("orders", "request-7", [tidelog.Event(b"one more")])
        >>> first[0] == again[0]
        True
        """
        found = self.topic(topic)
        self._notifier.watch(found)
        return append_once(self.context, found, key, events)

    def _append_own(self, topic: str, events: list[Event]) -> Positions:
        """Stores what Tidelog itself writes to a topic, with the room that its additions have."""
        return self._shared_producer(topic).append_own(events)

    def consumer(self, topic: str, name: str, start: Start = "earliest") -> Consumer:
        """Returns a member of a named consumer, which joins at its first poll.

        ``start`` says where the consumer begins the first time: ``earliest``, ``latest``, an
        offset, or a time, which may be relative, such as ``-15m``.

        >>> with home.consumer("orders", name="billing") as consumer:
        ...     print([event.id for event in consumer.poll()])
        ...     consumer.commit()
        ['order-1', 'order-2', 'order-3']
        """
        found = self.topic(topic)
        return self._give(Consumer(self.context, found, name, start, self._pool, self._append_own))

    def consumers(self, topic: str) -> Consumers:
        """Returns the consumers of a topic, to list, seek and delete them.

        >>> with home.consumer("orders", "billing") as consumer:
        ...     _ = consumer.poll()
        >>> [each.name for each in home.consumers("orders")]
        ['billing']
        """
        return Consumers(self.context, self.topic(topic), self.consumer)

    def lag(self, topic: str | None = None) -> list[Lag]:
        """Returns how far each consumer of a topic is behind, partition by partition.

        Without a topic: the consumers of all topics.

        >>> home.lag("orders")
        []
        >>> sum(each.events for each in home.lag())
        0
        """
        if topic is not None:
            return self._lag(self.topic(topic))
        found: list[Lag] = []
        for each in self.topics():
            if each.state == "ready":
                with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
                    found += self._lag(each)
        return found

    def _lag(self, topic: Topic) -> list[Lag]:
        names = consumer_names(self.context, topic)
        return [lag for name in names for lag in consumer_lag(self.context, topic, name)]

    def delete_consumer(self, topic: str, name: str, *, force: bool = False, who: str = "") -> None:
        """Deletes a consumer with its cursors, so that trims and deletes do not wait for it.

        Raises ``NotFoundError``, and ``InvalidError`` while a member is alive, unless ``force``: a
        member that continues then begins again, as a new consumer does. Waits up to 1.5 times
        ``lease_ttl_ms`` where a member may be alive on another machine. ``who`` is for the audit.

        >>> with home.consumer("orders", name="billing") as consumer:
        ...     _ = consumer.poll()
        >>> home.delete_consumer("orders", "billing")
        """
        ConsumerHandle(self.context, self.topic(topic), name).delete(force=force, who=who)

    # Playback.

    @overload
    def playback(
        self, topic: str, start: Time = ..., end: Time = ..., *, to: None = ..., name: None = ...
    ) -> Iterator[Event]: ...

    @overload
    def playback(
        self,
        topic: str,
        start: Time = ...,
        end: Time = ...,
        *,
        to: str,
        name: str | None = ...,
        **options: Unpack[PlayOptions],
    ) -> PlaybackResult: ...

    def playback(
        self,
        topic: str,
        start: Time = None,
        end: Time = None,
        *,
        to: str | None = None,
        name: str | None = None,
        **options: Unpack[PlayOptions],
    ) -> Iterator[Event] | PlaybackResult:
        """Returns the events of ``[start, end)`` by time, or plays them to another place.

        By default the last 15 minutes; ``earliest`` to ``latest`` are all events. ``to`` is
        ``topic:NAME``, ``file:PATH``, ``http(s)://…``, ``kafka://host/TOPIC`` or
        ``kinesis://STREAM``; then it returns what was played. Under a ``name`` it can be stopped,
        or die, and the same call resumes it: nothing is skipped, and nothing comes twice into a
        topic.

        >>> [event.id for event in home.playback("orders", "earliest", "latest")]
        ['order-1', 'order-2', 'order-3']
        >>> _ = home.create_topic("copies")
        >>> home.playback("orders", "2026-11-01", to="topic:copies", name="drill").events
        3
        """
        self._check_open()
        if to is None:
            if name is not None or options:
                raise InvalidError("playback: name and options are for a place: give to")
            return play_events(self.context, topic, start, end)
        from tidelog.api.playbacks import PlayOptions, play_to, time_text
        from tidelog.playback.request import PlaybackRequest

        check_options("playback", options, PlayOptions, self.playback)
        as_of = options.get("as_of")
        asked = PlaybackRequest(topic, to, time_text(start), time_text(end), as_of)
        return play_to(self.context, asked, name, options)

    @property
    def playbacks(self) -> Playbacks:
        """The playbacks that have names.

        >>> home.playbacks.list()
        []
        """
        from tidelog.api.playbacks import Playbacks

        self._check_open()
        return Playbacks(self.context)

    def playback_arrow(
        self, topic: str, start: Time = None, end: Time = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the events of ``[start, end)`` by time, as Arrow batches in event columns.

        >>> batches = home.playback_arrow("orders", "2026-11-01", "2026-12-01")
        >>> sum(batch.num_rows for batch in batches)
        3
        """
        self._check_open()
        return play_arrow(self.context, topic, start, end)

    def close(self) -> None:
        """Closes what was opened from here, flushing what is under way; raises what failed.

        >>> home.close()
        """
        check_process(self._process, f"home `{self.id}`")
        with self._closing:
            if self._is_all_closed:
                return
            with self._lock:  # from here on, nothing is added to what is closed
                self._closed = True
                opened = [*self._given, *self._producers.values()]
            try:
                with contextlib.ExitStack() as stack:  # each is closed, also when another fails
                    stack.callback(self.catalog.close)
                    stack.callback(self._pool.shutdown)
                    stack.callback(self._notifier.close)
                    for each in opened:
                        stack.callback(each.close)
            except Exception:
                self._is_all_closed = True
                raise
            self._is_all_closed = True  # otherwise a signal came between: the next call goes on

    def __enter__(self) -> Home:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Home({self.config!r})"

    def _shared_producer(self, topic: str) -> Producer:
        """One unnamed producer for all appends to a topic; a new one when it was made again."""
        found = self.topic(topic)
        old = None
        with self._lock:
            if self._closed:
                raise self._closed_error()
            producer = self._producers.get(topic)
            if producer is None or producer.incarnation != found.incarnation:
                self._notifier.watch(found)
                old = producer
                producer = self._producers[topic] = Producer(self.context, found)
        if old is not None:
            close_quietly(old)
        return producer

    @contextlib.contextmanager
    def _closing_producer(self, topic: str) -> Iterator[None]:
        """Closes the producer of a topic once that is deleted; if it is refused, appends go on."""
        with self._lock:
            producer = self._producers.get(topic)
        yield
        if producer is not None:
            with self._lock:
                if self._producers.get(topic) is producer:
                    del self._producers[topic]
            close_quietly(producer)  # its appends have raised what failed

    def _give(self, opened: Given) -> Given:
        """Returns what ``close`` will close too. Raises if it came too late for that."""
        with self._lock:
            if not self._closed:
                self._given.add(opened)
                return opened
        opened.close()
        raise self._closed_error()


def open_home(home: str | os.PathLike[str] | None = None, *, world: World | None = None) -> Home:
    """Opens a home: a folder, a config string, ``memory:``, or None for where the settings point.

    The default home is created on first use. Create any other with :func:`create_home` or
    ``tidelog init``; without it ``NotFoundError`` is raised. A store and a catalog of different
    homes, or a home that needs newer code, raise ``InvalidError``.

    >>> with tidelog.open("memory:") as home:
    ...     home.topics()
    []
    """
    world = world or real_world()
    return Home(open_context(home, world=world), world)


def create_home(
    home: str | os.PathLike[str] | Settings,
    *,
    world: World | None = None,
    create_catalog: bool = True,
) -> tuple[Home, bool]:
    """Creates a home where there is none; returns the home, and whether it is new.

    ``home`` is a folder, a config string, or settings. Idempotent, also when several processes do
    it at once or one died on the way. ``create_catalog`` makes the catalog's file or table where it
    is missing.

    >>> home, is_new = tidelog.create_home("./sales")
    >>> is_new
    True
    >>> home.close()
    """
    world = world or real_world()
    settings = home
    if not isinstance(settings, Settings):
        settings = load_settings(os.fspath(settings), world.environ, world.folder)
    context, is_new = create_context(settings, world=world, create_catalog=create_catalog)
    return Home(context, world), is_new
