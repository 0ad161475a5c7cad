"""A topic of Kafka in memory, as far as a playback uses it: transactions, and a group's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidelog.errors import UnavailableError

__all__ = ["FakeBroker", "FakeTransactions"]


@dataclass
class FakeBroker:
    """What brokers keep of one topic and one transactional id."""

    records: list[dict[str, Any]] = field(default_factory=list)  # that are committed
    number: int | None = None  # what the last transaction said
    opened: int = 0  # how often; the last one fences those before it


class FakeTransactions:
    """``Transactions`` into a broker; ``step`` is called around each commit and may raise."""

    def __init__(
        self, broker: FakeBroker, full: int, step: Callable[[str], None] = lambda _: None
    ) -> None:
        broker.opened += 1
        self._broker = broker
        self._mine = broker.opened
        self._full = full  # events that a transaction holds
        self._step = step
        self._open: list[dict[str, Any]] = []

    def reached(self) -> int | None:
        return self._broker.number

    def send(self, batch: pa.RecordBatch, partition: int | None, number: int | None = None) -> None:
        for row in batch.to_pylist():
            self._open.append(row)
            if number is not None:
                number += 1
                if len(self._open) >= self._full:
                    self._commit(number)

    def finish(self, number: int) -> None:
        self._commit(number)

    def close(self) -> None:
        self._open.clear()

    def _commit(self, number: int) -> None:
        self._step("before")
        if self._mine != self._broker.opened:
            raise UnavailableError("kafka: another driver has begun: look again")
        self._broker.records += self._open
        self._broker.number = number
        self._open = []
        self._step("after")
