"""The settings of an archive as keyword arguments, and the records they become."""

from __future__ import annotations

from typing import Literal, TypedDict, cast

from tidelog.codec.parsers.base import used_layout
from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.model.archive import Archive, ArchiveFormat, Start
from tidelog.model.times import duration_ms

__all__ = ["ArchiveKind", "ArchiveOptions", "FormatOptions", "archive_format", "archive_record"]

ArchiveKind = Literal["backup", "partition"]
"""Every event unchanged, or in folders named by a parser."""

_LAYOUT = ("granularity", "time_zone", "date_format", "hour_format", "minute_format")
_FORMAT = ("mode", "delimiter", "key", "compression", "schema", "keep_value", "strict")


class FormatOptions(TypedDict, total=False):
    """How to write the files of a generation. None, or a missing key, means the default.

    For a backfill the default is the setting of the live generation.
    """

    parser: str | None  # names folders: json:meta.at, iso8601:created, timestamp, …
    transform: str | None  # module:function, from DataFrame to DataFrame; needs Spark
    format: str | None  # parquet (default), orc, avro, jsonlines, delimited or sequence
    codec: str | None  # default: the format's own
    granularity: str | None  # day (default), hour or minute
    time_zone: str | None  # time zone of the folders' days; default UTC
    date_format: str | None  # name of a day's folder: dt=%Y-%m-%d
    hour_format: str | None  # name of an hour's folder: hr=%H
    minute_format: str | None  # name of a minute's folder: min=%M
    schema: str | None  # typed columns, as DDL or JSON Schema
    keep_value: bool | None  # with a schema: keep the raw value next to the columns (default)
    strict: bool | None  # with a schema: whether unknown fields are errors
    mode: str | None  # of jsonlines: value or events
    delimiter: str | None  # of delimited: what follows each value
    key: str | None  # of sequence: offset or msgpack
    compression: str | None  # of sequence: block or record


class ArchiveOptions(FormatOptions, total=False):
    """How to create an archive."""

    to: str | None  # URL of its folder; default: archives/NAME of the home
    max_bytes: int  # close a file at this size; default 200 MB
    max_age: str | int  # or when its first event has waited this long; default 1h
    dead_share: float  # a larger share of dead letters stops a range; default 0.1
    start: Start  # earliest (default), or latest: the current ends of the source


def archive_format(
    options: FormatOptions, before: ArchiveFormat | None = None, source: str = ""
) -> ArchiveFormat:
    """Returns how to write files; a missing setting stays as ``before``."""
    was = before or ArchiveFormat()
    given = {name: value for name, value in options.items() if value is not None}
    layout = {name: cast(str, given[name]) for name in _LAYOUT if name in given}
    formats = {name: given[name] for name in _FORMAT if name in given}
    parser = _or_before(options.get("parser"), was.parser)
    inherited = {**was.layout, **layout}
    layout = {**used_layout(parser, inherited), **layout}  # never ignore a given setting
    same_format = options.get("format") in (None, was.format)
    return ArchiveFormat(
        parser=parser,
        transform=_or_before(options.get("transform"), was.transform),
        format=_or_before(options.get("format"), was.format),
        codec=_or_before(options.get("codec"), was.codec if same_format else ""),
        layout=layout,
        format_settings={**(was.format_settings if same_format else {}), **formats},
        source=source,
    )


def archive_record(
    context: Context, name: str, source: str, kind: ArchiveKind | None, options: ArchiveOptions
) -> Archive:
    """Returns the record of an archive to create. Raises ``InvalidError``."""
    store, root = context.store.url, f"archives/{name}"
    to = options.get("to")
    if to is not None:
        store, _, root = to.rstrip("/").rpartition("/")
        if not root or "?" in root or not store or store.endswith(":/"):
            raise InvalidError(
                f"archive `{name}`: --to `{to}`: give a folder below a store, such as "
                "s3://bucket/folder, without options"
            )
    made = archive_format(options)
    return Archive(
        name=name,
        incarnation=context.ids.new(),
        source=source,
        kind=kind or ("partition" if made.parser else "backup"),
        store=store,
        root=root,
        created_ms=context.clock.now_ms(),
        makings={1: made},
        max_bytes=options.get("max_bytes", 200_000_000),
        max_age_ms=duration_ms(options.get("max_age", "1h")),
        dead_share_max=options.get("dead_share", 0.1),
        start=options.get("start", "earliest"),
    )


def _or_before(given: str | None, before: str) -> str:
    return before if given is None else given
