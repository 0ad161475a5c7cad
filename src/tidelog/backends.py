"""The backends of a home: opens the store, the catalog and the spans that the settings name.

This is the only module that chooses implementations: everything above works on the interfaces.

**The probe** tests a store's promises before anything is built on them. Some gateways and emulators
silently ignore conditional requests. On such a store two writers could both believe that they
created the same object. So when a home is created, two threads race to create one object: exactly
one must win, over several rounds.

**Spans** go to OpenTelemetry, where the user has it installed and has set up a provider for it. The
environment sets one up too, by the names that OpenTelemetry gives: ``OTEL_TRACES_EXPORTER`` names
exporters (``otlp``, ``console``), ``OTEL_EXPORTER_OTLP_ENDPOINT`` means ``otlp``, and
``OTEL_SERVICE_NAME``, ``OTEL_SDK_DISABLED`` and the exporters' own names mean what they mean
elsewhere. Without a provider, nothing is traced and requests pay nothing.

A request is one span, which belongs to the trace that its ``traceparent`` header names; an append
is one for all requests that share it, with a link to each, and has its upload and commit inside.
Every home that is opened has these spans, whatever opens it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tidelog.catalog import Catalog, open_catalog
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.catalog.update import Repeat
from tidelog.clock import Clock, Ids, RandomIds, SystemClock, system_random
from tidelog.concurrency import LocalProcesses
from tidelog.context import Context, NoSpans, Spans
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TidelogError,
)
from tidelog.identity import (
    HomeIdentity,
    Identity,
    Location,
    create_identity,
    locate,
    lost_catalog,
    machine_id,
    read_catalog,
    read_pair,
    read_store,
)
from tidelog.model import layout
from tidelog.settings import Settings, load_settings
from tidelog.store import Store, open_store
from tidelog.store.wrappers import CachedStore, Meter, MeteredStore, RetryingStore

__all__ = [
    "Telemetry",
    "World",
    "context_of",
    "create_context",
    "location_of",
    "open_catalog_of",
    "open_context",
    "open_spans",
    "open_store_of",
    "open_telemetry",
    "probe_store",
    "real_world",
]

_ENTRY = {"otlp": "otlp_proto_http"}  # exporters whose entry point has another name


class Telemetry(Spans):
    """Spans of the log and of requests, by one tracer."""

    def __init__(self, api: Any, propagate: Any) -> None:
        self._api = api
        self._propagate = propagate
        self._tracer = api.get_tracer("tidelog")

    def span(
        self, name: str, links: Sequence[object] = (), **attributes: str | int
    ) -> AbstractContextManager[None]:
        wanted = [self._api.Link(link) for link in links]
        found: AbstractContextManager[None] = self._tracer.start_as_current_span(
            name, links=wanted, attributes=attributes
        )
        return found

    @contextmanager
    def request(self, operation: str, method: str, headers: Mapping[bytes, bytes]) -> Iterator[Any]:
        """Opens a span around a request, inside the trace that its headers name."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        attributes = {"http.request.method": method, "http.route": operation}
        with self._tracer.start_as_current_span(
            f"{method} {operation}",
            context=self._propagate.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            yield span

    def link(self) -> object | None:
        """Returns the link from a flush to the current request; None if that is not recorded."""
        span = self._api.get_current_span()
        return span.get_span_context() if span.is_recording() else None


def open_spans(environ: Mapping[str, str]) -> Spans:
    """Returns the spans of a process. Imports OpenTelemetry only where something asks for it."""
    if not _exporters(environ) and "opentelemetry.trace" not in sys.modules:
        return NoSpans()
    return open_telemetry(environ) or NoSpans()


def open_telemetry(environ: Mapping[str, str] | None = None) -> Telemetry | None:
    """Returns telemetry if OpenTelemetry is installed and a provider is set or asked for.

    Raises ``InvalidError`` if the environment asks for an exporter that is not installed.
    """
    wanted = _exporters(environ or {})
    try:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - it may not be there
    except ImportError as exc:
        if wanted:
            raise _not_installed(wanted[0]) from exc
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        if not wanted:
            return None
        trace.set_tracer_provider(_provider(wanted, environ or {}))
    return Telemetry(trace, propagate)


def _exporters(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the exporters that the environment asks for."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    by_address = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    default = "otlp" if any(environ.get(name) for name in by_address) else "none"
    names = (environ.get("OTEL_TRACES_EXPORTER") or default).split(",")
    return [name.strip() for name in names if name.strip() not in ("", "none")]


def _provider(wanted: Sequence[str], environ: Mapping[str, str]) -> Any:
    """Returns a provider that exports in the background, and what is left when the process ends."""
    try:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - it may not be there
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - the same
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - the same
    except ImportError as exc:
        raise _not_installed(wanted[0]) from exc
    exporters = []
    for name in wanted:
        found = entry_points(group="opentelemetry_traces_exporter", name=_ENTRY.get(name, name))
        if not found:
            raise _not_installed(name)
        exporters.append(next(iter(found)).load()())
    service = environ.get("OTEL_SERVICE_NAME") or "tidelog"
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _not_installed(name: str) -> InvalidError:
    return InvalidError(
        f"telemetry: exporter `{name}` is not installed: "
        "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    )


_INIT = "`tidelog init"  # as errors name the command
_ROUNDS = 3


def probe_store(store: Store, ids: Ids) -> None:
    """Raises ``InvalidError`` unless the store keeps its promises; leaves nothing behind."""
    keys = [layout.probe(ids.new()) for _ in range(_ROUNDS)]
    copied = layout.probe(ids.new())
    try:
        for key in keys:
            _probe_create(store, key)
        _probe_copy(store, keys[0], keys[1], copied)
        _probe_replace(store, keys[0])
    except Exception:
        with contextlib.suppress(TidelogError):  # the first error is the relevant one
            store.delete([*keys, copied])
        raise
    store.delete([*keys, copied])


def _probe_create(store: Store, key: str) -> None:
    bodies = (b"first", b"second")
    start = threading.Barrier(len(bodies))

    def create(body: bytes) -> bool:
        start.wait()
        try:
            store.put(key, body)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as racers:
        won = list(racers.map(create, bodies))
    if sum(won) != 1:
        raise _broken(store, f"{sum(won)} of {len(bodies)} racing creates of one object succeeded")
    if store.get(key) != bodies[won.index(True)]:
        raise _broken(store, "the object holds the bytes of the create that was refused")


def _probe_copy(store: Store, source: str, taken: str, free: str) -> None:
    _must_refuse(store, "a copy over an object", lambda: store.copy(source, taken))
    store.copy(source, free)
    if store.get(free) != store.get(source):
        raise _broken(store, "a copy differs from its source")


def _probe_replace(store: Store, key: str) -> None:
    etag = store.head(key).etag
    store.replace(key, b"third", etag)
    _must_refuse(store, "a replace with an old etag", lambda: store.replace(key, b"fourth", etag))
    if store.get(key) != b"third":
        raise _broken(store, "a replaced object does not hold the new bytes")


def _must_refuse(store: Store, what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (AlreadyExistsError, ConflictError):
        return
    raise _broken(store, f"{what} was not refused")


def _broken(store: Store, what: str) -> InvalidError:
    return InvalidError(
        f"store `{store.url}`: {what}, so events could be lost there: "
        "use a store with conditional writes (If-None-Match, If-Match)"
    )


_REMOTE_COMMITS = 8  # partitions of one flush that are committed in parallel


@dataclass(frozen=True)
class World:
    """The outside world: time, ids, randomness, the environment, and the current folder."""

    environ: Mapping[str, str]
    folder: Path = field(default_factory=Path.cwd)
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=RandomIds)
    random: random.Random = field(default_factory=system_random)
    spans: Spans = field(default_factory=NoSpans)
    machine: str = field(default_factory=machine_id)  # part of a local home's location


def open_store_of(settings: Settings, world: World, meter: Meter) -> Store:
    """Returns the store with metering, retries and a cache."""
    store = open_store(
        settings.store,
        clock=world.clock,
        ids=world.ids,
        random=world.random,
        environ=world.environ,
    )
    metered = MeteredStore(store, meter, clock=world.clock)
    retrying = RetryingStore(
        metered, clock=world.clock, random=world.random, backoff=settings.backoff()
    )
    return CachedStore(retrying, settings.cache_bytes)


def open_catalog_of(settings: Settings, world: World, *, create: bool) -> Catalog:
    """Returns the catalog, whose rows have checksums.

    Raises ``NotFoundError`` if it does not exist and ``create`` is false.
    """
    repeat = Repeat(world.clock, world.random, settings.backoff())
    catalog = open_catalog(settings.catalog, create=create, repeat=repeat, environ=world.environ)
    return CheckedCatalog(catalog)


def location_of(world: World, store: Store, catalog: Catalog) -> Location:
    """Returns where the two halves are, which tells a copy from its original."""
    return locate(store.url, catalog.url, world.machine)


def context_of(
    settings: Settings, world: World, store: Store, catalog: Catalog, identity: HomeIdentity
) -> Context:
    """Returns the context of a home that these settings open."""
    remote_store = not store.url.startswith(("file:", "memory:"))
    remote_catalog = not catalog.url.startswith(("sqlite:", "memory:"))
    return Context(
        store=store,
        catalog=catalog,
        clock=world.clock,
        ids=world.ids,
        random=world.random,
        log_settings=settings.log_settings(remote_store),
        backoff=settings.backoff(),
        processes=LocalProcesses(),
        spans=world.spans,
        identity=identity,
        commits_at_once=_REMOTE_COMMITS if remote_catalog else 1,
        environ=world.environ,
        settings=settings,
    )


def open_context(
    home: str | os.PathLike[str] | None = None, *, world: World | None = None
) -> Context:
    """Opens a home without its public methods; raises what ``tidelog.home.open_home`` raises."""
    world = world or real_world()
    settings = load_settings(None if home is None else os.fspath(home), world.environ, world.folder)
    if settings.is_default or settings.store == "memory:":
        return create_context(settings, world=world)[0]
    try:
        return _existing_context(settings, world)
    except NotFoundError as exc:
        if home is None or _INIT not in exc.message:
            raise
        there = f"`tidelog --home {shlex.quote(os.fspath(home))} init"
        raise NotFoundError(exc.message.replace(_INIT, there), **exc.context) from exc


def _existing_context(settings: Settings, world: World) -> Context:
    meter = Meter()
    store = open_store_of(settings, world, meter)
    catalog = _existing_catalog(store, settings, world)
    try:
        identity = read_pair(store, catalog, location_of(world, store, catalog))
    except BaseException:
        catalog.close()
        raise
    return _opened(identity, settings, world, meter, (store, catalog))


def create_context(
    settings: Settings, *, world: World, create_catalog: bool = True
) -> tuple[Context, bool]:
    """Creates a home unless one exists; returns its context and whether it is new."""
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
    return _opened(identity, settings, world, meter, (store, catalog)), is_new


def real_world() -> World:
    """Returns the world of this process, with spans where OpenTelemetry is set up."""
    environ = os.environ  # noqa: TID251 - the one place that reads the environment
    return World(environ=environ, spans=open_spans(environ))


def _opened(
    identity: Identity,
    settings: Settings,
    world: World,
    meter: Meter,
    halves: tuple[Store, Catalog],
) -> Context:
    """Returns the context, which knows whether the home is a copy."""
    store, catalog = halves
    is_copy = identity.is_copy(location_of(world, store, catalog))
    own = HomeIdentity(identity.id, str(identity.location) if is_copy else "")
    return replace(context_of(settings, world, store, catalog, own), meter=meter)


def _find_catalog(
    store: Store, settings: Settings, world: World, may_create: bool
) -> Catalog | None:
    """Step 1: checks both halves before it creates anything on either.

    Returns None if the catalog must be created.
    """
    try:
        return _existing_catalog(store, settings, world)
    except NotFoundError:
        if not may_create:
            raise
        return None


def _existing_catalog(store: Store, settings: Settings, world: World) -> Catalog:
    """Returns the catalog; raises ``InvalidError`` if it is missing and the store is of a home.

    Looks again after it has read the store: a home that is created meanwhile has its catalog
    before it marks its store.
    """
    try:
        return open_catalog_of(settings, world, create=False)
    except NotFoundError:
        in_store = read_store(store)
        if in_store is None:
            raise
    try:
        return open_catalog_of(settings, world, create=False)
    except NotFoundError as exc:
        raise lost_catalog(store, settings.catalog, in_store) from exc
