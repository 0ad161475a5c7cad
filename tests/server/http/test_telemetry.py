"""Spans along the way of an event, where OpenTelemetry is set up; and metrics."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tidelog
from tests.support.serving import Served, serving
from tidelog import backends as telemetry_module
from tidelog.backends import Telemetry, open_spans, open_telemetry
from tidelog.context import NoSpans
from tidelog.errors import InvalidError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Api:
    """OpenTelemetry with a provider of this test alone."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.Link = trace.Link
        self.SpanKind = trace.SpanKind
        self.get_current_span = trace.get_current_span

    def get_tracer(self, name: str) -> trace.Tracer:
        return self._provider.get_tracer(name)


def test_a_request_its_append_upload_and_commit_are_spans(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(Api(provider), propagate)
    with serving(tmp_path, telemetry=telemetry, settings={"linger_ms": 100}) as served:
        assert served.post({"value": "x"}, traceparent=PARENT).status_code == 201
        assert served.post({"key": "no value"}).status_code == 400
    spans = {span.name: span for span in exporter.get_finished_spans()}
    requests = [s for s in exporter.get_finished_spans() if s.name == "POST append"]
    request = next(s for s in requests if status(s) == 201)
    append, upload, commit = (spans[f"tidelog.{name}"] for name in ("append", "upload", "commit"))
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert request.parent
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert [link.context.span_id for link in append.links] == [request.context.span_id]
    assert append.attributes == {"topic": "t", "events": 1}
    for inner in (upload, commit):
        assert inner.parent
        assert inner.parent.span_id == append.context.span_id
    assert upload.attributes
    assert upload.attributes["bytes"]
    provider.shutdown()


def status(span: ReadableSpan) -> object:
    return (span.attributes or {}).get("http.response.status_code")


def test_without_a_provider_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_telemetry() is None
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    assert isinstance(open_telemetry(), Telemetry)


def test_every_home_has_the_spans_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with tidelog.open("memory:") as home:
        assert isinstance(home.context.spans, NoSpans)
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    with tidelog.open("memory:") as home:
        assert isinstance(home.context.spans, Telemetry)
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert isinstance(open_spans({}), NoSpans)
    assert "opentelemetry.trace" not in sys.modules, "nothing asked for it"


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> list[TracerProvider]:
    """What is set as the provider, in place of the process's own."""
    found: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", found.append)
    monkeypatch.setattr(
        trace, "get_tracer_provider", lambda: found[0] if found else trace.ProxyTracerProvider()
    )
    return found


def test_environment_alone_sets_up_an_exporter(
    no_provider: list[TracerProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    entry = SimpleNamespace(load=lambda: lambda: exporter)
    asked: list[dict[str, str]] = []

    def entry_points(**wanted: str) -> list[SimpleNamespace]:
        asked.append(wanted)
        return [entry]

    monkeypatch.setattr(telemetry_module, "entry_points", entry_points)
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "OTEL_SERVICE_NAME": "orders-log",
    }
    telemetry = open_telemetry(environ)
    assert telemetry is not None
    with telemetry.span("tidelog.append", topic="t"):
        pass
    [provider] = no_provider
    provider.force_flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["tidelog.append"]
    assert asked == [{"group": "opentelemetry_traces_exporter", "name": "otlp_proto_http"}]
    provider.shutdown()
    assert provider.resource.attributes["service.name"] == "orders-log"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_exporter_is_set_up_only_on_request(
    no_provider: list[TracerProvider], environ: dict[str, str]
) -> None:
    assert open_telemetry(environ) is None
    assert no_provider == []


def test_exporter_that_is_not_installed_is_named(no_provider: list[TracerProvider]) -> None:
    with pytest.raises(InvalidError, match="opentelemetry-exporter-otlp-proto-http"):
        open_telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    with pytest.raises(InvalidError, match="exporter `jaegr`"):
        open_telemetry({"OTEL_TRACES_EXPORTER": "jaegr"})
    assert no_provider == []


def metric(served: Served, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", served.client.get("/metrics").text, re.M)
    assert found, name
    return float(found[1])


def test_metrics_count_what_was_done(served: Served) -> None:
    served.post([{"value": "a"}, {"value": "b"}])
    served.client.get("/track/t.gif")
    served.post({"key": "no value"})
    served.client.get("/nowhere")
    served.events(limit=2)
    assert metric(served, 'tidelog_requests_total{operation="append",status="201"}') == 1
    assert metric(served, 'tidelog_requests_total{operation="append",status="400"}') == 1
    assert metric(served, 'tidelog_requests_total{operation="track",status="200"}') == 1
    assert metric(served, 'tidelog_requests_total{operation="none",status="404"}') == 1
    assert metric(served, "tidelog_events_in_total") == 3
    assert metric(served, "tidelog_events_out_total") == 2
    assert metric(served, 'tidelog_request_seconds_count{operation="append"}') == 2
    assert metric(served, 'tidelog_request_seconds_bucket{le="+Inf",operation="append"}') == 2
    assert metric(served, 'tidelog_store_requests_total{verb="put"}') >= 2
    assert metric(served, 'tidelog_catalog_calls_total{call="write"}') >= 2
    assert metric(served, 'tidelog_catalog_calls_total{call="get"}') >= 2
    assert metric(served, "tidelog_requests_in_flight") == 1
    deadline = time.monotonic() + 60
    while metric(served, 'tidelog_buffered_bytes{topic="t"}'):
        assert time.monotonic() < deadline


def test_commands_need_none_of_the_servers_libraries() -> None:
    """Most of them have spans, and are installed without the extra `serve`."""
    script = (
        "import sys\n"
        "for name in ('prometheus_client', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
        "import tidelog.cli.main, tidelog.cli.pipeline_options, tidelog.aws\n"
        "tidelog.aws.pixel_handler(['t'])\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
