"""The options that say how an archive's files are made, shared by ``create`` and ``backfill``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.archive.archive import FormatOptions
from tidelog.errors import InvalidError

__all__ = ["format_of", "format_options"]

F = TypeVar("F", bound=Callable[..., Any])

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


def format_options(command: F) -> F:
    """Add them to a command, which passes what it gets to :func:`format_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def format_of(given: dict[str, Any]) -> FormatOptions:
    """Returns what was given of the options, as ``create`` and ``backfill`` of the API take it."""
    return FormatOptions(
        parser=given["parser"],
        transform=given["transform"],
        format=given["file_format"],
        codec=given["codec"],
        granularity=given["granularity"],
        time_zone=given["time_zone"],
        date_format=given["date_format"],
        hour_format=given["hour_format"],
        minute_format=given["minute_format"],
        schema=_text(given["schema"]),
        keep_value=given["keep_value"],
        strict=given["strict"],
        mode=given["mode"],
        delimiter=given["delimiter"],
        key=given["key"],
        compression=given["compression"],
    )


def _text(given: str | None) -> str | None:
    """What stands in a file, for ``@FILE``."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidError(f"--schema {given}: cannot be read ({exc}): give a text file") from exc
