"""A home: one store and one catalog that belong together.

:func:`open_home` opens what the settings point to, :func:`create_home` makes it where it is not
there (the steps are in ``identity``), and :class:`Home` is the one object that users work with.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import TracebackType

import pyarrow as pa

from tidelog.catalog import Catalog
from tidelog.catalog.reserve import freeing
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.identity import (
    Identity,
    create_identity,
    lost_catalog,
    read_catalog,
    read_pair,
    read_store,
)
from tidelog.journal.absent import append_absent
from tidelog.journal.audit import user_at_host
from tidelog.journal.calls import JournalCalls
from tidelog.journal.lookup import Lookups
from tidelog.journal.scribe import Scribing, Turn
from tidelog.log.base import Log
from tidelog.log.consumer import Consumer
from tidelog.log.consumers import delete_consumer
from tidelog.log.incarnations import inspect_home
from tidelog.log.lag import Lag, consumer_lag, consumer_names
from tidelog.log.notifier import Notifier
from tidelog.log.partitions import PartitionState, partition_states
from tidelog.log.positions import Positions
from tidelog.log.process import check_process
from tidelog.log.producer import Producer
from tidelog.log.read import Reader
from tidelog.log.readers import Past, check_all_read, check_readers
from tidelog.log.start import Start
from tidelog.log.sweep import SweepReport
from tidelog.log.targets import check_target, open_target
from tidelog.log.topics import create_topic, delete_topic, find_topic, list_topics
from tidelog.log.trim import Trimmed, TrimTo, trim_topic
from tidelog.log.verify import VerifyReport, verify_topic
from tidelog.model.event import Event
from tidelog.model.playback import Time, whole_range
from tidelog.model.standing import Standing
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic, partition_for
from tidelog.playback.play import play_arrow, play_events
from tidelog.pool import Pool
from tidelog.settings import Settings, config_string, load_settings
from tidelog.store import Store
from tidelog.store.cache import CachedStore
from tidelog.store.meter import Meter
from tidelog.store.probe import probe_store
from tidelog.substrates import (
    World,
    location_of,
    log_of,
    open_catalog_of,
    open_store_of,
    real_world,
)

__all__ = ["Home", "World", "create_home", "open_home"]

_MAINTENANCE = "tidelog.maintenance"  # above this module, as pipelines are, which it calls
_READERS = 4  # objects fetched at once, for all readers of a home


class Home(JournalCalls):
    """An open home, and all that can be done with it. Close it, or use it in a ``with``."""

    def __init__(
        self, identity: Identity, settings: Settings, log: Log, meter: Meter, world: World
    ) -> None:
        self.id = identity.id
        self.settings = settings
        self.log = log
        self.meter = meter
        self.world = world
        self._notifier = Notifier(log, lambda url: open_target(url, world.environ))
        self._producers: dict[str, Producer] = {}  # for appends, one for each topic
        self._given: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pool = Pool(_READERS, "tidelog-read")
        self._lookups = Lookups(log, self._pool)
        self._who = user_at_host(world.environ)

    @property
    def copy_of(self) -> str:
        """Where the home was made, if it is a copy without an identity of its own; else empty."""
        return self.log.standing.copy_of

    @property
    def store(self) -> Store:
        """Where objects are."""
        return self.log.store

    @property
    def catalog(self) -> Catalog:
        """Where rows are."""
        return self.log.catalog

    @property
    def config(self) -> str:
        """The config string: all that is needed to open this home elsewhere; no secrets."""
        return config_string(self.store.url, self.catalog.url)

    # Topics.

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        slot: str | int = "1s",
        notify: Iterable[str] = (),
        max_latency_ms: int = 1_000,
    ) -> Topic:
        """Make a topic; its partitions are fixed for good. ``AlreadyExistsError``."""
        self._check_open()
        targets = tuple(notify)
        for url in targets:
            check_target(url)
        wanted = Topic(
            name=name,
            incarnation=self.log.ids.new(),
            partitions=partitions,
            created_ms=self.log.clock.now_ms(),
            slot_ms=duration_ms(slot),
            notify=targets,
            home=self.id,
            max_latency_ms=max_latency_ms,
        )
        return create_topic(self.log, wanted)

    def topic(self, name: str) -> Topic:
        """The topic of this name. ``NotFoundError``."""
        self._check_open()
        return find_topic(self.log, name)

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        self._check_open()
        return list(list_topics(self.log))

    def delete_topic(self, name: str, *, past_readers: Past = False, incarnation: str = "") -> None:
        """Remove a topic with all its events and consumers. ``NotFoundError``.

        ``InvalidError`` where a consumer, an archive, a pump or a playback has not read all of its
        events, unless ``past_readers`` accepts that they are lost to it: True for all, or names
        such as ``billing`` or ``consumer:billing``. What was deleted from the
        topic is erased from its archives first; ``UnavailableError`` while a range is under way
        there that may hold such an event: run the archive, then delete the topic again.
        With an ``incarnation`` it deletes no other topic that has the name now.
        """
        self._check_open()

        def check(topic: Topic) -> None:
            check_all_read(self.log, topic, past_readers)
            import_module(_MAINTENANCE).carry_deletes(self, topic)

        def closed(topic: Topic) -> None:
            import_module(_MAINTENANCE).carry_closed_deletes(self, topic)

        with self._lock:
            producer = self._producers.get(name)
        with freeing(self.catalog):
            # May refuse: then appends go on.
            delete_topic(self.log, name, check, closed, incarnation)
        if producer is not None:
            with self._lock:
                if self._producers.get(name) is producer:
                    del self._producers[name]
            _close_quietly(producer)

    def partitions(self, topic: str, *, runs: bool = True) -> list[PartitionState]:
        """What each partition holds; without ``runs`` only where it starts and ends."""
        return partition_states(self.log, self.topic(topic), self._pool, runs)

    def partition_for(self, topic: str, key: bytes) -> int:
        """The partition that a key's events go to: ``int(sha256(key)) mod N``."""
        return partition_for(key, self.topic(topic).partitions)

    # Writing and reading.

    def producer(self, topic: str, name: str | None = None) -> Producer:
        """A producer; one with a name is idempotent over restarts, and fences older ones."""
        found = self.topic(topic)
        self._notifier.watch(found)
        producer = Producer(self.log, found, name)
        self._given.add(producer)
        return producer

    def append(
        self,
        topic: str,
        events: Iterable[Event] | pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        expected_offset: int | None = None,
        if_absent: bool = False,
    ) -> Positions:
        """Store many events, ``Event`` objects or an Arrow table; durable on return.

        With ``if_absent`` they go to the partitions of their ids, and are refused by
        ``AlreadyExistsError`` when the topic has events with these.
        """
        producer = self._shared_producer(topic)
        if not if_absent:
            return producer.append(events, partition=partition, expected_offset=expected_offset)
        if partition is not None or expected_offset is not None:
            raise InvalidError("append: if_absent goes by ids: leave out partition and offset")
        lookup = self._lookups.of(self.topic(topic))
        # All are checked before the first is stored: they go partition by partition.
        return append_absent(self.log, lookup, producer.checked(events), producer.append)

    def _append_own(self, topic: str, events: list[Event]) -> Positions:
        """Store what Tidelog itself writes to a topic, with the room that its additions have."""
        return self._shared_producer(topic).append_own(events)

    def read(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> Iterator[Event]:
        """The events of ``[start, end)``, or up to the end that is there now."""
        for stretch in self._reader(topic, partition, start).stretches(start, end):
            yield from stretch.events()

    def read_arrow(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same as Arrow batches in event columns."""
        for stretch in self._reader(topic, partition, start).stretches(start, end):
            if stretch.batch.num_rows:
                yield stretch.arrow()

    def consumer(self, topic: str, name: str, start: Start = "earliest") -> Consumer:
        """A member of a named consumer, which joins at its first poll.

        ``start`` says where the consumer begins the first time: ``earliest``, ``latest``, an
        offset, or a time.
        """
        consumer = Consumer(self.log, self.topic(topic), name, start, self._pool, self._append_own)
        self._given.add(consumer)
        return consumer

    def lag(self, topic: str) -> list[Lag]:
        """How far each consumer of a topic is behind, partition by partition."""
        found = self.topic(topic)
        names = consumer_names(self.log, found)
        return [lag for name in names for lag in consumer_lag(self.log, found, name)]

    def delete_consumer(self, topic: str, name: str, *, force: bool = False) -> None:
        """Delete a consumer with its cursors, so that trims and deletes do not wait for it.

        ``NotFoundError``. ``InvalidError`` while a member is alive, unless ``force``: a member that
        continues then begins again, as a new consumer does. Waits up to 1.5 times ``lease_ttl_ms``
        where a member may be alive on another machine.
        """
        delete_consumer(self.log, self.topic(topic), name, force=force)

    # Upkeep.

    def trim(self, topic: str, to: TrimTo, *, past_readers: Past = False) -> list[Trimmed]:
        """Delete the oldest events, up to a time, to offsets, or down to some bytes.

        ``InvalidError`` where a consumer, an archive, a pump or a playback has not read them yet,
        unless ``past_readers`` accepts that they are lost to it: True for all, or names such as
        ``billing`` or ``consumer:billing``.
        """
        found = self.topic(topic)
        check = partial(check_readers, self.log, found, past_readers)
        with freeing(self.catalog):
            return trim_topic(self.log, found, to, check)

    def sweep(self, grace: str | int = "1h", *, accept_loss: Iterable[str] = ()) -> SweepReport:
        """Delete objects that nothing refers to and that are older than ``grace``.

        Of topics, archives and pipelines. An error of an archive is raised when the rest is done.
        Where a topic's objects show that the catalog has lost commits, nothing of it is deleted,
        unless the topic is in ``accept_loss``. ``NotFoundError`` when there is no such topic.
        """
        self._check_open()
        with freeing(self.catalog):
            swept: SweepReport = import_module(_MAINTENANCE).sweep_everything(
                self, duration_ms(grace), frozenset(accept_loss)
            )
        return swept

    def _after_turns(self, how: Scribing) -> Callable[[Turn], Turn]:
        turns: Callable[[Turn], Turn] = import_module(_MAINTENANCE).ArchiveTurns(self, how)
        return turns

    def verify(self, topic: str, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read all that belongs to a topic, past the cache; what is not as it should be."""
        store = self.store.inner if isinstance(self.store, CachedStore) else self.store
        log = replace(self.log, store=store)
        return verify_topic(log, self.topic(topic), self._pool, progress)

    def inspect(self) -> list[str]:
        """What is wrong with the catalog as a whole, beside what ``verify`` finds in a topic."""
        self._check_open()
        return list(inspect_home(self.log))

    def playback(self, topic: str, start: Time = None, end: Time = None) -> Iterator[Event]:
        """The events of ``[start, end)`` in the order of their times, up to the ends of now."""
        self._check_open()
        return play_events(self.log, topic, start, end)

    def playback_arrow(
        self, topic: str, start: Time = None, end: Time = None
    ) -> Iterator[pa.RecordBatch]:
        """The same as batches in event columns."""
        self._check_open()
        return play_arrow(self.log, topic, start, end)

    def replay(self, topic: str, start: Time = None, end: Time = None) -> Iterator[Event]:
        """The events of ``[start, end)`` in the order of their times; by default all there are."""
        times = whole_range(start, end, self.log.clock.now_ms())
        return self.playback(topic, times.start_ms, times.end_ms)

    def watch(self, topic: str) -> None:
        """Let this process notify a topic's targets of what it commits there by other ways."""
        self._notifier.watch(self.topic(topic))

    def close(self) -> None:
        """Close what was opened from here, flushing what is under way; raises what failed."""
        check_process(self._process, f"home `{self.id}`")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            opened = [*self._given, *self._producers.values()]
            self._producers.clear()
        with contextlib.ExitStack() as stack:  # each is closed, also when another fails
            stack.callback(self.catalog.close)
            stack.callback(self._pool.shutdown)
            stack.callback(self._notifier.close)
            for each in opened:
                stack.callback(each.close)

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

    def _reader(self, topic: str, partition: int, start: int) -> Reader:
        reader = Reader(self.log, self.topic(topic), partition, self._pool)
        reader.check_start(start)
        return reader

    def _shared_producer(self, topic: str) -> Producer:
        """One unnamed producer for all appends to a topic; a new one when it was made again."""
        found = self.topic(topic)
        old = None
        with self._lock:
            producer = self._producers.get(topic)
            if producer is None or producer.incarnation != found.incarnation:
                self._notifier.watch(found)
                old = producer
                producer = self._producers[topic] = Producer(self.log, found)
        if old is not None:
            _close_quietly(old)
        return producer

    def _check_open(self) -> None:
        check_process(self._process, f"home `{self.id}`")
        if self._closed:
            raise InvalidError(f"home `{self.id}`: is closed: open it again")


def _close_quietly(producer: Producer) -> None:
    """Of a topic that is gone; its appends have told their callers what failed."""
    with contextlib.suppress(TidelogError):
        producer.close()


def open_home(home: str | os.PathLike[str] | None = None, *, world: World | None = None) -> Home:
    """Open a home: a folder, a config string, ``memory:``, or None for where the settings point.

    The default home is created on first use; any other needs ``tidelog init``, and without it
    ``NotFoundError`` is raised. A store and a catalog of different homes, or a home that needs
    newer code, raise ``InvalidError``.
    """
    world = world or real_world()
    settings = load_settings(None if home is None else os.fspath(home), world.environ, world.folder)
    if settings.is_default or settings.store == "memory:":
        return create_home(settings, world=world)[0]
    meter = Meter()
    store = open_store_of(settings, world, meter)
    try:
        catalog = open_catalog_of(settings, world, create=False)
    except NotFoundError as exc:
        in_store = read_store(store)
        if in_store is not None:
            raise lost_catalog(store, settings.catalog, in_store) from exc
        raise
    try:
        identity = read_pair(store, catalog, location_of(world, store, catalog))
    except BaseException:
        catalog.close()
        raise
    return _home(identity, settings, world, meter, (store, catalog))


def create_home(
    settings: Settings, *, world: World | None = None, create_catalog: bool = True
) -> tuple[Home, bool]:
    """Create a home where there is none; the home, and whether it is new.

    Idempotent, also when several processes do it at once or one died on the way.
    ``create_catalog`` makes the catalog's file or table where it is missing.
    """
    world = world or real_world()
    meter = Meter()
    store = open_store_of(settings, world, meter)
    catalog = _find_catalog(store, settings, world, create_catalog)
    is_new = True
    try:
        claimed = read_catalog(catalog) if catalog else None
        if catalog and claimed and claimed[0].state != "creating":
            identity, is_new = read_pair(store, catalog, location_of(world, store, catalog)), False
        else:
            probe_store(store, world.ids)
            catalog = catalog or open_catalog_of(settings, world, create=True)
            where = location_of(world, store, catalog)
            identity = create_identity(store, catalog, world.ids, where)
    except BaseException:
        if catalog:
            catalog.close()
        raise
    return _home(identity, settings, world, meter, (store, catalog)), is_new


def _home(
    identity: Identity,
    settings: Settings,
    world: World,
    meter: Meter,
    halves: tuple[Store, Catalog],
) -> Home:
    """The home, which knows whether it is a copy."""
    store, catalog = halves
    is_copy = identity.is_copy(location_of(world, store, catalog))
    standing = Standing(identity.id, str(identity.location) if is_copy else "")
    return Home(identity, settings, log_of(settings, world, *halves, standing), meter, world)


def _find_catalog(
    store: Store, settings: Settings, world: World, may_create: bool
) -> Catalog | None:
    """Step 1: look at both sides before anything is made on either; None for "to be created"."""
    in_store = read_store(store)
    try:
        return open_catalog_of(settings, world, create=False)
    except NotFoundError:
        if in_store is not None:
            raise lost_catalog(store, settings.catalog, in_store) from None
        if not may_create:
            raise
        return None
