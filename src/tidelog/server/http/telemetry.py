"""Spans by OpenTelemetry, where the user has it installed and has set up a provider for it.

Without either, nothing is traced and requests pay nothing. A request is one span, which belongs to
the trace that its ``traceparent`` header names; an append is one for all requests that share it,
with a link to each, and has its upload and its commit inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tidelog.context import Spans

__all__ = ["Telemetry", "open_telemetry"]


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
        """A span around a request, inside the trace that its headers name."""
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
        """What a flush refers to the present request by; None outside of a recorded one."""
        span = self._api.get_current_span()
        return span.get_span_context() if span.is_recording() else None


def open_telemetry() -> Telemetry | None:
    """Telemetry, where OpenTelemetry is installed and a provider is set."""
    try:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - it may not be there
    except ImportError:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return Telemetry(trace, propagate)
