"""Parsers of other packages: by the entry point group ``tidelog.parsers``, or as ``module:Class``.

Either is called with an argument (the text after a ``|``, or after an entry point's name) and the
layout settings, and returns a ``Parser`` or a ``TimeParser``. Its results are checked: no path
leads out of the archive's folder, and an event on which it raises is a dead letter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.parsers.base import (
    Layout,
    LayoutSettings,
    ParsedValues,
    Parser,
    Spec,
    path_problem,
    paths_of,
    shown,
)
from tidelog.codec.parsers.time_folders import DatedParser
from tidelog.errors import InvalidError, UnavailableError
from tidelog.model.address import nearest
from tidelog.plugins import find_plugins

__all__ = ["ForeignParser", "open_foreign"]


def open_foreign(spec: Spec, settings: LayoutSettings, known: Iterable[str]) -> Parser:
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

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        try:
            return _check_layout(self._parser.lay_out(batch), batch.num_rows)
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


def _check_layout(layout: Layout, rows: int) -> Layout:
    """Returns the layout with a path or an error in every row, and no path that leads outside."""
    if not isinstance(layout, Layout):
        raise InvalidError(f"it gave {type(layout).__name__}, not a Layout")
    texts = layout.paths.cast(pa.string())
    errors, times = layout.errors.cast(pa.string()), layout.times.cast(pa.int64())
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
    return Layout(paths_of(encoded.indices, names), found.errors, kept)


def _nowhere(error: str) -> Layout:
    return Layout(
        paths_of(pa.nulls(1, pa.int32()), []),
        pa.array([error], pa.string()),
        pa.nulls(1, pa.int64()),
    )


def _join(layouts: list[Layout]) -> Layout:
    """Returns consecutive layouts as one, with one dictionary."""
    paths = pa.chunked_array([each.paths.cast(pa.string()) for each in layouts], pa.string())
    errors = pa.chunked_array([each.errors for each in layouts], pa.string())
    times = pa.chunked_array([each.times for each in layouts], pa.int64())
    encoded = paths.combine_chunks().dictionary_encode()
    return Layout(encoded, errors.combine_chunks(), times.combine_chunks())


def _said(exc: Exception) -> str:
    return shown(f"{type(exc).__name__}: {exc}")


_: type[Parser] = ForeignParser
