"""Pumps and playbacks in a trace, where OpenTelemetry is set up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.playback.test_command import RANGE, fill
from tests.support.cli_run import Run


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is traced, by a provider of this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == f"tidelog.{name}"]


def test_a_pumps_cycles_are_spans_with_what_they_publish(
    tidelog: Run, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    tidelog("topic", "create", "t")
    words = ("pump", f"file:{tmp_path}/in", "--topic", "t", "--no-spark", "--name", "p")
    assert tidelog(*words).code == 0
    (cycle,) = named(spans, "pipeline")
    (publish,) = named(spans, "publish")
    assert cycle.attributes == {"pipeline": "p", "partitions": 1}
    assert publish.attributes
    assert publish.attributes["events"] == 2
    assert publish.parent
    assert publish.parent.span_id == cycle.context.span_id
    assert tidelog(*words).code == 0
    assert len(named(spans, "pipeline")) == 1, "a look at nothing new is no span"


@pytest.mark.parametrize("name", [(), ("--resume", "p")])
def test_a_playback_is_a_span_with_its_lots(
    tidelog: Run, name: tuple[str, ...], spans: InMemorySpanExporter
) -> None:
    fill()
    assert tidelog("playback", "t", *RANGE, "--to", "topic:u", *name).code == 0
    (playback,) = named(spans, "playback")
    (put,) = named(spans, "put")
    assert playback.attributes == {"topic": "t"}
    assert put.attributes == {"events": 9}
    assert put.parent
    assert put.parent.span_id == playback.context.span_id


def test_one_that_fails_says_so(
    tidelog: Run, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    monkeypatch.setenv("TIDELOG_RETRY_ATTEMPTS", "2")
    done = tidelog("playback", "t", *RANGE, "--to", "http://127.0.0.1:9/", "--resume", "p")
    assert done.code != 0
    (playback,) = named(spans, "playback")
    assert not playback.status.is_ok
    assert playback.events[0].name == "exception"
