"""Events into a stream of Kinesis, in the order of each partition key; repeats are not told apart.

How events look there is told in ``sinks.kinesis_writer``.
"""

from __future__ import annotations

from tidelog.connectors.kinesis.writer import KinesisWriter, open_writer
from tidelog.connectors.playback_sinks import Lot, PlaybackSink, SinkContext
from tidelog.model.address import Address

__all__ = ["KinesisPlaybackSink", "open_kinesis"]


def open_kinesis(address: Address, setting: SinkContext) -> KinesisPlaybackSink:
    """The sink at ``kinesis://STREAM?region=…``. ``NotFoundError``."""
    return KinesisPlaybackSink(open_writer(address.text, environ=setting.environ))


class KinesisPlaybackSink:
    """One stream."""

    lot_events = 5_000
    lot_bytes = None

    def __init__(self, writer: KinesisWriter) -> None:
        self._writer = writer

    def put(self, lot: Lot) -> None:
        self._writer.put(lot.batch)

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Each put has ended; there is nothing to release."""


_: type[PlaybackSink] = KinesisPlaybackSink
