"""What the tests of parsers share: batches of values, and layouts as plain lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any
from unicodedata import category

import pyarrow as pa

from tidelog.codec.event_batch import batch_of, with_position
from tidelog.codec.parsers import FolderPaths, FolderSettings, Parser, open_parser

UNPRINTABLE = {"Cc", "Cf", "Zl", "Zp"}  # would mar a line or a terminal
NOON_MS = 1_794_744_000_000  # 2026-11-15T12:00:00Z


def batch(values: Sequence[bytes | None], base: int = 0) -> pa.RecordBatch:
    """Events with these values, one a second from ``NOON_MS`` on."""
    rows = len(values)
    none = [None] * rows
    times = [NOON_MS + 1_000 * row for row in range(rows)]
    stored = batch_of([times, none, none, list(values), none, [()] * rows])
    return with_position(stored, "orders", 0, base)


def rows_of(layout: FolderPaths) -> list[str]:
    """For every row its path, or ``!`` and its error; checks that it is exactly one of them."""
    paths, errors, times = (
        layout.paths.to_pylist(),
        layout.errors.to_pylist(),
        layout.times.to_pylist(),
    )
    assert layout.paths.type == pa.dictionary(pa.int32(), pa.string())
    assert layout.errors.type == pa.string()
    assert layout.times.type == pa.int64()
    assert len(paths) == len(errors) == len(times)
    names = layout.paths.dictionary.to_pylist()
    assert len(set(names)) == len(names), "a dictionary holds no path twice"
    rows = []
    for path, error, time in zip(paths, errors, times, strict=True):
        assert (path is None) != (error is None), (path, error)
        assert error is None or time is None
        assert error is None or (error and not UNPRINTABLE & set(map(category, error))), error
        assert error is None or len(error) < 400, error
        rows.append(path if error is None else f"!{error}")
    return rows


def laid(text: str, values: Sequence[bytes | None], **settings: Any) -> list[str]:
    """How a parser lays out these values."""
    return laid_by(opened(text, FolderSettings(**settings)), values)


def opened(text: str, settings: FolderSettings) -> Parser:
    """Returns a parser; one that reads no file is opened once for all tests.

    A file of one test may have the path of an earlier test's file.
    """
    return open_parser(text, settings) if "/" in text else opened_once(text, settings)


opened_once = cache(open_parser)


def laid_by(parser: Parser, values: Sequence[bytes | None]) -> list[str]:
    """The layout, which must be the same when every event comes alone."""
    whole = rows_of(parser.lay_out(batch(values)))
    alone = [rows_of(parser.lay_out(batch([value])))[0] for value in values]
    assert whole == alone, "what is said of an event depends on that event alone"
    assert rows_of(parser.lay_out(batch([]))) == []
    return whole


def times_of(text: str, values: Sequence[bytes | None]) -> list[int | None]:
    """The times that a parser's paths are made from, in ms."""
    times = opened(text, FolderSettings()).lay_out(batch(values)).times
    return list(times.to_pylist())


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
