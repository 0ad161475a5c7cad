"""What every part of ``Home`` builds on: the open home, its topics, its author and its tasks.

``Home`` inherits its calls from several classes of this room. Each of them inherits ``HomeBase``,
which also declares, once, the calls of one part that another one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tidelog.catalog import Catalog
from tidelog.concurrency import TaskRunner, check_process
from tidelog.context import Context
from tidelog.coordination.audit import Why
from tidelog.errors import InvalidError
from tidelog.journal.amend import Amender
from tidelog.journal.lookup import Lookups
from tidelog.journal.scribe import Scribe, ScribeOptions
from tidelog.log.notifier import Notifier
from tidelog.log.partition_reader import Reader
from tidelog.log.producer.producer import Producer
from tidelog.log.status import PartitionState
from tidelog.log.topics import find_topic
from tidelog.model.event import Event, Positions
from tidelog.model.topic import Topic
from tidelog.store import Store

if TYPE_CHECKING:
    from tidelog.erasure.updates import ArchiveUpdate

__all__ = ["HomeBase"]


class HomeBase:
    """An open home, as every group of its calls needs it."""

    id: str
    context: Context
    _notifier: Notifier
    _pool: Executor
    _lookups: Lookups
    _who: str  # the default author in audit records
    _process: int  # that opened it
    _closed: bool

    @property
    def store(self) -> Store:
        """The store, which holds objects.

        >>> home.store.url.startswith("file://")
        True
        """
        return self.context.store

    @property
    def catalog(self) -> Catalog:
        """The catalog, which holds rows.

        >>> home.catalog.url.startswith("sqlite://")
        True
        """
        return self.context.catalog

    def topic(self, name: str) -> Topic:
        """Returns the topic of this name. Raises ``NotFoundError``.

        >>> home.topic("orders").partitions
        1
        """
        self._check_open()
        return find_topic(self.context, name)

    def reason(self, why: str = "", who: str | None = None) -> Why:
        """Returns the author and reason for audit records; by default the user at this host.

        >>> home.reason("wrong price", "anna").who
        'anna'
        """
        return Why(self._who if who is None else who, why)

    def amender(self, topic: str, why: Why) -> Amender:
        """Returns an object that amends events of a topic. Raises ``NotFoundError``.

        >>> home.amender("orders", home.reason("wrong price")).update({"order-1": b"{}"}).events
        1
        """
        return Amender(self.context, self._lookups.of(self.topic(topic)), why, self._pool)

    def spark_tasks(self, spark: str, spark_conf: Mapping[str, str] | None = None) -> TaskRunner:
        """Returns what runs the heavy work of a scribe on Spark: pass it to :meth:`scribe`.

        ``spark`` is a Spark master. The session starts with the first work.

        >>> scribe = home.scribe(tasks=home.spark_tasks("local[*]"))
        """
        from tidelog.api.spark_workers import spark_tasks  # noqa: PLC0415 - Spark loads slowly

        return spark_tasks("scribe", spark, spark_conf)

    def _with_tasks(self, name: str, spark: str | None, conf: Mapping[str, str] | None) -> Context:
        """Returns the context, with tasks on Spark if a master is given."""
        if spark is None:
            return self.context
        from tidelog.api.spark_workers import spark_tasks  # noqa: PLC0415 - Spark loads slowly

        return replace(self.context, tasks=spark_tasks(name, spark, conf))

    def _reader(self, topic: str, partition: int, start: int) -> Reader:
        """Returns a reader of a partition. Raises if it does not begin with ``start``."""
        reader = Reader(self.context, self.topic(topic), partition, self._pool)
        reader.check_start(start)
        return reader

    def _check_open(self) -> None:
        """Raises ``InvalidError`` once the home is closed, or in a forked process."""
        check_process(self._process, f"home `{self.id}`")
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> InvalidError:
        return InvalidError(f"home `{self.id}`: is closed: open it again")

    # Calls of one part that another one needs.

    def append(
        self, topic: str, events: list[Event] | pa.Table, *, if_absent: bool = False
    ) -> Positions:
        raise NotImplementedError

    def producer(self, topic: str, name: str | None = None) -> Producer:
        raise NotImplementedError

    def partitions(self, topic: str, *, runs: bool = True) -> list[PartitionState]:
        raise NotImplementedError

    def update_archives(self, topic: str, ids: Iterable[str]) -> list[ArchiveUpdate]:
        raise NotImplementedError

    def scribe(
        self,
        how: ScribeOptions | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tasks: TaskRunner | None = None,
    ) -> Scribe:
        raise NotImplementedError

    def _closing_producer(self, topic: str) -> AbstractContextManager[None]:
        """Closes the producer of a topic once that is deleted; if it is refused, appends go on."""
        raise NotImplementedError
