# ruff: noqa: PLC0415 - one lazy import for each kind
"""Parsers: determine from an event's contents the folder of an archive that it belongs in.

A parser works on whole Arrow batches. Every event gets either a path or the reason why it has none,
no path leads out of the archive's folder, and a time is never guessed. This room must not know
archives, files or where events come from.

``base`` has the interface, ``binary`` has the one to copy (MessagePack), ``folders`` makes names of
times. A parser is named ``kind:argument``, the kinds being those of ``PARSER_KINDS``.

Parsers of other packages come by the entry point group ``tidelog.parsers``, or as ``module:Class``.
Either is called with an argument (the text after a ``|``, or after an entry point's name) and the
folder settings, and returns a ``Parser`` or a ``TimeParser``. Its results are checked: no path
leads out of the archive's folder, and an event on which it raises is a dead letter.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import (
    FolderPaths,
    FolderSettings,
    ParsedValues,
    Parser,
    Spec,
    TimeParser,
    folder_settings,
    makes_dates,
    parts_of_events,
    path_problem,
    paths_of,
    shown,
    used_folder_settings,
)
from tidelog.codec.parsers.folders import DatedParser
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.address import nearest
from tidelog.plugins import find_plugins

__all__ = [
    "PARSER_KINDS",
    "FolderPaths",
    "FolderSettings",
    "ParsedValues",
    "Parser",
    "TimeParser",
    "changes_values",
    "either_parser",
    "folder_settings",
    "open_parser",
    "parts_of_events",
    "used_folder_settings",
]


def open_foreign(spec: Spec, settings: FolderSettings, known: Iterable[str]) -> Parser:
    """Returns a parser of another package. Raises ``InvalidError`` if there is none."""
    made, argument = _load_entry_point(spec) or _import_class(spec, known)
    try:
        parser = made(argument, settings)
    except InvalidError as exc:
        raise spec.refused(str(exc)) from exc
    except Exception as exc:  # foreign code
        raise spec.refused(f"it cannot be made ({_said(exc)})") from exc
    if not callable(getattr(parser, "lay_out", None)):
        if not callable(getattr(parser, "times", None)):
            raise spec.refused("it has neither lay_out(batch) nor times(batch): give it one")
        parser = DatedParser(parser, settings)
    return ForeignParser(parser)


class ForeignParser:
    """Checks that a foreign parser does what a parser promises."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.changes_values = changes_values(parser)

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        try:
            found = _check_paths(self._parser.lay_out(batch), batch.num_rows)
            if found.values is not None and not self.changes_values:
                raise InvalidError("it changes values, and has no attribute changes_values = True")
            return found
        except UnavailableError:
            raise
        except Exception as exc:  # noqa: BLE001 - foreign code; the event is kept, with the reason
            if batch.num_rows == 1:
                return _nowhere(f"parser failed: {_said(exc)}")
            if batch.num_rows == 0:
                return _join([])
            middle = batch.num_rows // 2
            return _join([self.lay_out(batch.slice(0, middle)), self.lay_out(batch.slice(middle))])


def _load_entry_point(spec: Spec) -> tuple[Any, str] | None:
    """Returns what an entry point of the kind's name loads, and its argument."""
    for entry in find_plugins("tidelog.parsers", spec.kind):
        try:
            return entry.load(), spec.argument
        except Exception as exc:  # foreign code
            raise spec.refused(
                f"entry point `{entry.value}` cannot be loaded ({_said(exc)})"
            ) from exc
    return None


def _import_class(spec: Spec, known: Iterable[str]) -> tuple[Any, str]:
    """Returns the class of ``module:Class|argument``, and its argument."""
    name, _, argument = spec.argument.partition("|")
    kinds = sorted(known)
    unknown = f"unknown kind `{shown(spec.kind)}`{nearest(spec.kind, kinds)}"
    remedy = f"give one of {', '.join(kinds)}, or module:Class"
    if not (name.isidentifier() and all(part.isidentifier() for part in spec.kind.split("."))):
        raise spec.refused(f"{unknown}: {remedy}")
    try:
        module = importlib.import_module(spec.kind)
    except Exception as exc:  # foreign code
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
        if missing and f"{spec.kind}.".startswith(f"{missing}."):
            raise spec.refused(f"{unknown}: {remedy}") from exc
        raise spec.refused(f"module `{spec.kind}` cannot be imported ({_said(exc)})") from exc
    if not callable(getattr(module, name, None)):
        raise spec.refused(
            f"{unknown}, and the module of that name has no class `{name}`: {remedy}"
        )
    return getattr(module, name), argument


