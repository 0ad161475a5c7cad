"""The world of a command whose work is traced, where OpenTelemetry is set up."""

from __future__ import annotations

from dataclasses import replace

from tidelog.home import World
from tidelog.log.spans import NoSpans
from tidelog.server.telemetry import open_telemetry
from tidelog.substrates import real_world

__all__ = ["traced_world"]


def traced_world() -> World:
    """This process's own, with spans for whoever has set up a provider for them."""
    return replace(real_world(), spans=open_telemetry() or NoSpans())
