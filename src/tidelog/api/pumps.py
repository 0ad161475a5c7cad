"""Pumps as Python code uses them: ``home.pumps``, and a handle for each pump."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict, Unpack

from tidelog.api.runs import RunOptions, RunResult, driver_options, open_workers, run_pipeline
from tidelog.archive.metrics import pipelines_text
from tidelog.codec.fields import FieldPaths
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.archive import Start
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.times import duration_ms
from tidelog.pipeline.base import LocalWorkers, Pipeline
from tidelog.pipeline.policy import FilePolicy
from tidelog.pipeline.pump import PumpOptions, is_restore, open_pump, pump_options
from tidelog.pipeline.pump_status import PumpStatus, read_pump_status
from tidelog.pipeline.registry import delete_pipeline, find_pipeline, list_pipelines

__all__ = ["PumpFields", "PumpHandle", "PumpRunOptions", "Pumps"]


class PumpFields(TypedDict, total=False):
    """The JSON fields that events get their parts from, as paths such as ``meta.id``."""

    key_field: str
    id_field: str
    type_field: str
    time_field: str


class PumpRunOptions(RunOptions, total=False):
    """How a pump runs."""

    start: Start  # of a new pump: earliest (default), or latest, the ends that it sees first
    max_bytes: int  # write to the topic when this much waits; default 64 MB
    max_age: str | int  # or when an event has waited this long, while following; default 1s


class Pumps:
    """The pumps of a home: ``home.pumps``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def create(
        self,
        name: str | None = None,
        *,
        source: str,
        topic: str,
        transform: str = "",
        partition: Literal["key", "same"] = "key",
        **fields: Unpack[PumpFields],
    ) -> PumpHandle:
        """Return a pump from a source into a topic, created if it is new.

        Its name follows from source and topic unless one is given. The topic must exist.
        ``partition`` chooses partitions by key, or keeps the source's numbers. Raises
        ``InvalidError`` if the pump exists with other settings.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").run().events
        3
        """
        paths = FieldPaths(
            fields.get("key_field", ""),
            fields.get("id_field", ""),
            fields.get("type_field", ""),
            fields.get("time_field", ""),
        )
        wanted = PumpOptions(source, topic, name, paths, transform, partition)
        opened = open_pump(self._context, wanted, LocalWorkers())
        return PumpHandle(self._context, find_pipeline(self._context, opened.name), opened)

    def get(self, name: str) -> PumpHandle:
        """Return the handle of a pump. Raises ``NotFoundError``.

        >>> _ = home.create_topic("copies")
        >>> _ = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> home.pumps.get("copy").info.source
        'topic:orders'
        """
        return PumpHandle(self._context, find_pipeline(self._context, name))

    def metrics(self) -> str:
        """Return Prometheus metrics of all pumps and restores.

        >>> isinstance(home.pumps.metrics(), str)
        True
        """
        return pipelines_text(self._context)

    def list(self, *, restores: bool = False) -> list[PumpHandle]:
        """Return the handles of all pumps, by name; with ``restores`` those of restores too.

        >>> home.pumps.list()
        []
        """
        found = [PumpHandle(self._context, each) for each in list_pipelines(self._context)]
        return [each for each in found if restores or not each.is_restore]


class PumpHandle:
    """One pump: run it, look at it, delete it."""

    def __init__(
        self, context: Context, info: NamedPipeline, opened: Pipeline | None = None
    ) -> None:
        self.name = info.name
        self.info = info  # its settings, when they were read
        self._context = context
        self._opened = opened  # by its creation; for the first run

    def __repr__(self) -> str:
        return f"PumpHandle({self.name!r})"

    @property
    def is_restore(self) -> bool:
        """Whether it is the restore of an archive, which only a restore runs.

        >>> _ = home.create_topic("again")
        >>> _ = home.archives.get("daily").restore(to="topic:again")
        >>> [each.is_restore for each in home.pumps.list(restores=True)]
        [True]
        """
        return is_restore(self.info)

    def run(
        self,
        *,
        follow: bool = False,
        spark: str | None = None,
        **options: Unpack[PumpRunOptions],
    ) -> RunResult:
        """Bring the source's events into the topic, each once, and return what was done.

        With ``follow`` it goes on until ``stop`` is set. ``spark`` is a Spark master; without it
        the work is done in this process. Another process that runs the pump is waited for. Safe to
        kill, to repeat, and to run twice at once.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.run().events, pump.run().events
        (3, 0)
        """
        if self.is_restore:
            raise InvalidError(f"pipeline `{self.name}`: is a restore: restore the archive again")
        opened, self._opened = self._opened, None
        if opened is None:
            opened = open_pump(self._context, pump_options(self.info), LocalWorkers())
        workers = open_workers(self.name, spark, options.get("spark_conf"))
        pipeline = dataclasses.replace(opened, workers=workers, rate=options.get("rate"))
        age_ms = duration_ms(options.get("max_age", "1s"))
        policy = FilePolicy(options.get("max_bytes", 64_000_000), age_ms)
        start = options.get("start", "earliest")
        how = driver_options(options, follow=follow, policy=policy, start=start)
        how.flush_on_stop = options.get("flush_on_stop", True)
        return run_pipeline(self._context, pipeline, how)

    def status(self, *, source: bool = True) -> PumpStatus:
        """Return how far the pump is, what waits, and what fails, by source partition.

        Without ``source`` the source is not asked, and what waits is not known.

        >>> _ = home.create_topic("copies")
        >>> pump = home.pumps.create("copy", source="topic:orders", topic="copies")
        >>> pump.status().lag
        3
        """
        return read_pump_status(self._context, self.info, source=source)

    def delete(self) -> None:
        """Delete the pump. What it has written stays. Raises ``InvalidError`` while it runs.

        >>> _ = home.create_topic("copies")
        >>> home.pumps.create("copy", source="topic:orders", topic="copies").delete()
        >>> home.pumps.list()
        []
        """
        delete_pipeline(self._context, self.name, self.info.incarnation)