def _check_paths(folders: FolderPaths, rows: int) -> FolderPaths:
    """Returns the result with a path or an error in every row, and no path that leads outside."""
    if not isinstance(folders, FolderPaths):
        raise InvalidError(f"it gave {type(folders).__name__}, not FolderPaths")
    values = None if folders.values is None else folders.values.cast(pa.binary())
    if values is not None and len(values) != rows:
        raise InvalidError(f"it gave {len(values)} values for {rows} events")
    texts = folders.paths.cast(pa.string())
    errors, times = folders.errors.cast(pa.string()), folders.times.cast(pa.int64())
    if not len(texts) == len(errors) == len(times) == rows:
        raise InvalidError(f"it gave {len(texts)} paths and {len(errors)} errors for {rows} events")
    texts = pc.if_else(pc.is_null(errors), texts, None)
    encoded = texts.dictionary_encode()
    problems = [path_problem(path) for path in encoded.dictionary.to_pylist()]
    found = ParsedValues(texts, errors)
    found = found.reject(pc.and_(pc.is_null(texts), pc.is_null(errors)), "parser gave no path")
    if any(problems):
        bad = pa.array([problem is not None for problem in problems]).take(encoded.indices)
        found = found.reject(bad, "parser gave a path that must not be", texts)
    names = [
        None if problem else path
        for path, problem in zip(encoded.dictionary.to_pylist(), problems, strict=True)
    ]
    kept = pc.if_else(pc.is_null(found.errors), times, None)
    return FolderPaths(paths_of(encoded.indices, names), found.errors, kept, values)


def _nowhere(error: str) -> FolderPaths:
    return FolderPaths(
        paths_of(pa.nulls(1, pa.int32()), []),
        pa.array([error], pa.string()),
        pa.nulls(1, pa.int64()),
    )


def _join(results: list[FolderPaths]) -> FolderPaths:
    """Returns consecutive results as one, with one dictionary."""
    paths = pa.chunked_array([each.paths.cast(pa.string()) for each in results], pa.string())
    errors = pa.chunked_array([each.errors for each in results], pa.string())
    times = pa.chunked_array([each.times for each in results], pa.int64())
    encoded = paths.combine_chunks().dictionary_encode()
    values = None
    if any(each.values is not None for each in results):
        # Rows without values have errors: a parser returns them for all events, or for none.
        some = [_values(each) for each in results]
        values = pa.chunked_array(some, pa.binary()).combine_chunks()
    return FolderPaths(encoded, errors.combine_chunks(), times.combine_chunks(), values)


def _values(folders: FolderPaths) -> pa.Array:
    return pa.nulls(len(folders.errors), pa.binary()) if folders.values is None else folders.values


def changes_values(parser: object) -> bool:
    """Returns whether files hold other values than the events, by what a parser says of itself."""
    return bool(getattr(parser, "changes_values", False))


def _said(exc: Exception) -> str:
    return shown(f"{type(exc).__name__}: {exc}")


_: type[Parser] = ForeignParser


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
    "first",
    "split",
    "topics",
)


def open_parser(text: str, settings: FolderSettings) -> Parser:
    """Returns the parser of a name such as ``json:meta.at``.

    Raises ``InvalidError`` in one line for an unknown kind, a bad argument, a missing file, a
    pattern that does not compile, and a package that is not installed.
    """
    kind, _, argument = text.partition(":")
    spec = Spec(text, kind, argument)
    if kind == "split":
        return _open_split(spec, settings)
    if kind == "topics":
        return _open_topics(spec, settings)
    if kind == "offset":
        from tidelog.codec.parsers.folders import open_offset

        return open_offset(spec)
    times = _open_first(spec) if kind == "first" else _open_times(spec)
    if times is not None:
        from tidelog.codec.parsers.folders import DatedParser

        return DatedParser(times, settings)

    return open_foreign(spec, settings, PARSER_KINDS)


def either_parser(one: str, other: str) -> str:
    """Returns the name of a parser that tries one, then the other; the other if there is none.

    >>> either_parser("json:at", "iso8601:at")
    'first:json:at||iso8601:at'
    """
    name = f"first:{one.removeprefix('first:')}||{other.removeprefix('first:')}"
    try:
        open_parser(name, FolderSettings())
    except InvalidError:
        return other
    return name


