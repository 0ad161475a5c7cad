"""Spans by OpenTelemetry, where the user has it installed and has set up a provider for it.

The environment sets one up too, by the names that OpenTelemetry gives: ``OTEL_TRACES_EXPORTER``
names exporters (``otlp``, ``console``), ``OTEL_EXPORTER_OTLP_ENDPOINT`` means ``otlp``, and
``OTEL_SERVICE_NAME``, ``OTEL_SDK_DISABLED`` and the exporters' own names mean what they mean
elsewhere. Without a provider, nothing is traced and requests pay nothing.

A request is one span, which belongs to the trace that its ``traceparent`` header names; an append
is one for all requests that share it, with a link to each, and has its upload and commit inside.
Every home that is opened has these spans, whatever opens it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from typing import Any

from tidelog.context import NoSpans, Spans
from tidelog.errors import InvalidError

__all__ = ["Telemetry", "open_spans", "open_telemetry"]

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
