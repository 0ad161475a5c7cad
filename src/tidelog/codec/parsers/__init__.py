# ruff: noqa: PLC0415 - one lazy import for each kind
"""Parsers: determine from an event's contents the folder of an archive that it belongs in.

A parser works on whole Arrow batches. Every event gets either a path or the reason why it has none,
no path leads out of the archive's folder, and a time is never guessed. This room must not know
archives, files or where events come from.

``base`` has the interface, ``msgpack`` is the one to copy, ``time_folders`` makes names of times.
A parser is named ``kind:argument``, the kinds being those of ``PARSER_KINDS``. Other packages can
add a kind through the entry point group ``tidelog.parsers``; ``module:Class`` opens a class of your
own.
"""

from __future__ import annotations

from tidelog.codec.parsers.base import (
    Layout,
    LayoutSettings,
    ParsedValues,
    Parser,
    Spec,
    TimeParser,
    layout_settings,
    parts_of_events,
    used_layout,
)

__all__ = [
    "PARSER_KINDS",
    "Layout",
    "LayoutSettings",
    "ParsedValues",
    "Parser",
    "TimeParser",
    "layout_settings",
    "open_parser",
    "parts_of_events",
    "used_layout",
]

PARSER_KINDS = (
    "json",
    "iso8601",
    "date",
    "regex",
    "delimited",
    "msgpack",
    "avro",
    "protobuf",
    "thrift",
    "timestamp",
    "offset",
    "split",
)


def open_parser(text: str, settings: LayoutSettings) -> Parser:
    """Returns the parser of a name such as ``json:meta.at``.

    Raises ``InvalidError`` in one line for an unknown kind, a bad argument, a missing file, a
    pattern that does not compile, and a package that is not installed.
    """
    kind, _, argument = text.partition(":")
    spec = Spec(text, kind, argument)
    if kind == "split":
        return _open_split(spec, settings)
    if kind == "offset":
        from tidelog.codec.parsers.columns import open_offset

        return open_offset(spec)
    times = _open_times(spec)
    if times is not None:
        from tidelog.codec.parsers.time_folders import DatedParser

        return DatedParser(times, settings)
    from tidelog.codec.parsers.entry_points import open_foreign

    return open_foreign(spec, settings, PARSER_KINDS)


def _open_split(spec: Spec, settings: LayoutSettings) -> Parser:
    """Opens ``split:FIELD|PARSER``: folders by the field's value, then by the inner parser."""
    from tidelog.codec.parsers.columns import SplitParser
    from tidelog.codec.parsers.duckdb import Engine
    from tidelog.codec.parsers.json import JsonField

    field, _, inner = spec.argument.partition("|")
    if not (field and inner):
        raise spec.refused("names no parser inside: give split:field|json:timestamp")
    return SplitParser(JsonField(spec, field, Engine()), open_parser(inner, settings))


def _open_times(spec: Spec) -> TimeParser | None:
    if spec.kind in ("json", "iso8601", "date"):
        from tidelog.codec.parsers.json import open_json as opens
    elif spec.kind == "regex":
        from tidelog.codec.parsers.text_lines import open_regex as opens
    elif spec.kind == "delimited":
        from tidelog.codec.parsers.text_lines import open_delimited as opens
    elif spec.kind == "msgpack":
        from tidelog.codec.parsers.msgpack import open_msgpack as opens
    elif spec.kind == "avro":
        from tidelog.codec.parsers.avro import open_avro as opens
    elif spec.kind == "protobuf":
        from tidelog.codec.parsers.protobuf import open_protobuf as opens
    elif spec.kind == "thrift":
        from tidelog.codec.parsers.thrift import open_thrift as opens
    elif spec.kind == "timestamp":
        from tidelog.codec.parsers.columns import open_timestamp as opens
    else:
        return None
    return opens(spec)