def _open_first(spec: Spec) -> TimeParser:
    """Opens ``first:PARSER||PARSER``: the time of the first parser that finds one."""
    from tidelog.codec.parsers.times import FirstTimes

    parsers: list[TimeParser] = []
    for part in spec.argument.split("||"):
        kind, _, argument = part.strip().partition(":")
        times = _open_times(Spec(part.strip(), kind, argument))
        if times is None:
            raise spec.refused(
                f"`{shown(kind)}` finds no time: give parsers that do, such as "
                "first:json:at||iso8601:at"
            )
        parsers.append(times)
    return FirstTimes(parsers)


def _open_split(spec: Spec, settings: FolderSettings) -> Parser:
    """Opens ``split:FIELD|PARSER``: folders by the field's value, then by the inner parser."""
    from tidelog.codec.parsers.folders import SplitParser
    from tidelog.codec.parsers.json import JsonField
    from tidelog.codec.parsers.times import Engine

    field, _, inner = spec.argument.partition("|")
    if not (field and inner):
        raise spec.refused("names no parser inside: give split:field|json:timestamp")
    return SplitParser(JsonField(spec, field, Engine()), open_parser(inner, settings))


def _open_topics(spec: Spec, settings: FolderSettings) -> Parser:
    """Opens ``topics:PATTERN=PARSER;PATTERN=PARSER``: the parser of the first pattern that fits."""
    parsers: list[tuple[str, Parser]] = []
    kinds = set()
    for part in spec.argument.split(";"):
        pattern, _, inner = part.partition("=")
        if not (pattern and inner) or inner.startswith("topics:"):
            raise spec.refused(
                "a part is not PATTERN=PARSER: give topics:clicks=json:at;orders-*=timestamp"
            )
        parsers.append((pattern, open_parser(inner, settings)))
        kinds.add(makes_dates(inner))
    if len(kinds) > 1:
        raise spec.refused("some of its parsers make dates, others offsets: give those of one sort")
    return TopicsParser(parsers)


class TopicsParser:
    """Lays out each topic's events by a parser of its own."""

    def __init__(self, parsers: Sequence[tuple[str, Parser]]) -> None:
        self._parsers = parsers
        # A batch may have events of several topics, of which some keep their values.
        self.changes_values = any(changes_values(parser) for _, parser in parsers)

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        encoded = batch.column("topic").dictionary_encode()
        topics, codes = encoded.dictionary.to_pylist(), encoded.indices
        if len(topics) == 1 and not codes.null_count:
            return self._of_topic(topics[0], batch)
        parts, rows = [], []
        for code, topic in [*enumerate(topics), (-1, None)]:
            chosen = pc.equal(codes.fill_null(-1), code)
            found = pc.indices_nonzero(chosen)
            if len(found):
                parts.append(self._of_topic(topic, batch.filter(chosen)))
                rows.append(found.cast(pa.int64()))
        whole = _join(parts)
        back = pc.sort_indices(pa.chunked_array(rows, pa.int64())) if rows else None
        if back is None:
            return whole
        paths = whole.paths.cast(pa.string()).take(back).dictionary_encode()
        values = None if whole.values is None else whole.values.take(back)
        return FolderPaths(paths, whole.errors.take(back), whole.times.take(back), values)

    def _of_topic(self, topic: str | None, batch: pa.RecordBatch) -> FolderPaths:
        for pattern, parser in self._parsers:
            if fnmatch.fnmatchcase(topic or "", pattern):
                found = parser.lay_out(batch)
                if self.changes_values and found.values is None:
                    return replace(found, values=batch.column("value"))
                return found
        error = f"no parser is named for topic `{shown(topic or '')}`"
        return _join([_nowhere(error)] * batch.num_rows)


def _open_times(spec: Spec) -> TimeParser | None:
    if spec.kind in ("json", "iso8601", "date"):
        from tidelog.codec.parsers.json import open_json as opens
    elif spec.kind == "regex":
        from tidelog.codec.parsers.times import open_regex as opens
    elif spec.kind == "delimited":
        from tidelog.codec.parsers.times import open_delimited as opens
    elif spec.kind == "msgpack":
        from tidelog.codec.parsers.binary import open_msgpack as opens
    elif spec.kind == "avro":
        from tidelog.codec.parsers.avro import open_avro as opens
    elif spec.kind == "protobuf":
        from tidelog.codec.parsers.binary import open_protobuf as opens
    elif spec.kind == "thrift":
        from tidelog.codec.parsers.binary import open_thrift as opens
    elif spec.kind == "timestamp":
        from tidelog.codec.parsers.folders import open_timestamp as opens
    else:
        return None
    return opens(spec)
