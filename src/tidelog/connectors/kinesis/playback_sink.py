"""Plays events into a Kinesis stream, in the order of each partition key.

Kinesis cannot detect repeats. ``writer`` describes how events look there.
"""

from __future__ import annotations

from tidelog.connectors.kinesis.writer import KinesisWriter, open_writer
from tidelog.connectors.playback_sinks import Lot, PlaybackSink, SinkContext
from tidelog.model.address import Address

__all__ = ["KinesisPlaybackSink", "open_kinesis"]


def open_kinesis(address: Address, setting: SinkContext) -> KinesisPlaybackSink:
    """Opens the sink at ``kinesis://STREAM?region=…``. Raises ``NotFoundError``."""
    return KinesisPlaybackSink(open_writer(address.text, environ=setting.environ))


class KinesisPlaybackSink:
    """A Kinesis stream."""

    lot_events = 5_000
    lot_bytes = None

    def __init__(self, writer: KinesisWriter) -> None:
        self._writer = writer

    def put(self, lot: Lot) -> None:
        self._writer.put(lot.batch)

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Does nothing: each put is complete."""


_: type[PlaybackSink] = KinesisPlaybackSink
