"""The options that say how an archive's files are made, shared by ``create`` and ``backfill``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.codec.parsers.settings import used_layout
from tidelog.errors import InvalidError
from tidelog.model.archive import ArchiveFormat

__all__ = ["making_of", "making_options"]

F = TypeVar("F", bound=Callable[..., Any])

_LAYOUT = ("granularity", "time_zone", "date_format", "hour_format", "minute_format")
_FORMAT = ("mode", "delimiter", "key", "compression", "schema", "keep_value", "strict")

_OPTIONS = (
    click.option("--parser", metavar="P", help="json:meta.at, iso8601:created, timestamp, …"),
    click.option("--transform", metavar="M:F", help="A function from DataFrame to DataFrame."),
    click.option(
        "--format",
        "file_format",
        metavar="F",
        help="parquet (default), orc, avro, jsonlines, delimited or sequence.",
    ),
    click.option("--codec", metavar="C", help="Default: the format's own."),
    click.option("--granularity", metavar="G", help="day (default), hour or minute."),
    click.option("--time-zone", metavar="Z", help="Whose days the names tell; default UTC."),
    click.option("--date-format", metavar="T", help="Name of a day's folder: dt=%Y-%m-%d."),
    click.option("--hour-format", metavar="T", help="Name of an hour's folder: hr=%H."),
    click.option("--minute-format", metavar="T", help="Name of a minute's folder: min=%M."),
    click.option("--schema", metavar="S", help="Typed columns: DDL or JSON Schema, or @FILE."),
    click.option(
        "--keep-value/--drop-value",
        default=None,
        help="With a schema: keep the raw value beside the columns (default), or drop it. Without "
        "it no restore is possible, and fields that the schema does not name are lost.",
    ),
    click.option("--strict/--lenient", default=None, help="With a schema: are extra fields bad?"),
    click.option("--mode", metavar="M", help="Of jsonlines: value or events."),
    click.option("--delimiter", metavar="D", help="Of delimited: what stands after each value."),
    click.option("--key", metavar="K", help="Of sequence: offset or msgpack."),
    click.option("--compression", metavar="C", help="Of sequence: block or record."),
)


def making_options(command: F) -> F:
    """Add them to a command, which passes what it gets to :func:`making_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def making_of(
    given: dict[str, Any], before: ArchiveFormat | None = None, source: str = ""
) -> ArchiveFormat:
    """How files shall be made; what is not given stays as it was ``before``."""
    was = before or ArchiveFormat()
    layout = {name: given[name] for name in _LAYOUT if given[name] is not None}
    formats = {name: given[name] for name in _FORMAT if given[name] is not None}
    if "schema" in formats:
        formats["schema"] = _text(formats["schema"])
    parser = _chosen(given["parser"], was.parser)
    inherited = {**was.layout, **layout}
    layout = {**used_layout(parser, inherited), **layout}  # what was given is never passed over
    same_format = given["file_format"] in (None, was.format)
    return ArchiveFormat(
        parser=parser,
        transform=_chosen(given["transform"], was.transform),
        format=_chosen(given["file_format"], was.format),
        codec=_chosen(given["codec"], was.codec if same_format else ""),
        layout=layout,
        format_settings={**(was.format_settings if same_format else {}), **formats},
        source=source,
    )


def _chosen(given: str | None, before: str) -> str:
    return before if given is None else given


def _text(given: str) -> str:
    """What stands in a file, for ``@FILE``."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidError(f"--schema {given}: cannot be read ({exc}): give a text file") from exc
