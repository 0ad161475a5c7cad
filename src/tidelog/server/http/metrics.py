"""What the server did, as metrics for Prometheus.

The loop's own thread counts, in plain numbers, so that a request pays next to nothing; they become
metrics when a request asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tidelog.catalog.checksums import CheckedCatalog
from tidelog.store.wrappers import Meter

__all__ = ["Metrics"]

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Durations:
    """How long requests of one kind took."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BUCKETS_S) + 1)
        self.sum_s = 0.0


class Metrics(Collector):
    """Counts for one server."""

    def __init__(
        self,
        meter: Meter,
        buffered: Callable[[], Iterable[tuple[str, int]]],
        catalog: CheckedCatalog | None = None,
    ) -> None:
        self.in_flight = 0
        self.waiting = 0  # long polls and tails
        self.events_in = 0
        self.bytes_in = 0
        self.events_out = 0
        self._requests: dict[tuple[str, int], int] = {}
        self._durations: dict[str, _Durations] = {}
        self._meter = meter
        self._catalog = catalog
        self._buffered = buffered  # bytes on their way, by topic
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Counts a request that has ended."""
        key = (operation, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        durations = self._durations.get(operation)
        if durations is None:
            durations = self._durations[operation] = _Durations()
        durations.buckets[bisect_left(_BUCKETS_S, seconds)] += 1
        durations.sum_s += seconds

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is known before it has happened

    def collect(self) -> Iterable[Metric]:
        yield from self._of_requests()
        for name, what, value in (
            ("tidelog_events_in", "Events that were appended", self.events_in),
            ("tidelog_body_bytes_in", "Bytes of bodies that were appended", self.bytes_in),
            ("tidelog_events_out", "Events that were read", self.events_out),
        ):
            yield CounterMetricFamily(name, what, value)
        yield GaugeMetricFamily("tidelog_requests_in_flight", "Requests now", self.in_flight)
        yield GaugeMetricFamily("tidelog_waiting", "Long polls and tails now", self.waiting)
        buffered = GaugeMetricFamily(
            "tidelog_buffered_bytes", "Events on their way to the store", labels=["topic"]
        )
        for topic, size in self._buffered():
            buffered.add_metric([topic], size)
        yield buffered
        yield from self._of_store()
        yield from self._of_catalog()

    def _of_requests(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "tidelog_requests", "Requests that were answered", labels=["operation", "status"]
        )
        for (operation, status), count in sorted(self._requests.items()):
            requests.add_metric([operation, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "tidelog_request_seconds", "How long requests took", labels=["operation"]
        )
        for operation, durations in sorted(self._durations.items()):
            total = 0
            buckets = []
            bounds = [*map(str, _BUCKETS_S), "+Inf"]
            for bound, count in zip(bounds, durations.buckets, strict=True):
                total += count
                buckets.append((bound, total))
            seconds.add_metric([operation], buckets, durations.sum_s)
        yield seconds

    def _of_store(self) -> Iterable[Metric]:
        names = (
            ("requests", "Requests to the store"),
            ("errors", "Requests to the store that failed"),
            ("bytes", "Bytes to and from the store"),
            ("seconds", "Time that requests to the store took"),
        )
        verbs = sorted(self._meter.verbs.items())
        for name, what in names:
            family = CounterMetricFamily(f"tidelog_store_{name}", what, labels=["verb"])
            for verb, usage in verbs:
                family.add_metric([verb], getattr(usage, name))
            yield family

    def _of_catalog(self) -> Iterable[Metric]:
        catalog = self._catalog
        calls = {} if catalog is None else catalog.calls
        for name, what, label, found in (
            ("calls", "Reads, scans, writes and conflicts of the catalog", "call", calls),
            (
                "capacity_units",
                "Capacity units that DynamoDB has counted",
                "request",
                {} if catalog is None else catalog.units,
            ),
        ):
            family = CounterMetricFamily(f"tidelog_catalog_{name}", what, labels=[label])
            for key, value in sorted(found.items()):
                family.add_metric([key], value)
            yield family
