"""A home with an archive to look into, and a parser that can be mended."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from tidelog import Event, Home
from tidelog.archive.archive import create_archive, open_pipeline
from tidelog.codec.parsers import FolderSettings, ParsedValues
from tidelog.home import World, create_home
from tidelog.model.archive import Archive, ArchiveFormat, Start
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

FIRST_S = 1_794_700_800  # 2026-11-15
AT = "tests.support.archive_look:ByField|at"
AT_OR_WHEN = "tests.support.archive_look:ByField|at,when"


class ByField:
    """Takes the time from the first of some fields that a JSON value has."""

    def __init__(self, argument: str, settings: FolderSettings) -> None:
        self._fields = argument.split(",")

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        found = [self._time(value) for value in batch.column("value").to_pylist()]
        times = pa.array([each if isinstance(each, int) else None for each in found], pa.int64())
        errors = [None if isinstance(each, int) else each for each in found]
        return ParsedValues(times, pa.array(errors, pa.string()))

    def _time(self, value: bytes | None) -> int | str:
        try:
            values = json.loads(value or b"")
        except ValueError:
            return "no JSON"
        names = [name for name in self._fields if name in values]
        return values[names[0]] * 1000 if names else f"no field {' or '.join(self._fields)}"


def value(number: int) -> bytes:
    """Every third event has its time elsewhere; every seventh has none."""
    if number % 7 == 0:
        return b"nonsense %d" % number
    name = "when" if number % 3 == 0 else "at"
    return json.dumps({name: FIRST_S + number % 2 * 86_400, "n": number}).encode()


def a_home(folder: Path) -> Home:
    settings = Settings(str(folder / "o"), str(folder / "c.sqlite"), lease_ttl_ms=1_000)
    return create_home(settings, world=World(environ={}))[0]


def fill(home: Home, numbers: range, topic: str = "t", partition: int = 0) -> None:
    home.append(topic, [Event(value(n), timestamp=n) for n in numbers], partition=partition)


def an_archive(
    home: Home,
    name: str = "daily",
    source: str = "topic:t",
    start: Start = "earliest",
    **written_as: object,
) -> Archive:
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=source,
        kind="partition" if "parser" in written_as else "backup",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(**written_as)},  # type: ignore[arg-type]
        dead_share_max=1.0,
        start=start,
    )
    return create_archive(home.context, wanted)


def drive(home: Home, archive: Archive, **how: object) -> int:
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2))
    return Driver(home.context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]
